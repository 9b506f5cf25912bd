"""Shadow test and canary in one replica, with real (tiny) models; counters outlive versions."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from rtrain.core.ragged import Head
from rtrain.inference.predictor import Predictor
from rtrain.tasks import base
from serve.app import ModelApp, build_app
from serve.grpc import INFER_ROUTE
from serve.middleware import RequestContext
from serve.model import ModelService
from serve.observability.metrics import Telemetry
from serve.registry import CanaryPlan, ModelSlot
from serve.rollout.canary import same_prediction
from serve.schemas.predict import RequestError
from tests.support.serving import HEADS, predictor_of
from tests.support.tiny import CORPUS, make_artifact

Check = Callable[[ModelSlot, httpx.AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("trial")
    first, second = (make_artifact(root / str(seed), seed=seed) for seed in (0, 1))
    return str(first), str(second)


def run(check: Check) -> None:
    settings = ServeConfig()

    async def main() -> None:
        lasting = Telemetry()

        async def make(folder: Path) -> ModelApp:
            return build_app(await asyncio.to_thread(Predictor.load, folder, 1), settings, None, lasting)

        versions = ModelSlot(make)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(versions), base_url="http://localhost") as client:
            await check(versions, client)
        versions.drop_candidate()
        if versions.current is not None:
            versions.current.service.close()

    asyncio.run(main())


async def ask(client: httpx.AsyncClient, path: str = "/predict") -> str:
    """The version that has answered."""
    content = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [CORPUS[0]]}]}
    answer = await client.post(path, json={"inputs": CORPUS[0]} if path == "/predict" else content)
    assert answer.status_code == 200
    return answer.headers["x-model-version"]


def versions_of(folders: tuple[str, str]) -> tuple[str, str]:
    old, new = (rtrain.inference.artifact.read_artifact(Path(folder)).version for folder in folders)
    return old, new


def test_a_candidate_answers_texts_unseen_and_then_requests_by_weight(folders: tuple[str, str]) -> None:
    first, second = folders
    old, new = versions_of(folders)

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        await versions.start_canary(CanaryPlan(second, 1.0, 1000.0, 0.0))
        assert versions.shadow_test is not None
        assert {await ask(client) for _ in range(20)} == {old}
        while versions.shadow_test.collect_stats().rows < 20:
            await asyncio.sleep(0.01)
        stats = versions.shadow_test.collect_stats()
        # Both have random weights: they agree on this text always or never.
        same = (await answer_of(versions)) == (await answer_of(versions, candidate=True))
        assert (stats.same_answers, stats.slower_rows, stats.failed_rows) == (20 * same, 0, 0)
        assert (stats.requests, stats.baseline_requests) == (0, 20)
        assert versions.shadow_test.ratio is not None
        await versions.start_canary(CanaryPlan(second, 0.0, 1000.0, 0.5))
        counts = Counter([await ask(client) for _ in range(60)])
        assert set(counts) == {old, new}
        assert min(counts.values()) > 10
        assert versions.shadow_test.collect_stats().requests == counts[new]
        # A request that names a version gets it; a request without inference goes to the current version.
        for name in (old, new):
            assert {await ask(client, f"/v2/models/tiny/versions/{name}/infer") for _ in range(5)} == {name}
        assert {(await client.get("/info")).headers["x-model-version"] for _ in range(10)} == {old}
        await versions.switch_to(second)
        assert versions.status()["candidate"] is None
        assert {await ask(client) for _ in range(5)} == {new}

    run(check)


async def answer_of(versions: ModelSlot, candidate: bool = False) -> str:
    version = versions.candidate if candidate else versions.current
    assert version is not None
    label: str = version.service.predictor([CORPUS[0]])[0][0]["label"]
    return label


def test_a_candidate_on_trial_is_asked_by_one_thread(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has one place for its input and one for its output."""
    first, second = folders
    _, new = versions_of(folders)

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        await versions.start_canary(CanaryPlan(second, 1.0, 1000.0, 1.0))
        assert versions.candidate is not None
        assert versions.shadow_test is not None
        engine = versions.candidate.service.predictor._engine
        logits, at_a_time = engine.logits, list[int]()
        inside = 0

        def slow(inputs: Any) -> Any:
            nonlocal inside
            inside += 1
            at_a_time.append(inside)
            time.sleep(0.005)
            inside -= 1
            return logits(inputs)

        monkeypatch.setattr(engine, "logits", slow)
        for _ in range(10):
            versions.shadow_test.submit([CORPUS[0]])
            assert {*await asyncio.gather(ask(client), ask(client))} == {new}
        while versions.shadow_test.collect_stats().rows < 10:
            await asyncio.sleep(0.01)
        assert max(at_a_time) == 1

    run(check)


def test_a_candidate_that_fails_unseen_is_counted_and_hurts_nobody(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folders
    old, _ = versions_of(folders)

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        await versions.load_candidate(second)
        assert versions.candidate is not None

        def fails(*arguments: Any) -> Any:
            raise RuntimeError("no answer")

        monkeypatch.setattr(versions.candidate.service, "run_engine", fails)
        await versions.start_canary(CanaryPlan(second, 1.0, 1.25, 0.0))
        assert versions.shadow_test is not None
        assert await ask(client) == old
        while not versions.shadow_test.collect_stats().failed_rows:
            await asyncio.sleep(0.01)
        assert await ask(client) == old

    run(check)


def test_a_dropped_candidate_answers_what_it_has_accepted(folders: tuple[str, str]) -> None:
    first, second = folders
    old, new = versions_of(folders)

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        await versions.start_canary(CanaryPlan(second, 0.0, 1.25, 1.0))
        sent = asyncio.Event()

        async def body() -> Any:
            yield b'{"inputs": '
            sent.set()
            await asyncio.sleep(0.1)
            yield b'"hello"}'

        slow = asyncio.create_task(client.post("/predict", content=body()))
        await sent.wait()
        await versions.start_canary(CanaryPlan(second, 0.0, 1.25, 1.0))  # again is harmless
        versions.drop_candidate()
        assert await ask(client) == old
        answer = await slow
        assert (answer.status_code, answer.headers["x-model-version"]) == (200, new)

    run(check)


def test_a_version_is_judged_by_questions_that_it_answered_or_failed_on(folders: tuple[str, str]) -> None:
    service = ModelService(Predictor.load(Path(folders[0]), 1), ServeConfig())
    for status in (200, 500, 503, 504, 401, 404, 413, 422, 429, 499):
        service.record_response("/predict", status, 0.1)
    for route in ("/info", "/v2/health/ready", "/metrics", "/v2/models/{name}/versions/{version}"):
        service.record_response(route, 200, 0.1)
    assert (service.requests, service.errors) == (4, 3)
    for route in ("/v2/models/{name}/infer", INFER_ROUTE):
        service.record_response(route, 504, 0.1)
    assert (service.requests, service.errors) == (6, 5)
    service.record_response("/v2/models/{name}/versions/{version}/infer", 500, 0.1)  # a client has chosen it
    service.record_response(INFER_ROUTE, 500, 0.1, is_canary_sample=False)
    assert (service.requests, service.errors) == (6, 5)
    service.close()


def test_clients_do_not_judge_a_version_by_their_own_deadlines(folders: tuple[str, str]) -> None:
    """gRPC carries a client's deadline, and a body that is sent slowly uses the endpoint's."""
    service = ModelService(Predictor.load(Path(folders[0]), 1), ServeConfig())

    async def ask_within(seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        with pytest.raises(RequestError) as late:
            await service.answer_texts([CORPUS[0]], deadline, "inputs.{}".format, {"top_k": None}, RequestContext("a"))
        service.record_response(INFER_ROUTE, late.value.status, 0.1)

    asyncio.run(ask_within(0.0))
    assert (service.requests, service.errors) == (0, 0)
    service.record_response(INFER_ROUTE, 504, 0.1)  # by the endpoint's own deadline
    assert (service.requests, service.errors) == (1, 1)
    service.close()


def test_counters_last_over_versions_and_name_each(folders: tuple[str, str]) -> None:
    first, second = folders
    old, new = versions_of(folders)

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        for _ in range(3):
            await ask(client)
        await versions.switch_to(second)
        for _ in range(2):
            await ask(client)
        text = (await client.get("/metrics")).text
        assert 'rtrain_requests_total{model="tiny",route="/predict",status="200"} 5.0' in text
        samples = dict(
            re.findall(r'rtrain_version_requests_total\{model="tiny",status="200",version="(\w+)"\} (\S+)', text)
        )
        assert samples == {old: "3.0", new: "2.0"}
        assert text.count("# TYPE rtrain_queued_inputs gauge") == 1

    run(check)


@pytest.mark.parametrize("task", sorted(HEADS))
def test_an_answer_agrees_with_itself_and_not_with_another(task: str, tmp_path: Path) -> None:
    predictor = predictor_of(tmp_path, task)
    texts = predictor.task.golden_inputs([*CORPUS], predictor.head)
    answers = predictor(texts)
    head = predictor.head
    for answer in answers:
        assert same_prediction(predictor.task, head, answer, head, answer)
    agreed = [same_prediction(predictor.task, head, answers[0], head, answer) for answer in answers]
    assert not all(agreed) or task in CLOSE


@pytest.mark.parametrize(
    ("spam", "rude", "agreed"),
    [
        (0.45, 0.10, True),  # by the other version's threshold it would have given no label
        (0.80, 0.45, False),  # by the other version's threshold it would have given spam alone
    ],
)
def test_of_several_labels_each_version_gives_those_from_its_own_threshold_on(
    spam: float, rude: float, agreed: bool
) -> None:
    task = base.get_task("multi_label")
    old, new = (
        Head(("rude", "spam"), {"thresholds": dict.fromkeys(("rude", "spam"), threshold)}) for threshold in (0.5, 0.4)
    )
    first, second = (
        [{"label": "spam", "score": spam_score}, {"label": "rude", "score": rude_score}]
        for spam_score, rude_score in ((0.8, 0.35), (spam, rude))
    )
    assert same_prediction(task, old, first, new, second) is agreed


def test_a_word_is_the_same_whatever_its_number_in_a_trimmed_vocabulary() -> None:
    task, head = base.get_task("masked_lm"), HEADS["masked_lm"]

    def answer(token: int, word: str) -> list[list[dict[str, object]]]:
        return [[{"token": token, "token_str": word, "score": 0.5, "sequence": f"a {word}"}]]

    agreed = [
        same_prediction(task, head, answer(70, "cat"), head, answer(*rude_score))
        for rude_score in ((7, "cat"), (70, "dog"))
    ]
    assert agreed == [True, False]


CLOSE = {"multi_head", "regression", "span_qa", "classification", "multi_label"}
"""Tasks whose untrained models may answer all of these texts alike."""
