"""Integrated gradients: which words and sentences a prediction rests on."""
