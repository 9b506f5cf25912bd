"""The application in this process, with a real (tiny) model: how tests make it, call it, and hold its engine."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rtrain.batch import Encoded, Outputs
from rtrain.config import Serve
from rtrain.predict import Predictor
from serve.app import build_app
from tests.tiny import make_artifact

LABELS = ("a", "b", "c")
TEXT = "where is my parcel"
INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(make_artifact(tmp_path_factory.mktemp("artifact"), LABELS), threads=1)


@pytest.fixture
def app(predictor: Predictor) -> FastAPI:
    return build_app(predictor, Serve())


class Gate:
    """Holds the engine inside its calls until it is opened; counts the rows that got there."""

    def __init__(self, predictor: Predictor):
        self._run, self._open = predictor.run, threading.Event()
        self.rows = 0

    def __call__(self, encoded: list[Encoded], most_tokens: int) -> Outputs:
        self.rows += len(encoded)
        assert self._open.wait(10)
        return self._run(encoded, most_tokens)

    def open(self) -> None:
        self._open.set()

    async def entered(self) -> None:
        while not self.rows:
            await asyncio.sleep(0.001)


@pytest.fixture
def gate(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(predictor)
    monkeypatch.setattr(predictor, "run", gate)
    yield gate
    gate.open()


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def call(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with client(app) as session:
            return await session.request(method, path, **request)

    return asyncio.run(main())


def predict(app: FastAPI, inputs: object, **parameters: int) -> Any:
    document = {"inputs": inputs, "parameters": parameters} if parameters else {"inputs": inputs}
    response = call(app, "POST", "/predict", json=document)
    assert response.status_code == 200, response.text
    return response.json()


def error(type: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"type": type, "message": message, "field": field}}


def tensor(data: object, shape: list[int], datatype: str = "BYTES") -> dict[str, object]:
    return {"name": "text", "shape": shape, "datatype": datatype, "data": data}


def scores(answer: Any) -> list[float]:
    return [found["score"] for row in answer for found in sorted(row, key=lambda found: str(found["label"]))]
