"""The application in this process, with a real (tiny) model: how tests make it, call it, and hold its engine."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp

from rtrain.config import ServeConfig
from rtrain.core.ragged import EncodedRow, Head, Outputs
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from tests.support.tiny import make_artifact, make_task_artifact

LABELS = ("a", "b", "c")
TEXT = "where is my parcel"
INFER = "/v2/models/tiny/infer"
HEADS = {
    "classification": Head(LABELS),
    "multi_label": Head(LABELS, {"thresholds": dict.fromkeys(LABELS, 0.5)}),
    "multi_head": Head(
        ("intent=buy", "intent=sell", "mood=bad", "mood=fair", "mood=good"), {"heads": [["intent", 2], ["mood", 3]]}
    ),
    "regression": Head(("score",), {"mean": 6.0, "std": 1.5, "lowest": 1.0, "highest": 9.0, "step": 0.5}),
    "token_tags": Head(("O", "B-ORG", "B-PER", "I-ORG", "I-PER")),
    "span_qa": Head(("start", "end"), {"no_answer": False}),
    "extractive_summary": Head(("left out", "taken"), {"max_words": 30}),
    "masked_lm": Head((), {"mask": "[MASK]", "mask_id": 4, "special": [0, 1, 2, 3, 4], "vocabulary": 300}),
}
"""Head of a model, by task."""


def predictor_of(folder: Path, task: str) -> Predictor:
    """A loaded artifact of that task with random weights."""
    return Predictor.load(make_task_artifact(folder, task, HEADS[task], seed=1), threads=1)


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """The application behind a real server on a free port of loopback, in a thread; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, loop="asyncio", ws="none", lifespan="on", log_level="warning"))
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has not started"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="session")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(make_artifact(tmp_path_factory.mktemp("artifact"), LABELS), threads=1)


@pytest.fixture
def app(predictor: Predictor) -> ModelApp:
    return build_app(predictor, ServeConfig())


class Gate:
    """Holds the engine inside its calls until it is opened; counts the rows that got there."""

    def __init__(self, predictor: Predictor):
        self._run, self._open = predictor.run, threading.Event()
        self.rows = 0

    def __call__(self, encoded: list[EncodedRow], max_tokens: int) -> Outputs:
        self.rows += len(encoded)
        assert self._open.wait(10)
        return self._run(encoded, max_tokens)

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


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def call(app: ASGIApp, method: str, path: str, **request: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with client(app) as session:
            return await session.request(method, path, **request)

    return asyncio.run(main())


def predict(app: ModelApp, inputs: object, **parameters: int) -> Any:
    document = {"inputs": inputs, "parameters": parameters} if parameters else {"inputs": inputs}
    response = call(app, "POST", "/predict", json=document)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, type and field of an answer in the error form; its type is empty under /v2."""
    error = response.json()["error"]
    if isinstance(error, str):
        return response.status_code, "", error.partition(": ")[0]
    return response.status_code, error["type"], error["field"]


def tensor(data: object, shape: list[int], datatype: str = "BYTES") -> dict[str, object]:
    return {"name": "text", "shape": shape, "datatype": datatype, "data": data}


def scores(answer: Any) -> list[float]:
    return [entry["score"] for row in answer for entry in sorted(row, key=lambda entry: str(entry["label"]))]
