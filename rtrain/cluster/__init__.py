"""Clusters: the connection to Ray, capacity, pricing, spot nodes, jobs, and the checks of a cluster file."""
