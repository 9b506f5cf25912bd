"""Measurements on real data. They take minutes to hours and are no tests: a figure here is never an assertion."""
