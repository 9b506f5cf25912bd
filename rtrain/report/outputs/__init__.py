"""Sections of the report for one kind of output."""
