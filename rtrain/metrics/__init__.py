"""Scores of a split, of its slices and of its bootstrap samples: pure functions."""
