"""The search over learning rate, aggregation frequency and other settings."""
