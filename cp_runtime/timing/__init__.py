"""Times of calls, as measured; and the choice of ranks for the next call."""
