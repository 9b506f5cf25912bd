"""Explanations over HTTP: beside the answers, never in their way, and refused where there can be none."""

import asyncio
import importlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rtrain.config import ServeConfig
from rtrain.inference.explainer import Explainer, RowExplanation
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve import model
from serve.app import ModelApp, build_app
from tests.support.serving import TEXT, call, client, refusal
from tests.support.tiny import CORPUS

jsonschema: Any = importlib.import_module("jsonschema")

WHY = {"inputs": TEXT, "parameters": {"explain": True}}


class HeldExplainer:
    """Holds explanations until it is opened."""

    def __init__(self) -> None:
        self._explain, self._open, self.rows = Explainer.explain, threading.Event(), 0
        self.threads = set[str]()

    def __call__(self, explainer: Explainer, /, *arguments: Any, **keywords: Any) -> RowExplanation:
        self.rows += 1
        self.threads.add(threading.current_thread().name)
        assert self._open.wait(10)
        return self._explain(explainer, *arguments, **keywords)

    def open(self) -> None:
        self._open.set()

    async def entered(self) -> None:
        while not self.rows:
            await asyncio.sleep(0.001)


@pytest.fixture
def held_explainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldExplainer]:
    held_explainer = HeldExplainer()
    monkeypatch.setattr(Explainer, "explain", lambda *arguments, **keywords: held_explainer(*arguments, **keywords))
    yield held_explainer
    held_explainer.open()


def test_an_explanation_stands_beside_the_ordinary_answer(app: ModelApp, predictor: Predictor) -> None:
    texts: list[Input] = [TEXT, {"text": CORPUS[1], "text_pair": CORPUS[2]}]
    response = call(app, "POST", "/predict", json={"inputs": texts, "parameters": {"explain": True, "top_k": 1}})
    assert response.status_code == 200, response.text
    ordinary = call(app, "POST", "/predict", json={"inputs": texts, "parameters": {"top_k": 1}}).json()
    expected = Explainer(predictor)(texts)
    for reply, answer, explanation in zip(response.json(), ordinary, expected, strict=True):
        assert reply["answer"][0]["label"] == answer[0]["label"]
        assert reply["answer"][0]["score"] == pytest.approx(answer[0]["score"], abs=1e-5)
        [why], [by_hand] = reply["explanation"]["answers"], explanation.to_document()["answers"]
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
def test_a_wish_that_cannot_be_met_is_refused(app: ModelApp, parameters: dict[str, Any], field: str) -> None:
    response = call(app, "POST", "/predict", json={"inputs": TEXT, "parameters": parameters})
    assert refusal(response) == (422, "invalid", field)


def test_an_int8_artifact_answers_and_does_not_explain(predictor: Predictor) -> None:
    """The tiny float engine under another name: the test is about who refuses, and when."""

    class Other:
        def __init__(self, engine: Any):
            self.logits = engine.logits

    int8 = Predictor.__new__(Predictor)
    int8.__dict__ |= predictor.__dict__
    int8.artifact = replace(predictor.artifact, engine="openvino", lineage={"parent": "abc123"})
    int8._engine = Other(predictor._engine)
    app = build_app(int8, ServeConfig())
    assert call(app, "POST", "/predict", json={"inputs": TEXT}).status_code == 200
    response = call(app, "POST", "/predict", json=WHY)
    assert refusal(response) == (422, "invalid", "parameters.explain")
    assert app.service.batcher.stats.calls == 1, "the texts were answered in vain"


def test_ordinary_requests_do_not_wait_for_an_explanation(app: ModelApp, held_explainer: HeldExplainer) -> None:
    async def main() -> None:
        async with client(app) as session:
            slow = asyncio.create_task(session.post("/predict", json=WHY))
            await held_explainer.entered()
            for _ in range(3):
                assert (await session.post("/predict", json={"inputs": TEXT})).status_code == 200
            assert not slow.done()
            held_explainer.open()
            assert (await slow).status_code == 200

    asyncio.run(main())
    [thread] = held_explainer.threads
    assert thread.startswith("explain")
    assert 'rtrain_explain_seconds_count{model="tiny"} 1.0' in app.service.render_metrics().splitlines()


def test_too_many_explanations_are_refused_and_the_rest_made(app: ModelApp, held_explainer: HeldExplainer) -> None:
    max_texts = model.MAX_QUEUED_TEXTS

    async def main() -> None:
        async with client(app) as session:
            accepted = asyncio.create_task(session.post("/predict", json={**WHY, "inputs": [TEXT] * max_texts}))
            await held_explainer.entered()
            refused = await session.post("/predict", json=WHY)
            assert (refusal(refused), refused.headers["retry-after"]) == ((503, "overloaded", None), "1")
            held_explainer.open()
            assert len((await accepted).json()) == max_texts
            assert (await session.post("/predict", json=WHY)).status_code == 200

    asyncio.run(main())
    response = call(app, "POST", "/predict", json={**WHY, "inputs": [TEXT] * (max_texts + 1)})
    assert refusal(response) == (413, "too_large", "inputs")


def test_an_explanation_past_its_deadline_is_answered_504_and_stops(
    predictor: Predictor, held_explainer: HeldExplainer
) -> None:
    app = build_app(predictor, ServeConfig(request_timeout_s=0.3))
    waiting = app.service.explanations

    async def main() -> None:
        async with client(app) as session:
            late = await session.post("/predict", json={**WHY, "inputs": [TEXT, TEXT, TEXT]})
            assert refusal(late) == (504, "deadline_exceeded", None)
            assert waiting.queued_texts == 0
            held_explainer.open()
            await asyncio.to_thread(waiting._thread.shutdown)

    asyncio.run(main())
    assert held_explainer.rows == 1, "texts were explained that nobody awaits"
