"""The token store: built by Ray Data tasks, committed once, read by every worker."""
