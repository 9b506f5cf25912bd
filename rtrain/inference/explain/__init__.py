"""Integrated gradients: attribution of a prediction to words and sentences."""
