"""The token store: its shards are written by tasks, committed once, and read by every worker."""
