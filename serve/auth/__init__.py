"""API keys, rate limits, and the checks before an endpoint starts."""
