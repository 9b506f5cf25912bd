"""Requests that cannot be answered: bad routes and bodies, hostile input, failures of the model."""

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from rtrain.config import ServeConfig
from rtrain.core.ragged import EncodedRow, Outputs
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from tests.support import serving
from tests.support.serving import TEXT, call, client, predict, refusal, scores

app, predictor = serving.app, serving.predictor  # fixtures


@pytest.mark.parametrize("declared", [None, "10", "0"])
def test_the_body_is_cut_off_at_its_limit_whatever_length_it_declares(app: FastAPI, declared: str | None) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 100_000
            yield b" " * 100_000

    headers = {} if declared is None else {"content-length": declared}
    response = call(app, "POST", "/predict", content=endless(), headers=headers)
    assert refusal(response) == (413, "too_large", None)
    assert sent <= 1_200_000


def test_an_unexpected_error_is_logged_and_answered_without_internals(
    app: FastAPI, predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise LookupError("/secret/path")

    monkeypatch.setattr(predictor.task, "decode", broken)
    response = call(app, "POST", "/predict", json={"inputs": TEXT}, headers={"x-request-id": "mine"})
    assert refusal(response) == (500, "internal", None)
    assert "secret" not in response.text
    assert response.headers["x-model-name"] == "tiny"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert [
        (record.levelno, record.getMessage()) for record in caplog.records if record.name == "serve.request_context"
    ] == [(logging.ERROR, "unexpected error in POST '/predict' (request mine)")]
    assert "/secret/path" in caplog.text


def test_a_model_that_answers_nan_is_an_error_of_the_server(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = predictor.run
    monkeypatch.setattr(predictor, "run", lambda encoded, **options: np.asarray(run(encoded, **options)) * float("nan"))
    response = call(build_app(predictor, ServeConfig()), "POST", "/predict", json={"inputs": TEXT})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")


def test_a_text_that_breaks_the_engine_fails_only_its_own_request(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, poison = predictor.run, predictor.encode(["poison"])[0].ids

    def breaking(encoded: list[EncodedRow], **options: int) -> Outputs:
        if any(row.ids == poison for row in encoded):
            raise MemoryError("a secret of the engine")
        return run(encoded, **options)

    monkeypatch.setattr(predictor, "run", breaking)
    app = build_app(predictor, ServeConfig())
    texts = ["one", "poison", "two", "three"]

    async def main() -> list[httpx.Response]:
        async with client(app) as session:
            return await asyncio.gather(*(session.post("/predict", json={"inputs": text}) for text in texts))

    responses = asyncio.run(main())
    assert [response.status_code for response in responses] == [200, 500, 200, 200]
    assert refusal(responses[1]) == (500, "internal", None)
    assert "secret" not in responses[1].text
    assert "a secret of the engine" in caplog.text
    expected = [predict(app, text)[0] for text in ("one", "two", "three")]
    assert scores([responses[place].json()[0] for place in (0, 2, 3)]) == pytest.approx(scores(expected), abs=1e-5)
