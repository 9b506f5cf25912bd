"""Progress on the terminal, messages of events, experiment trackers."""
