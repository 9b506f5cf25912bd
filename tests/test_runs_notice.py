"""The watch over the cluster's nodes: what it reads is whole, and a look that fails is not its last."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster import capacity
from rtrain.core.errors import TryAgain
from rtrain.core.run_folder import Run
from rtrain.report import summary
from rtrain.runs import controller, prepare, resource_leases, stop_request
from tests.trained import Trained, settings


def within(what: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_look_that_fails_is_said_once_and_the_next_ones_see_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    looks = [0]

    def workers_by_node(run: Run) -> Counter[str]:
        looks[0] += 1
        raise OSError("the folder is not there for a moment")

    monkeypatch.setattr(stop_request, "LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(resource_leases, "workers_by_node", workers_by_node)
    waiting = stop_request.Waiting(Run(tmp_path), capacity.Needs(), list)
    with stop_request.Watch(Run(tmp_path), 2, lambda nodes: 2, said.append, waiting):
        within(lambda: looks[0] > 5)
        monkeypatch.setattr(resource_leases, "workers_by_node", lambda run: Counter({"a node": 2}))
        monkeypatch.setattr(capacity, "leaving", lambda: {"a node"})
        within(lambda: stop_request.given(Run(tmp_path)))
    assert stop_request.take(Run(tmp_path)) == "preemption"
    [event] = said
    assert event["kind"] == "stage"


# --------------------------------------------------------------------------------------------- asked to end by a signal


SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
from rtrain.core.run_folder import Run
from rtrain.runs import notice

run, before = Run(Path(sys.argv[1])), signal.getsignal(signal.SIGUSR1)
with notice.Asked(run) as asked:
    print(asked.given)
    os.kill(os.getpid(), signal.SIGUSR1)
    give_up = time.monotonic() + 60
    while not asked.given and time.monotonic() < give_up:
        time.sleep(0.01)
print(asked.given, notice.take(run), signal.getsignal(signal.SIGUSR1) == before)
"""


def test_a_signal_gives_notice_and_what_it_meant_before_comes_back(tmp_path: Path) -> None:
    """In a process of its own: a signal that is not heard would end the one that runs the tests."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True", "asked", "True"]), done.stderr


def test_a_trial_that_waits_for_nodes_waits_no_more_where_its_search_is_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears no signal itself; without nodes it would wait for ever."""
    monkeypatch.setattr(stop_request, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(capacity, "free", lambda own, needs: [])
    run, looks = Run(tmp_path), list[int]()
    waiting: Any = SimpleNamespace(needs=None, look=lambda *given: None)
    asking: Any = list

    def none(hosts: object) -> int:
        looks.append(0)
        if len(looks) == 3:
            stop_request.give(run, stop_request.ASKED)
        return 0

    assert controller.count_workers(run, none, waiting, asking, stop_request.Asked()) == 0
    assert len(looks) == 3


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_was_asked_to_end_goes_on_and_ends_with_the_same_weights(
    trained: Trained, ray_session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal's handler is called: the signal itself has a test of its own, in a process of its own."""
    prepared = prepare.prepare(settings(ray_session / "asked"), ray_session / "asked" / "run")
    entered: list[stop_request.Asked] = []
    enter = stop_request.Asked.__enter__

    def remembered(asked: stop_request.Asked) -> stop_request.Asked:
        entered.append(asked)
        return enter(asked)

    monkeypatch.setattr(stop_request.Asked, "__enter__", remembered)

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and event["update"] == 5:
            entered[-1]._hear(signal.SIGUSR1, None)

    with pytest.raises(TryAgain, check=lambda error: error.code == "asked_to_end"):
        controller.fit(prepared, on_event=on_event)
    reached = max(checkpoint_format.updates(prepared.run.checkpoints))
    assert 5 <= reached < prepared.updates
    assert summary.status(prepared.run.events()) == "interrupted"
    assert prepared.run.events("yielded") == []
    assert not stop_request.given(prepared.run)
    again = prepare.prepare(prepared.config, prepared.run.folder, "resume")
    found = controller.fit(again)
    assert (found["status"], found["updates"]) == ("finished", prepared.updates)
    assert [event["update"] for event in prepared.run.events("started")] == [0, reached]
    names = "model.safetensors"
    assert (prepared.run.artifact / names).read_bytes() == (trained.run / "artifact" / names).read_bytes()
