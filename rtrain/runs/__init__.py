"""A run on Ray: opened, started, watched, started again, finished."""
