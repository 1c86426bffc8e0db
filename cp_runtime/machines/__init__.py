"""Other machines: how they join, and how ranks there are reached. Before someone asks, nothing listens and no thread runs."""
