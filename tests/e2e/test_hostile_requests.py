"""Hostile requests: each gets an answer that blames the client, and good ones are answered as before."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from rtrain.config import ServeConfig
from rtrain.core.ragged import Head
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from serve.auth import api_keys
from serve.ingress import haproxy
from tests.support import hostile, serving
from tests.support.hostile import Case
from tests.support.serving import TEXT, predict
from tests.support.tiny import make_task_artifact

predictor = serving.predictor  # fixture

LONGEST_ERROR = 700
"""Maximum bytes of a reply, which may repeat a part of the request."""
ANSWERS = {200, 400, 401, 404, 405, 413, 415, 421, 422, 431}


class Asker:
    """Asks an application, one event loop for all, and judges each answer."""

    def __init__(self, app: ModelApp, runner: asyncio.Runner, key: str | None = None):
        self._app, self._runner = app, runner
        self._labels = app.service.predictor.task.name == "classification"
        self._headers = () if key is None else ((b"authorization", f"Bearer {key}".encode()),)
        self.statuses: Counter[int | None] = Counter()

    def __call__(self, case: Case) -> None:
        case = Case(**{**vars(case), "headers": (*case.headers, *self._headers)})
        reply = self._runner.run(hostile.ask(self._app, case))
        self.statuses[reply.status] += 1
        if reply.status is None:
            assert case.leaves
            return
        assert reply.status in ANSWERS, reply
        assert {name: reply.headers[name] for name in haproxy.SECURITY_HEADERS} == haproxy.SECURITY_HEADERS
        assert not any("\r" in value or "\n" in value for value in reply.headers.values())
        if reply.status >= 400:
            error = json.loads(reply.body)["error"]
            # A line of text for the Open Inference Protocol.
            assert error if isinstance(error, str) else sorted(error) == ["field", "message", "type"]
            assert len(reply.body) < LONGEST_ERROR
        elif case.path == "/predict" and self._labels:
            for answer in json.loads(reply.body):
                scores = answer["answer"] if isinstance(answer, dict) else answer  # explained, or not
                assert math.isclose(sum(entry["score"] for entry in scores), 1, abs_tol=1e-4) or b"top_k" in case.body


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def opened(predictor: Predictor, runner: asyncio.Runner) -> Asker:
    return Asker(build_app(predictor, ServeConfig()), runner)


@pytest.fixture
def locked(predictor: Predictor, runner: asyncio.Runner, tmp_path: Path) -> Asker:
    """Each case brings a right key."""
    key = api_keys.add_key(tmp_path / "keys.json", "shop")
    return Asker(build_app(predictor, ServeConfig(keys=str(tmp_path / "keys.json"))), runner, key)


def check(asker: Asker, cases: int, examples: int, step: int) -> None:
    """Every `step`-th case by hand, and so many by Hypothesis; at least `cases` in all."""
    for case in list(hostile.by_hand())[::step]:
        asker(case)

    @given(hostile.CASES)
    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: Case) -> None:
        asker(case)

    ask()
    assert sum(asker.statuses.values()) >= cases
    assert len(asker.statuses) >= 8, "the cases reach too little"


def test_hostile_requests_are_answered_as_the_client_s_fault(opened: Asker, predictor: Predictor) -> None:
    check(opened, 2000, 200, 1)
    assert len(predict(build_app(predictor, ServeConfig()), TEXT)) == 1


@pytest.mark.slow
def test_thousands_of_hostile_requests_are_answered_as_the_client_s_fault(opened: Asker, predictor: Predictor) -> None:
    check(opened, 5000, 4000, 1)
    assert len(predict(build_app(predictor, ServeConfig()), TEXT)) == 1


@pytest.mark.slow
def test_a_thousand_hostile_requests_with_a_key_are_too(locked: Asker) -> None:
    check(locked, 1000, 1000, 5)


TASKS: list[tuple[str, Head, dict[str, str]]] = [
    ("multi_label", Head(("a", "b", "c"), {"thresholds": dict.fromkeys(("a", "b", "c"), 0.45)}), {}),
    ("multi_head", Head(("x=a", "x=b", "y=c", "y=d"), {"heads": [["x", 2], ["y", 2]]}), {}),
    ("regression", Head(("score",), {"mean": 3.0, "std": 1.0, "lowest": 0.0, "highest": 6.0, "step": 1.0}), {}),
    ("span_qa", Head(("start", "end"), {"no_answer": True}), {"text": "question", "text_pair": "context"}),
    ("token_tags", Head(("O", "B-PER", "I-PER")), {}),
    ("extractive_summary", Head(("left out", "taken"), {"max_words": 8}), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "head", "data"), TASKS, ids=[task for task, _, _ in TASKS])
def test_models_of_every_task_bear_them(
    task: str, head: Head, data: dict[str, str], runner: asyncio.Runner, tmp_path: Path
) -> None:
    predictor = Predictor.load(make_task_artifact(tmp_path, task, head, data=data), threads=1)
    check(Asker(build_app(predictor, ServeConfig()), runner), 2500, 500, 1)


@pytest.mark.slow
def test_requests_made_from_the_openapi_document_get_what_it_promises(predictor: Predictor) -> None:
    """Right ones and wrong ones, by schemathesis: no 5xx; status, headers and body as documented; a method or a body
    that is not documented is refused."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

    document: Any = schemathesis.openapi.from_asgi("/openapi.json", build_app(predictor, ServeConfig()))
    # No schema says which labels there are, nor that a text is not empty.
    excluded = [CHECKS.get_one("positive_data_acceptance")]
    calls = Counter[str]()

    def ask(case: Any) -> None:
        status = case.call_and_validate(excluded_checks=excluded).status_code
        calls[f"{case.operation.label} {case.meta.generation.mode} {status}"] += 1

    examples = settings(max_examples=550, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        for operation in (operation_result.ok() for operation_result in document.get_all_operations()):
            if mode == GenerationMode.POSITIVE or operation.method == "post":  # without a body nothing can be wrong
                name = {"name": "tiny"} if "{name}" in operation.path else None
                cases: Any = given(operation.as_strategy(mode, path_parameters=name))
                examples(cases(ask))()
    assert sum(calls.values()) >= 2000
