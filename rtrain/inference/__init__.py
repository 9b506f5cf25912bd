"""Artifacts and the predictor that answers with one."""
