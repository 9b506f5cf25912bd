"""Metrics, traces and drift of the inputs."""
