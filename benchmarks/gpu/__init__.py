"""What a GPU must show, in one command: `python -m benchmarks.gpu --help`."""
