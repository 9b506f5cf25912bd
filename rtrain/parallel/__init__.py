"""Strategies: how a model and its gradients are distributed over workers."""
