"""Forecasts before a run: memory, throughput, hours and cost."""
