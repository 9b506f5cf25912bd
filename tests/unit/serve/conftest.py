"""Fixtures of the endpoint's tests."""

from tests.support.serving import app, gate, predictor

__all__ = ["app", "gate", "predictor"]
