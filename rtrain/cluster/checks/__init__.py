"""Rules for cluster files that no other linter has."""
