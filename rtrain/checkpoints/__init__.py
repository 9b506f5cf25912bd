"""Checkpoints: a folder each, written beside training, copied to storage, verified before use."""
