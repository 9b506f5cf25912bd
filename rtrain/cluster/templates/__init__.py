"""Cluster files for each cloud, rendered from one template."""
