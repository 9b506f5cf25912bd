"""Requests and replies on the wire."""
