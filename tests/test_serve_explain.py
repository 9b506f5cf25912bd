"""Explanations over HTTP: beside the answers, never in their way, and refused where there can be none."""

import asyncio
import importlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from rtrain.config import Serve
from rtrain.inference.explain.explainer import Explainer, Explanation
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve import explanations
from serve.app import build_app
from tests import serving
from tests.serving import TEXT, call, client, refusal
from tests.tiny import CORPUS

jsonschema: Any = importlib.import_module("jsonschema")

app, predictor = serving.app, serving.predictor  # fixtures

WHY = {"inputs": TEXT, "parameters": {"explain": True}}


class Held:
    """Holds explanations until it is opened."""

    def __init__(self) -> None:
        self._explain, self._open, self.rows = Explainer.explain, threading.Event(), 0
        self.threads = set[str]()

    def __call__(self, explainer: Explainer, /, *arguments: Any, **named: Any) -> Explanation:
        self.rows += 1
        self.threads.add(threading.current_thread().name)
        assert self._open.wait(10)
        return self._explain(explainer, *arguments, **named)

    def open(self) -> None:
        self._open.set()

    async def entered(self) -> None:
        while not self.rows:
            await asyncio.sleep(0.001)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(Explainer, "explain", lambda *arguments, **named: held(*arguments, **named))
    yield held
    held.open()


def test_an_explanation_stands_beside_the_ordinary_answer(app: FastAPI, predictor: Predictor) -> None:
    texts: list[Input] = [TEXT, {"text": CORPUS[1], "text_pair": CORPUS[2]}]
    response = call(app, "POST", "/predict", json={"inputs": texts, "parameters": {"explain": True, "top_k": 1}})
    assert response.status_code == 200, response.text
    ordinary = call(app, "POST", "/predict", json={"inputs": texts, "parameters": {"top_k": 1}}).json()
    expected = Explainer(predictor)(texts)
    for found, answer, explanation in zip(response.json(), ordinary, expected, strict=True):
        assert found["answer"][0]["label"] == answer[0]["label"]
        assert found["answer"][0]["score"] == pytest.approx(answer[0]["score"], abs=1e-5)
        [why], [by_hand] = found["explanation"]["answers"], explanation.to_document()["answers"]
        assert why["label"] == answer[0]["label"]
        assert [word["word"] for word in why["words"]] == [word["word"] for word in by_hand["words"]]
        assert [word["attribution"] for word in why["words"]] == pytest.approx(
            [word["attribution"] for word in by_hand["words"]], abs=1e-4
        )
        assert why["completeness_error"] < 0.01


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"explain": True, "label": "d"}, "parameters.label"),
        ({"label": "a"}, "parameters"),
        ({"explain": 1}, "parameters.explain"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(app: FastAPI, parameters: dict[str, Any], field: str) -> None:
    response = call(app, "POST", "/predict", json={"inputs": TEXT, "parameters": parameters})
    assert refusal(response) == (422, "invalid", field)


def test_an_int8_artefact_answers_and_does_not_explain(predictor: Predictor) -> None:
    """The tiny float engine under the name of another: what is tested is who refuses, and when."""

    class Other:
        def __init__(self, engine: Any):
            self.logits = engine.logits

    int8 = Predictor.__new__(Predictor)
    int8.__dict__ |= predictor.__dict__
    int8.artifact = replace(predictor.artifact, engine="openvino", lineage={"parent": "abc123"})
    int8._engine = Other(predictor._engine)
    app = build_app(int8, Serve())
    assert call(app, "POST", "/predict", json={"inputs": TEXT}).status_code == 200
    response = call(app, "POST", "/predict", json=WHY)
    assert refusal(response) == (422, "invalid", "parameters.explain")
    assert app.state.service.batcher.stats.calls == 1, "the texts were answered in vain"


def test_ordinary_requests_do_not_wait_for_an_explanation(app: FastAPI, held: Held) -> None:
    async def main() -> None:
        async with client(app) as session:
            slow = asyncio.create_task(session.post("/predict", json=WHY))
            await held.entered()
            for _ in range(3):
                assert (await session.post("/predict", json={"inputs": TEXT})).status_code == 200
            assert not slow.done()
            held.open()
            assert (await slow).status_code == 200

    asyncio.run(main())
    [thread] = held.threads
    assert thread.startswith("explain")
    assert 'rtrain_explain_seconds_count{model="tiny"} 1.0' in app.state.service.exposition().splitlines()


def test_too_many_explanations_are_refused_and_the_rest_made(app: FastAPI, held: Held) -> None:
    most = explanations.MOST_WAITING

    async def main() -> None:
        async with client(app) as session:
            accepted = asyncio.create_task(session.post("/predict", json={**WHY, "inputs": [TEXT] * most}))
            await held.entered()
            refused = await session.post("/predict", json=WHY)
            assert (refusal(refused), refused.headers["retry-after"]) == ((503, "overloaded", None), "1")
            held.open()
            assert len((await accepted).json()) == most
            assert (await session.post("/predict", json=WHY)).status_code == 200

    asyncio.run(main())
    response = call(app, "POST", "/predict", json={**WHY, "inputs": [TEXT] * (most + 1)})
    assert refusal(response) == (413, "too_large", "inputs")


def test_an_explanation_past_its_deadline_is_answered_504_and_stops(predictor: Predictor, held: Held) -> None:
    app = build_app(predictor, Serve(deadline_s=0.3))
    waiting = app.state.service.explanations

    async def main() -> None:
        async with client(app) as session:
            late = await session.post("/predict", json={**WHY, "inputs": [TEXT, TEXT, TEXT]})
            assert refusal(late) == (504, "expired", None)
            assert waiting.waiting == 0
            held.open()
            await asyncio.to_thread(waiting._thread.shutdown)

    asyncio.run(main())
    assert held.rows == 1, "texts were explained that nobody awaits"
