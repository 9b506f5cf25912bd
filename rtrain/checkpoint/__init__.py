"""Checkpoints of a run: their format, the thread that saves them, and their copy in object storage."""
