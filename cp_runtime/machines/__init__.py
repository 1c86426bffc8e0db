"""Other machines: how they join, and how ranks there are reached. Before someone asks for them there is no listener, thread or
process, and torch elastic is not imported."""
