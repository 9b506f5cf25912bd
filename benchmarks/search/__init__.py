"""Gain and cost of a search of settings: `python -m benchmarks.search`."""
