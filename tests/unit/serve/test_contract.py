"""The contract over the application in this process; `test_serve_deployment` asks it over sockets."""

import pytest
from fastapi import FastAPI

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from tests.support import serving
from tests.support.contract import EXCHANGES, SETTINGS, Exchange, check
from tests.support.serving import call

predictor = serving.predictor  # fixture


@pytest.fixture(scope="module")
def app(predictor: Predictor) -> FastAPI:
    return build_app(predictor, ServeConfig(**SETTINGS))


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_a_request_is_answered_as_promised(app: FastAPI, exchange: Exchange) -> None:
    check(exchange, call(app, exchange.method, exchange.path, content=exchange.body, headers=dict(exchange.headers)))
