"""Checks and measurements on a GPU, in one command: `python -m benchmarks.gpu --help`."""
