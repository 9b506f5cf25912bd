"""Two models on the same rows: paired scores, significance, latency, and the gate."""
