"""Sections of the report."""
