"""The contract over the application in this process; `test_serve_deployment` asks it over sockets."""

import pytest

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from tests.support.contract import EXCHANGES, SETTINGS, Exchange, check
from tests.support.serving import call


@pytest.fixture(scope="module")
def app(predictor: Predictor) -> ModelApp:
    return build_app(predictor, ServeConfig(**SETTINGS))


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_a_request_is_answered_as_promised(app: ModelApp, exchange: Exchange) -> None:
    check(exchange, call(app, exchange.method, exchange.path, content=exchange.body, headers=dict(exchange.headers)))
