"""Copies of training rows: with noise, and written anew by a model."""
