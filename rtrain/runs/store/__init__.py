"""Runs on disk: listed, cleaned, exported, imported."""
