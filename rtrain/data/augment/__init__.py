"""Augmented copies of training rows."""
