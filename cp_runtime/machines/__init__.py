"""Other machines: how they join, and how ranks there are reached. Nothing here is imported before someone asks for it."""
