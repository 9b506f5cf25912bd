"""What a user sees while a command runs: progress on the terminal, experiment trackers, the peak of memory."""
