"""Score, size and latency of smaller models: `python -m benchmarks.compress`."""
