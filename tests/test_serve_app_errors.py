"""Requests that cannot be answered: bad routes and bodies, hostile input, failures of the model."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from rtrain.batch import Encoded, Outputs
from rtrain.config import Serve
from rtrain.predict import Predictor
from serve.app import build_app
from tests import serving
from tests.serving import INFER, TEXT, call, client, error, predict, scores, tensor

app, predictor = serving.app, serving.predictor  # fixtures

NO_MODEL = ("no model of that name; this one is tiny", "name")
NO_TEXTS = "Input should be a text or a list of texts"
EMPTY = "List should have at least 1 item after validation, not 0"
EXTRA = "Extra inputs are not permitted"
ONE = tensor([TEXT], [1])

ROUTE_ERRORS = [
    ("GET", "/nowhere", 404, "GET /nowhere: Not Found", None),
    ("GET", "/predict/", 404, "GET /predict/: Not Found", None),
    ("GET", "/v2/models/other", 404, *NO_MODEL),
    ("GET", "/v2/models/other/ready", 404, *NO_MODEL),
    ("POST", "/v2/models/other/infer", 404, *NO_MODEL),
    ("GET", "/predict", 405, "GET /predict: Method Not Allowed", None),
    ("DELETE", "/", 405, "DELETE /: Method Not Allowed", None),
    ("POST", "/", 405, "POST /: Method Not Allowed; texts go to /predict", None),
]
BODY_ERRORS: list[tuple[str, object, int, str, str | None]] = [
    ("/predict", None, 422, "Input should be an object", None),
    ("/predict", [], 422, "Input should be an object", None),
    ("/predict", {}, 422, "Field required", "inputs"),
    ("/predict", {"inputs": 3}, 422, NO_TEXTS, "inputs"),
    ("/predict", {"inputs": None}, 422, NO_TEXTS, "inputs"),
    ("/predict", {"inputs": []}, 422, EMPTY, "inputs"),
    ("/predict", {"inputs": [TEXT, 3]}, 422, "Input should be a text", "inputs.1"),
    ("/predict", {"inputs": [[TEXT]]}, 422, "Input should be a text", "inputs.0"),
    ("/predict", {"inputs": {}}, 422, "Field required", "inputs.text"),
    ("/predict", {"inputs": [TEXT, {"text": 3}]}, 422, "Input should be a valid string", "inputs.1.text"),
    ("/predict", {"inputs": {"text": TEXT, "pair": TEXT}}, 422, EXTRA, "inputs.pair"),
    ("/predict", {"inputs": " \n"}, 422, "input 0 is empty; send a text", "inputs"),
    ("/predict", {"inputs": [TEXT, ""]}, 422, "input 1 is empty; send a text", "inputs.1"),
    ("/predict", {"inputs": TEXT, "input": TEXT}, 422, EXTRA, "input"),
    ("/predict", {"inputs": TEXT, "parameters": {"temperature": 1}}, 422, EXTRA, "parameters.temperature"),
    (
        "/predict",
        {"inputs": TEXT, "parameters": {"top_k": 0}},
        422,
        "Input should be greater than or equal to 1",
        "parameters.top_k",
    ),
    (
        "/predict",
        {"inputs": TEXT, "parameters": {"top_k": "3"}},
        422,
        "Input should be a valid integer",
        "parameters.top_k",
    ),
    ("/predict", {"inputs": [TEXT] * 9}, 413, "9 texts; send at most 8", "inputs"),
    ("/predict", {"inputs": "x" * 5000}, 413, "the body has more than 5000 bytes", None),
    (INFER, {"inputs": "x" * 5000}, 413, "the body has more than 5000 bytes", None),
    (INFER, {"inputs": [tensor([TEXT] * 9, [9])]}, 413, "9 texts; send at most 8", "inputs"),
    (INFER, {"inputs": []}, 422, EMPTY, "inputs"),
    (INFER, {"inputs": [ONE, ONE]}, 422, "two tensors of texts are named text and text_pair", "inputs.0.name"),
    (INFER, {"inputs": [ONE, ONE, ONE]}, 422, "List should have at most 2 items after validation, not 3", "inputs"),
    (INFER, {"inputs": [tensor([1.0], [1], "FP32")]}, 422, "Input should be 'BYTES'", "inputs.0.datatype"),
    (INFER, {"inputs": [tensor([TEXT], [2])]}, 422, "shape [2] does not fit 1 texts", "inputs.0.shape"),
    (INFER, {"inputs": [tensor([TEXT], [-1])]}, 422, "Input should be greater than or equal to 0", "inputs.0.shape.0"),
    (INFER, {"inputs": [tensor([], [0])]}, 422, "no text; send at least one", "inputs.0.data"),
    (INFER, {"inputs": [tensor(None, [1])]}, 422, "give the texts either as data or as binary data", "inputs.0.data"),
    (INFER, {"inputs": [tensor([TEXT, 3], [2])]}, 422, "Input should be a valid string", "inputs.0.data.1"),
    (INFER, {"inputs": [tensor([TEXT, " "], [2])]}, 422, "input 1 is empty; send a text", "inputs.0.data.1"),
    (
        INFER,
        {"inputs": [ONE], "outputs": [{"name": "a"}]},
        422,
        "Input should be 'label', 'score', 'labels', 'scores' or 'answer'",
        "outputs.0.name",
    ),
]
TYPES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 422: "invalid"}


@pytest.mark.parametrize(("method", "path", "status", "message", "field"), ROUTE_ERRORS)
def test_what_is_not_there_is_answered_in_the_error_form(
    app: FastAPI, method: str, path: str, status: int, message: str, field: str | None
) -> None:
    response = call(app, method, path)
    assert (response.status_code, response.json()) == (status, error(TYPES[status], message, field, path))
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(("path", "document", "status", "message", "field"), BODY_ERRORS)
def test_a_bad_body_is_answered_with_the_place_and_the_reason(
    predictor: Predictor, path: str, document: object, status: int, message: str, field: str | None
) -> None:
    app = build_app(predictor, Serve(max_inputs=8, max_body_bytes=5000))
    response = call(app, "POST", path, content=json.dumps(document).encode())
    assert (response.status_code, response.json()) == (status, error(TYPES[status], message, field, path))
    assert response.headers["content-type"] == "application/json"


HOSTILE = [
    (b"", 400),
    (b"{", 400),
    (b"inputs=hello", 400),
    (b'{"inputs": "a"} trailing', 400),
    (b"\xef\xbb\xbf" + b'{"inputs": "a"}', 400),
    ('{"inputs": "a"}'.encode("utf-16"), 400),
    ('{"inputs": "a"}'.encode("utf-16-le"), 400),
    (b'{"inputs": "\xff\xfe"}', 400),
    (b'{"inputs": "\\ud800"}', 400),
    (b'{"inputs": ["a", "\\udc00\\ud800"]}', 400),
    (b'{"inputs": "\x00"}', 400),
    (b"[" * 100_000, 413),
    (b'{"inputs": ' + b"[" * 1_000 + b"]" * 1_000 + b"}", 400),
    (b'{"inputs": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", 413),
    (b'{"a":' * 1_000 + b"1" + b"}" * 1_000, 400),
    (b'{"inputs": NaN}', 422),
    (b'{"inputs": "a", "parameters": {"top_k": NaN}}', 422),
    (b'{"inputs": "a", "parameters": {"top_k": 1e308}}', 422),
    (b'{"inputs": "a", "parameters": {"top_k": 1.0}}', 422),
    (b'{"inputs": "a", "parameters": {"top_k": true}}', 422),
    (b'{"inputs": "a", "parameters": {"top_k": -9223372036854775809}}', 422),
    (b'{"inputs": "a", "parameters": []}', 422),
    (b'{"inputs": "\\u0020\\t"}', 422),
    (b'{"inputs": "a", "' + b"k" * 10_000 + b'": 1}', 422),
    (b'{"inputs": "a", "\\u001b[31m\\n": 1}', 422),
    (b'{"inputs": ' + json.dumps(["a"] * 10_000).encode() + b"}", 413),
    (b'{"inputs": "' + b"a" * 1_000_001 + b'"}', 413),
    (b'{"inputs": "a", "parameters": {"top_k": 9223372036854775808}}', 200),
    (b'{"inputs": "\\u0000"}', 200),
    (b'{"inputs": "a\\u0000b"}', 200),
    (b'{"inputs": "first", "inputs": "second"}', 200),
    (b'{"inputs": "' + b"a" * 200_000 + b'"}', 200),
    (b'{"inputs": "' + b"a" * 200_001 + b'"}', 413),
    ('{"inputs": "' + "🙂" * 10_000 + '"}', 200),
    ('{"inputs": "\u202e\u05d0\u0301\u200b\ufeff\uffff"}', 200),
    (b'{"inputs": "<script>alert(1)</script>"}', 200),
]


@pytest.mark.parametrize(("body", "status"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bodies_get_a_client_error_or_a_right_answer(app: FastAPI, body: bytes | str, status: int) -> None:
    for path in ("/predict", INFER):
        response = call(app, "POST", path, content=body)
        if path == "/predict":
            assert response.status_code == status, response.text
        assert response.status_code < 500
        if response.status_code == 200:
            assert sum(score["score"] for score in response.json()[0]) == pytest.approx(1)
        else:
            told = response.json()["error"]
            assert isinstance(told, str) if path == INFER else sorted(told) == ["field", "message", "type"]
            assert len(response.content) < 500
    assert len(predict(app, "still here")) == 1


def test_a_byte_order_mark_is_named(app: FastAPI) -> None:
    response = call(app, "POST", "/predict", content='{"inputs": "a"}'.encode("utf-16"))
    message = "the body is not JSON: UTF-16 or a byte order mark; send plain UTF-8"
    assert response.json() == error("malformed", message)


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
    assert response.status_code == 413
    assert response.json() == error("too_large", "the body has more than 1000000 bytes")
    assert sent <= 1_200_000


def test_an_unexpected_error_is_logged_and_answered_without_internals(
    app: FastAPI, predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise LookupError("/secret/path")

    monkeypatch.setattr(predictor.task, "decode", broken)
    response = call(app, "POST", "/predict", json={"inputs": TEXT}, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert response.json() == error("internal", "internal error; the server's log has the cause")
    assert response.headers["x-model-name"] == "tiny"
    assert [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "serve.envelope"] == [
        (logging.ERROR, "unexpected error in POST '/predict' (request mine)")
    ]
    assert "/secret/path" in caplog.text


def test_a_model_that_answers_nan_is_an_error_of_the_server(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = predictor.run
    monkeypatch.setattr(predictor, "run", lambda encoded, **most: np.asarray(run(encoded, **most)) * float("nan"))
    response = call(build_app(predictor, Serve()), "POST", "/predict", json={"inputs": TEXT})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")


def test_a_text_that_breaks_the_engine_fails_only_its_own_request(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, poison = predictor.run, predictor.encode(["poison"])[0].ids

    def breaking(encoded: list[Encoded], **most: int) -> Outputs:
        if any(row.ids == poison for row in encoded):
            raise MemoryError("a secret of the engine")
        return run(encoded, **most)

    monkeypatch.setattr(predictor, "run", breaking)
    app = build_app(predictor, Serve())
    texts = ["one", "poison", "two", "three"]

    async def main() -> list[httpx.Response]:
        async with client(app) as session:
            return await asyncio.gather(*(session.post("/predict", json={"inputs": text}) for text in texts))

    responses = asyncio.run(main())
    assert [response.status_code for response in responses] == [200, 500, 200, 200]
    assert responses[1].json() == error("internal", "the model failed on this request")
    assert "a secret of the engine" in caplog.text
    expected = [predict(app, text)[0] for text in ("one", "two", "three")]
    assert scores([responses[place].json()[0] for place in (0, 2, 3)]) == pytest.approx(scores(expected), abs=1e-5)
