"""Runs as things: listed, cleaned, carried to another machine. Nothing here uses Ray."""
