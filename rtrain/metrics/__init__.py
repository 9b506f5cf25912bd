"""Scores of a whole split, of its slices and of its resamples: pure functions of arrays and lists."""
