"""What an endpoint says that it serves, where Ray or its replicas do not do as they are told."""

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
from rtrain.config import Serve
from serve.rollout import canary, controller
from serve.rollout.controller import Rollout
from serve.rollout.ray_app import Application
from tests.refusals import refused_with
from tests.serving import HEADS
from tests.test_serve_haproxy import wait_until
from tests.tiny import make_artifact, make_task_artifact


class Ray:
    """In place of Ray: one replica, which answers with what Ray was last told, unless it is late."""

    def __init__(self) -> None:
        self.told, self.answers, self.late = "", ("", ""), False
        self.version = ""
        self.asked: list[str] = []
        self.fails: Callable[[str], None] = lambda method: None
        self.seen = canary.Tally(rows=3)
        """What it has seen; it answers as many requests again until each further look."""
        self.loads: list[Any] = [""]
        """What the replicas say to `load`."""

    def run(self, application: Any, **given: Any) -> None:
        wish = application._bound_deployment._deployment_config.user_config
        self.told, self.version = wish["models"]["tiny"], wish["versions"]["tiny"]
        if not self.late:
            self.answers = (self.told, self.version)

    def broadcast(self, method: str, *given: Any) -> "Ray":
        self.asked.append(method)
        self.fails(method)
        return self

    def results(self, **given: Any) -> list[Any]:
        seen = self.seen._replace(requests=self.asked.count("follow") * self.seen.requests)
        follows = {"refusal": "", "seen": tuple(seen), "ratio": None}
        said = {"serves": [{"tiny": self.answers}], "load": self.loads, "follow": [follows]}
        return said.get(self.asked[-1], [None])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Ray:
    found = Ray()
    monkeypatch.setattr(ray.serve, "run", found.run)
    monkeypatch.setattr(ray.serve, "get_app_handle", lambda name: found)
    for name in ("SWITCH_S", "WATCH_S"):
        monkeypatch.setattr(controller, name, 0.05)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("decided")
    return [make_artifact(root / str(seed), seed=seed) for seed in range(3)]


PROVEN = canary.Tally(rows=100, agreed=100, requests=1000)
AIM = canary.Aim(0.2, 100, 0.9, 1.5, 600.0)


def ended(served: Rollout) -> dict[str, Any]:
    """How the trial has ended."""
    assert wait_until(lambda: not served.on_trial, 20)
    found: dict[str, Any] = served.document([])["trial"]
    return found


def begun(folder: Path) -> Rollout:
    class Deployed:
        pass

    deployment = ray.serve.deployment(name="rtrain")(Deployed)
    application = Application(deployment, "tiny", Serve(), {"tiny": folder}, LoggingConfig())
    application.begin()
    return Rollout(application, "tiny", Serve())


@pytest.mark.parametrize("before", [1, 2])
def test_a_switch_that_takes_too_long_is_decided_and_can_be_taken_back(
    fake: Ray, folders: list[Path], before: int
) -> None:
    served = begun(folders[0])
    for folder in folders[1:before]:
        served.update(folder)
    fake.late = True
    with refused_with("no_answer"):
        served.update(folders[before])
    assert str(served.artifact) == fake.told == str(folders[before])
    fake.late = False
    new, old = (rtrain.inference.artifact.read(folders[place]).version for place in (before, before - 1))
    assert served.back() == f"{old} answers in place of {new}"
    assert str(served.artifact) == fake.told == fake.answers[0] == str(folders[before - 1])


def test_a_trial_ends_whatever_its_replicas_raise(fake: Ray, folders: list[Path]) -> None:
    served = begun(folders[0])

    def fails(method: str) -> None:
        if method == "follow" and fake.asked.count("follow") == 2:
            raise RayServeException("Application 'tiny' does not exist.")

    fake.fails = fails
    served.update(folders[1], AIM)
    trial = ended(served)
    assert (trial["stage"], trial["reason"]) == ("dropped", "its replicas did not answer (RayServeException)")
    assert fake.asked[-1] == "drop"


def test_a_replica_that_refuses_what_the_others_have_proven_has_all_of_them_drop_it(
    fake: Ray, folders: list[Path]
) -> None:
    """It came after the last look at the trial, say, and so had not loaded the candidate."""
    served = begun(folders[0])
    fake.seen, fake.loads = PROVEN, ["", "its file is torn"]
    served.update(folders[1], AIM)
    trial = ended(served)
    assert (trial["stage"], trial["reason"]) == ("dropped", "its file is torn")
    assert fake.asked[-1] == "drop"
    assert str(served.artifact) == fake.told == str(folders[0])


def test_all_are_asked_once_more_where_one_ends_while_it_loads(fake: Ray, folders: list[Path]) -> None:
    served = begun(folders[0])
    fake.loads = ["", ActorDiedError()]

    def fails(method: str) -> None:
        if method == "load" and fake.asked.count("load") == 2:
            fake.loads = ["", "its file is torn"]

    fake.fails = fails
    with refused_with("refused"):
        served.update(folders[1])
    assert fake.asked.count("load") == 2
    assert fake.told == str(folders[0])


def test_going_back_while_a_candidate_is_promoted_goes_back(fake: Ray, folders: list[Path]) -> None:
    served = begun(folders[0])
    promoting, told = threading.Event(), threading.Event()

    def fails(method: str) -> None:
        if method == "load" and fake.asked.count("load") == 1:  # the last one before the switch
            promoting.set()
            told.wait(20)

    fake.seen, fake.fails = PROVEN, fails
    served.update(folders[1], AIM)
    assert promoting.wait(20)
    threading.Timer(0.1, told.set).start()
    new, old = (rtrain.inference.artifact.read(folders[place]).version for place in (1, 0))
    assert served.back() == f"{old} answers in place of {new}"
    assert str(served.artifact) == fake.told == fake.answers[0] == str(folders[0])


@pytest.mark.parametrize(("seen", "looks"), [(canary.Tally(rows=3), 1), (PROVEN, 3)])
def test_a_trial_that_is_ended_during_a_long_look_is_over_with_it(
    fake: Ray, folders: list[Path], monkeypatch: pytest.MonkeyPatch, seen: canary.Tally, looks: int
) -> None:
    served = begun(folders[0])
    looking, told = threading.Event(), threading.Event()

    def fails(method: str) -> None:
        if method == "follow" and fake.asked.count("follow") == looks:
            looking.set()
            told.wait(20)

    fake.seen, fake.fails = seen, fails
    monkeypatch.setattr(controller, "END_S", 0.05)
    served.update(folders[1], AIM)
    assert looking.wait(20)
    with refused_with("no_answer"):
        served.back()
    told.set()
    trial = ended(served)
    assert (trial["stage"], trial["reason"].partition(";")[0]) == ("dropped", "dropped by hand")
    assert fake.asked[-1] == "drop"
    assert fake.told == str(folders[0])


@pytest.mark.parametrize("aim", [None, AIM])
def test_a_model_of_another_task_takes_nobody_s_place(
    fake: Ray, folders: list[Path], tmp_path: Path, aim: canary.Aim | None
) -> None:
    served = begun(folders[0])
    other = make_task_artifact(tmp_path, "regression", HEADS["regression"])
    with refused_with("other_task"):
        served.update(other, aim)
    assert (str(served.artifact), fake.asked) == (fake.told, [])


def test_a_folder_that_was_replaced_is_another_version_and_the_way_back_is_not_to_it(
    fake: Ray, folders: list[Path], tmp_path: Path
) -> None:
    place = Path(shutil.copytree(folders[0], tmp_path / "served"))
    served = begun(place)
    old, new = (rtrain.inference.artifact.read(folder).version for folder in folders[:2])
    with refused_with("already_serving"):
        served.update(place)
    shutil.rmtree(place)
    shutil.copytree(folders[1], place)
    assert (fake.version, served.update(place)) == (old, f"{new} answers in place of {old}")
    assert fake.answers == (str(place), new)
    last = rtrain.inference.artifact.read(folders[2]).version
    served.update(folders[2])
    assert served.back() == f"{new} answers in place of {last}"
    with refused_with("other_version"):
        served.back()
    assert fake.answers == (str(place), new)


def test_a_second_change_is_refused_while_one_is_made(fake: Ray, folders: list[Path]) -> None:
    """Were it to wait for one that is refused then, it would go back by two."""
    served = begun(folders[0])
    served.update(folders[1])
    loading, told = threading.Event(), threading.Event()

    def fails(method: str) -> None:
        if method == "load":
            loading.set()
            told.wait(20)

    fake.fails = fails
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(served.update, folders[2])
        assert loading.wait(20)
        for change in (served.back, functools.partial(served.update, folders[0])):
            with refused_with("busy"):
                change()
        told.set()
        changed.result()
    assert str(served.artifact) == fake.told == str(folders[2])
