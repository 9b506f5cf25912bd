"""A run on Ray: prepared, started, watched, restarted, finished."""
