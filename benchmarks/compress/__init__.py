"""What a smaller model costs in score, bytes and time: `python -m benchmarks.compress`."""
