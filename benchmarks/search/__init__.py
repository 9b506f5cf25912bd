"""What a search of settings finds, and what it costs: `python -m benchmarks.search`."""
