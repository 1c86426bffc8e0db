"""Times of calls: measured, and predicted by the cost model; and the choice of ranks for the next call."""
