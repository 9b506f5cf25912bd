"""Runs beside each other: what was set otherwise, what was answered otherwise, and whether that is more than chance."""
