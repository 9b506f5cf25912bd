"""Stop requests and the cluster monitor: atomic requests, and polling after a failed poll."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster import capacity
from rtrain.config import load_config
from rtrain.core.errors import TemporaryFailureError
from rtrain.core.run_folder import Run
from rtrain.models.device import DeviceChoice
from rtrain.report import summary
from rtrain.runs import cluster_monitor, controller, prepare, stop_request, worker_pool
from tests.support.trained import Trained, settings


def within(name: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not name():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_look_that_fails_is_said_once_and_the_next_ones_see_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message: list[dict[str, Any]] = []
    looks = [0]

    def workers_by_node(run: Run) -> Counter[str]:
        looks[0] += 1
        raise OSError("the folder is not there for a moment")

    run = Run(tmp_path)
    monkeypatch.setattr(cluster_monitor, "POLL_INTERVAL_S", 0.005)
    monkeypatch.setattr(worker_pool, "workers_by_node", workers_by_node)
    run_capacity = cluster_monitor.RunCapacity(run, load_config("intent"), DeviceChoice("cpu", 2))
    with cluster_monitor.ClusterMonitor(run, 2, run_capacity, message.append):
        within(lambda: looks[0] > 5)
        monkeypatch.setattr(worker_pool, "workers_by_node", lambda run: Counter({"a node": 2}))
        monkeypatch.setattr(capacity, "draining_node_ids", lambda: {"a node"})
        within(lambda: stop_request.stop_requested(Run(tmp_path)))
    assert stop_request.consume_stop(Run(tmp_path)) == "preemption"
    [event] = message
    assert event["kind"] == "stage"


# --------------------------------------------------------------------------------------------- asked to end by a signal


SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
from rtrain.core.run_folder import Run
from rtrain.runs import stop_request

run, before = Run(Path(sys.argv[1])), signal.getsignal(signal.SIGUSR1)
with stop_request.StopOnSignal(run) as stop_signal:
    print(stop_signal.is_requested)
    os.kill(os.getpid(), signal.SIGUSR1)
    give_up = time.monotonic() + 60
    while not stop_signal.is_requested and time.monotonic() < give_up:
        time.sleep(0.01)
print(stop_signal.is_requested, stop_request.consume_stop(run), signal.getsignal(signal.SIGUSR1) == before)
"""


def test_a_signal_gives_notice_and_what_it_meant_before_comes_back(tmp_path: Path) -> None:
    """In a subprocess: an unhandled signal would kill the test process."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True", "signaled", "True"]), done.stderr


def test_a_trial_that_waits_for_nodes_waits_no_more_where_its_search_is_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears no signal itself; without nodes it would wait for ever."""
    run, looks = Run(tmp_path), list[int]()

    def no_nodes(own_workers: object, request: object) -> list[capacity.NodeSpec]:
        looks.append(0)
        if len(looks) == 3:
            stop_request.request_stop(run, stop_request.SIGNALED)
        return []

    monkeypatch.setattr(cluster_monitor, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(capacity, "available_nodes", no_nodes)
    monkeypatch.setattr(capacity, "load_autoscaler_config", lambda: None)
    config = load_config("intent", {"train.workers": 2, "train.min_workers": 1})
    run_capacity = cluster_monitor.RunCapacity(run, config, DeviceChoice("cpu", 2))
    assert run_capacity.wait_for_workers(stop_request.StopOnSignal()) == 0
    assert len(looks) == 3


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_was_asked_to_end_goes_on_and_ends_with_the_same_weights(
    trained: Trained, ray_session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal's handler is called: the signal itself has a test of its own, in a process of its own."""
    prepared = prepare.prepare_run(settings(ray_session / "asked"), ray_session / "asked" / "run")
    entered: list[stop_request.StopOnSignal] = []
    enter = stop_request.StopOnSignal.__enter__

    def remembered(overrides: stop_request.StopOnSignal) -> stop_request.StopOnSignal:
        entered.append(overrides)
        return enter(overrides)

    monkeypatch.setattr(stop_request.StopOnSignal, "__enter__", remembered)

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and event["step"] == 5:
            entered[-1]._handle_signal(signal.SIGUSR1, None)

    with pytest.raises(TemporaryFailureError, check=lambda error: error.code == "stop_requested"):
        controller.fit(prepared, on_event=on_event)
    rung_result = max(checkpoint_format.list_steps(prepared.run.checkpoints))
    assert 5 <= rung_result < prepared.num_steps
    assert summary.run_status(prepared.run.events()) == "interrupted"
    assert prepared.run.events("restart_requested") == []
    assert not stop_request.stop_requested(prepared.run)
    second = prepare.prepare_run(prepared.config, prepared.run.folder, "resume")
    result = controller.fit(second)
    assert (result["status"], result["steps"]) == ("finished", prepared.num_steps)
    assert [event["step"] for event in prepared.run.events("started")] == [0, rung_result]
    names = "model.safetensors"
    assert (prepared.run.artifact / names).read_bytes() == (trained.run / "artifact" / names).read_bytes()
