"""Predictions for whole files."""
