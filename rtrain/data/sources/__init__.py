"""Source files: found, divided among tasks, and hashed."""
