"""What an endpoint says that it serves, where Ray or its replicas do not do as they are told."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

import rtrain.artifact
from rtrain.config import Serve
from rtrain.errors import UserError
from serve.change import judge, rollout
from serve.change.application import Application
from serve.change.rollout import Rollout
from tests.tiny import make_artifact


class Ray:
    """In place of Ray: one replica, which answers with what Ray was last told, unless it is late."""

    def __init__(self) -> None:
        self.told, self.answers, self.late = "", "", False
        self.asked: list[str] = []
        self.fails: Callable[[str], None] = lambda method: None

    def run(self, application: Any, **given: Any) -> None:
        self.told = application._bound_deployment._deployment_config.user_config["models"]["tiny"]
        if not self.late:
            self.answers = self.told

    def broadcast(self, method: str, *given: Any) -> "Ray":
        self.asked.append(method)
        self.fails(method)
        return self

    def results(self, **given: Any) -> list[Any]:
        follows = {"refusal": "", "seen": tuple(judge.Tally(rows=3)), "ratio": None}
        said = {"serves": {"tiny": self.answers}, "load": "", "follow": follows}
        return [said.get(self.asked[-1])]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Ray:
    found = Ray()
    monkeypatch.setattr(ray.serve, "run", found.run)
    monkeypatch.setattr(ray.serve, "get_app_handle", lambda name: found)
    for name in ("SWITCH_S", "WATCH_S"):
        monkeypatch.setattr(rollout, name, 0.05)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("decided")
    return [make_artifact(root / str(seed), seed=seed) for seed in range(3)]


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
    with pytest.raises(UserError, match=r"not every replica answers with \w+ after .*go back by --rollback"):
        served.update(folders[before])
    assert str(served.artifact) == fake.told == str(folders[before])
    fake.late = False
    new, old = (rtrain.artifact.read(folders[place]).version for place in (before, before - 1))
    assert served.back() == f"{old} answers in place of {new}"
    assert str(served.artifact) == fake.told == fake.answers == str(folders[before - 1])


def test_a_trial_ends_whatever_its_replicas_raise(fake: Ray, folders: list[Path]) -> None:
    served = begun(folders[0])

    def fails(method: str) -> None:
        if method == "follow" and fake.asked.count("follow") == 2:
            raise RayServeException("Application 'tiny' does not exist.")

    fake.fails = fails
    served.update(folders[1], judge.Aim(0.2, 100, 0.9, 1.5, 600.0))
    give_up = time.monotonic() + 20
    while served.on_trial and time.monotonic() < give_up:
        time.sleep(0.01)
    trial = json.loads(json.dumps(served._trial.document() if served._trial else None))
    assert (trial["stage"], trial["reason"]) == ("dropped", "its replicas did not answer (RayServeException)")
    assert fake.asked[-1] == "drop"


def test_a_promoted_candidate_whose_switch_is_late_is_what_is_served(fake: Ray, folders: list[Path]) -> None:
    served = begun(folders[0])
    fake.late = True
    trial = rollout.Standing("new", judge.Aim(0.2, 3, 0.9, 1.5, 600.0), judge.State(0.0, stage="promoted"))
    made, old = (rtrain.artifact.read(folder) for folder in folders[1::-1])
    served._watch(folders[1], made, old, trial)
    assert trial.state.stage == "promoted"
    assert trial.state.reason.startswith("UserError: not every replica answers with")
    assert str(served.artifact) == fake.told == str(folders[1])
