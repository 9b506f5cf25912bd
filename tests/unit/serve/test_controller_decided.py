"""The served version where Ray or its replicas misbehave."""

import functools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray.serve
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from serve.rollout import canary, controller
from serve.rollout.controller import RayApp, Rollout
from tests.support.refusals import refused_with
from tests.support.serving import HEADS
from tests.support.tiny import make_artifact, make_task_artifact
from tests.unit.serve.test_haproxy import wait_until


class Ray:
    """Fake of Ray: one replica, which serves the last target, unless it is late."""

    def __init__(self) -> None:
        self.target, self.answers, self.late = "", ("", ""), False
        self.version = ""
        self.methods: list[str] = []
        self.fails: Callable[[str], None] = lambda method: None
        self.stats = canary.CanaryStats(rows=3)
        """Its statistics; each further poll adds the same number of requests."""
        self.loads: list[Any] = [""]
        """Replies of the replicas to `load_candidate`."""

    def run(self, application: Any, **arguments: Any) -> None:
        user_config = application._bound_deployment._deployment_config.user_config
        self.target, self.version = user_config["models"]["tiny"], user_config["versions"]["tiny"]
        if not self.late:
            self.answers = (self.target, self.version)

    def broadcast(self, method: str, *arguments: Any) -> "Ray":
        self.methods.append(method)
        self.fails(method)
        return self

    def results(self, **arguments: Any) -> list[Any]:
        stats = self.stats._replace(requests=self.methods.count("start_canary") * self.stats.requests)
        follows = {"refusal": "", "stats": tuple(stats), "ratio": None}
        replies = {
            "serving_versions": [{"tiny": self.answers}],
            "load_candidate": self.loads,
            "start_canary": [follows],
        }
        return replies.get(self.methods[-1], [None])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake_ray = Ray()
    monkeypatch.setattr(ray.serve, "run", fake_ray.run)
    monkeypatch.setattr(ray.serve, "get_app_handle", lambda name: fake_ray)
    for name in ("SWITCH_TIMEOUT_S", "CANARY_POLL_S"):
        monkeypatch.setattr(controller, name, 0.05)
    return fake_ray


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("decided")
    return [make_artifact(root / str(seed), seed=seed) for seed in range(3)]


PROVEN = canary.CanaryStats(rows=100, same_answers=100, requests=1000)
AIM = canary.CanaryPolicy(0.2, 100, 0.9, 1.5, 600.0)


def await_canary_end(served: Rollout) -> dict[str, Any]:
    """How the trial has ended."""
    assert wait_until(lambda: not served.has_running_canary, 20)
    document: dict[str, Any] = served.to_document([])["canary"]
    return document


def start_rollout(folder: Path) -> Rollout:
    class Deployed:
        pass

    deployment = ray.serve.deployment(name="rtrain")(Deployed)
    application = RayApp(deployment, "tiny", ServeConfig(), {"tiny": folder}, LoggingConfig())
    application.start()
    return Rollout(application, "tiny", ServeConfig())


@pytest.mark.parametrize("before", [1, 2])
def test_a_switch_that_takes_too_long_is_decided_and_can_be_taken_back(
    fake: Ray, folders: list[Path], before: int
) -> None:
    served = start_rollout(folders[0])
    for folder in folders[1:before]:
        served.update(folder)
    fake.late = True
    with refused_with("no_answer"):
        served.update(folders[before])
    assert str(served.folder) == fake.target == str(folders[before])
    fake.late = False
    new, old = (rtrain.inference.artifact.read_artifact(folders[place]).version for place in (before, before - 1))
    assert served.rollback() == f"{old} answers in place of {new}"
    assert str(served.folder) == fake.target == fake.answers[0] == str(folders[before - 1])


def test_a_trial_ends_whatever_its_replicas_raise(fake: Ray, folders: list[Path]) -> None:
    served = start_rollout(folders[0])

    def fails(method: str) -> None:
        if method == "start_canary" and fake.methods.count("start_canary") == 2:
            raise RayServeException("Application 'tiny' does not exist.")

    fake.fails = fails
    served.update(folders[1], AIM)
    trial = await_canary_end(served)
    assert (trial["stage"], trial["reason"]) == ("dropped", "its replicas did not answer (RayServeException)")
    assert fake.methods[-1] == "drop_candidate"


def test_a_replica_that_refuses_what_the_others_have_proven_has_all_of_them_drop_it(
    fake: Ray, folders: list[Path]
) -> None:
    """It came after the last look at the trial, say, and so had not loaded the candidate."""
    served = start_rollout(folders[0])
    fake.stats, fake.loads = PROVEN, ["", "its file is torn"]
    served.update(folders[1], AIM)
    trial = await_canary_end(served)
    assert (trial["stage"], trial["reason"]) == ("dropped", "its file is torn")
    assert fake.methods[-1] == "drop_candidate"
    assert str(served.folder) == fake.target == str(folders[0])


def test_all_are_asked_once_more_where_one_ends_while_it_loads(fake: Ray, folders: list[Path]) -> None:
    served = start_rollout(folders[0])
    fake.loads = ["", ActorDiedError()]

    def fails(method: str) -> None:
        if method == "load_candidate" and fake.methods.count("load_candidate") == 2:
            fake.loads = ["", "its file is torn"]

    fake.fails = fails
    with refused_with("refused"):
        served.update(folders[1])
    assert fake.methods.count("load_candidate") == 2
    assert fake.target == str(folders[0])


def test_going_back_while_a_candidate_is_promoted_goes_back(fake: Ray, folders: list[Path]) -> None:
    served = start_rollout(folders[0])
    promoting, may_continue = threading.Event(), threading.Event()

    def fails(method: str) -> None:
        if method == "load_candidate" and fake.methods.count("load_candidate") == 1:  # the last one before the switch
            promoting.set()
            may_continue.wait(20)

    fake.stats, fake.fails = PROVEN, fails
    served.update(folders[1], AIM)
    assert promoting.wait(20)
    threading.Timer(0.1, may_continue.set).start()
    new, old = (rtrain.inference.artifact.read_artifact(folders[place]).version for place in (1, 0))
    assert served.rollback() == f"{old} answers in place of {new}"
    assert str(served.folder) == fake.target == fake.answers[0] == str(folders[0])


@pytest.mark.parametrize(("stats", "looks"), [(canary.CanaryStats(rows=3), 1), (PROVEN, 3)])
def test_a_trial_that_is_ended_during_a_long_look_is_over_with_it(
    fake: Ray, folders: list[Path], monkeypatch: pytest.MonkeyPatch, stats: canary.CanaryStats, looks: int
) -> None:
    served = start_rollout(folders[0])
    looking, may_continue = threading.Event(), threading.Event()

    def fails(method: str) -> None:
        if method == "start_canary" and fake.methods.count("start_canary") == looks:
            looking.set()
            may_continue.wait(20)

    fake.stats, fake.fails = stats, fails
    monkeypatch.setattr(controller, "END_TIMEOUT_S", 0.05)
    served.update(folders[1], AIM)
    assert looking.wait(20)
    with refused_with("no_answer"):
        served.rollback()
    may_continue.set()
    trial = await_canary_end(served)
    assert (trial["stage"], trial["reason"].partition(";")[0]) == ("dropped", "dropped by rollback")
    assert fake.methods[-1] == "drop_candidate"
    assert fake.target == str(folders[0])


@pytest.mark.parametrize("aim", [None, AIM])
def test_a_model_of_another_task_takes_nobody_s_place(
    fake: Ray, folders: list[Path], tmp_path: Path, aim: canary.CanaryPolicy | None
) -> None:
    served = start_rollout(folders[0])
    other = make_task_artifact(tmp_path, "regression", HEADS["regression"])
    with refused_with("task_mismatch"):
        served.update(other, aim)
    assert (str(served.folder), fake.methods) == (fake.target, [])


def test_a_folder_that_was_replaced_is_another_version_and_the_way_back_is_not_to_it(
    fake: Ray, folders: list[Path], tmp_path: Path
) -> None:
    place = Path(shutil.copytree(folders[0], tmp_path / "served"))
    served = start_rollout(place)
    old, new = (rtrain.inference.artifact.read_artifact(folder).version for folder in folders[:2])
    with refused_with("already_serving"):
        served.update(place)
    shutil.rmtree(place)
    shutil.copytree(folders[1], place)
    assert (fake.version, served.update(place)) == (old, f"{new} answers in place of {old}")
    assert fake.answers == (str(place), new)
    last = rtrain.inference.artifact.read_artifact(folders[2]).version
    served.update(folders[2])
    assert served.rollback() == f"{new} answers in place of {last}"
    with refused_with("version_mismatch"):
        served.rollback()
    assert fake.answers == (str(place), new)


def test_a_second_change_is_refused_while_one_is_made(fake: Ray, folders: list[Path]) -> None:
    """A queued change that waits for a refused one would go back by two versions."""
    served = start_rollout(folders[0])
    served.update(folders[1])
    loading, may_continue = threading.Event(), threading.Event()

    def fails(method: str) -> None:
        if method == "load_candidate":
            loading.set()
            may_continue.wait(20)

    fake.fails = fails
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(served.update, folders[2])
        assert loading.wait(20)
        for change in (served.rollback, functools.partial(served.update, folders[0])):
            with refused_with("busy"):
                change()
        may_continue.set()
        changed.result()
    assert str(served.folder) == fake.target == str(folders[2])
