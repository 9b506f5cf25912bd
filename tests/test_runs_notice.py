"""The watch over the cluster's nodes: what it reads is whole, and a look that fails is not its last."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain import config
from rtrain.checkpoints import checkpoint
from rtrain.cluster import supply
from rtrain.errors import TryAgain
from rtrain.report import summary
from rtrain.run import Run
from rtrain.runs import driver, notice, placement, preparing
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

    monkeypatch.setattr(notice, "LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(placement, "workers_by_node", workers_by_node)
    waiting = notice.Waiting(Run(tmp_path), supply.Needs(), list)
    with notice.Watch(Run(tmp_path), 2, lambda nodes: 2, said.append, waiting):
        within(lambda: looks[0] > 5)
        monkeypatch.setattr(placement, "workers_by_node", lambda run: Counter({"a node": 2}))
        monkeypatch.setattr(supply, "leaving", lambda: {"a node"})
        within(lambda: notice.given(Run(tmp_path)))
    assert notice.take(Run(tmp_path)) == "preemption"
    [event] = said
    assert event["kind"] == "stage"
    assert event["text"].startswith("a look at the cluster's nodes failed (")
    assert event["text"].endswith("); looking on")


def test_training_never_waits_for_the_folder_in_which_a_notice_would_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread looks once a second, however often the training asks."""
    run, looks = Run(tmp_path), [0]
    real = notice.given

    def given(looked: Run) -> bool:
        looks[0] += 1
        return real(looked)

    monkeypatch.setattr(notice, "given", given)
    with notice.Look(run) as look:
        assert not any(look.is_given for _ in range(100_000))
        assert looks[0] <= 2
        notice.give(run, notice.ASKED)
        within(lambda: look.is_given)
    assert notice.take(run) == notice.ASKED


def test_a_run_that_waits_says_for_which_nodes_and_since_it_began_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time before does not count, be it spent on training; a run of a fixed size says as much as another."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kinds = {"worker": {"resources": {"CPU": 8}}, "gpu": {"resources": {"CPU": 4, "GPU": 1}}}
    document = {"max_workers": 4, "available_node_types": kinds}
    monkeypatch.setattr(supply, "autoscaler", lambda: document)
    monkeypatch.setattr(supply, "up", lambda: [supply.Host({"CPU": 2.0, "GPU": 1.0})])
    monkeypatch.setattr(supply, "free", lambda: [supply.Host({"CPU": 1.0})])
    chosen = config.load("intent", {"train.workers": 3})
    device = SimpleNamespace(workers=3, device="gpu")
    prepared: Any = SimpleNamespace(device=device, config=chosen, run=Run(tmp_path))
    asking = driver._Asking(prepared)
    waiting = notice.Waiting(Run(tmp_path), asking.needs, asking.places)
    now[0] += 9995.0
    waiting.over()  # it has trained until here
    for _ in range(100):
        now[0] += 1.0
        waiting.look(3, notice.SAY_EVERY_S)
    told = Run(tmp_path).events(notice.WAITING)
    assert [event["asked"] for event in told] == [
        f"the autoscaler is asked for 3 GPUs on gpu nodes, for {seconds} s now" for seconds in (30, 60, 90)
    ]
    assert [{event[name] for event in told} for name in ("workers", "needs", "has", "free")] == [{3}, {"GPU"}, {1}, {0}]
    monkeypatch.setattr(supply, "free", lambda: [supply.Host({"CPU": 8.0, "GPU": 1.0})] * 3)
    waiting.say(3)
    assert [event["starting"] for event in Run(tmp_path).events(notice.WAITING)] == [False, False, False, True]
    document["available_node_types"] = {}
    waiting.say(None)
    assert "asked" not in Run(tmp_path).events(notice.WAITING)[-1]


def test_a_run_that_waits_for_nodes_ends_where_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "up", list)
    monkeypatch.setattr(supply, "free", lambda own, device: [])
    monkeypatch.setattr(supply, "autoscaler", lambda: None)
    monkeypatch.setattr(notice, "LOOK_EVERY_S", 0.0)
    run, needs, looks = Run(tmp_path), supply.Needs(), []
    asked = notice.Asked(run)

    def wanted(hosts: object) -> int:
        looks.append(hosts)
        asked.given = len(looks) > 3
        return 0

    waiting = notice.Waiting(run, needs, list)
    asking: Any = list  # it asks for nothing
    assert driver._workers(run, wanted, waiting, asking, asked) == 0
    assert len(looks) == 4


def test_the_file_of_the_workers_placement_is_whole_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(name: str) -> Any:
        group = SimpleNamespace(id=SimpleNamespace(hex=lambda: name))
        state = SimpleNamespace(placement_group_handle=SimpleNamespace(placement_group=group))
        return SimpleNamespace(get_worker_group_state=lambda: state)

    remember, path, write = placement.remember(Run(tmp_path)), Run(tmp_path).placement_group, Path.write_text
    remember.after_worker_group_start(started("5a" * 18))

    def torn(path: Path, text: str) -> int:
        write(path, text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="no space left"):
        remember.after_worker_group_start(started("6b" * 18))
    assert path.read_text() == "5a" * 18
    monkeypatch.undo()
    remember.after_worker_group_start(started("6b" * 18))
    assert path.read_text() == "6b" * 18
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


# --------------------------------------------------------------------------------------------- asked to end by a signal


SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
from rtrain.run import Run
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


def test_a_trial_s_thread_hears_of_no_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    entered = []

    def trial() -> None:
        with notice.Asked(Run(tmp_path)) as asked:
            entered.append((asked.given, signal.getsignal(signal.SIGUSR1)))

    thread = threading.Thread(target=trial)
    thread.start()
    thread.join()
    assert entered == [(False, before)]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_trial_that_waits_for_nodes_waits_no_more_where_its_search_is_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears no signal itself; without nodes it would wait for ever."""
    monkeypatch.setattr(notice, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(supply, "free", lambda own, needs: [])
    run, looks = Run(tmp_path), list[int]()
    waiting: Any = SimpleNamespace(needs=None, look=lambda *given: None)
    asking: Any = list

    def none(hosts: object) -> int:
        looks.append(0)
        if len(looks) == 3:
            notice.give(run, notice.ASKED)
        return 0

    assert driver._workers(run, none, waiting, asking, notice.Asked()) == 0
    assert len(looks) == 3


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_was_asked_to_end_goes_on_and_ends_with_the_same_weights(
    trained: Trained, ray_session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal's handler is called: the signal itself has a test of its own, in a process of its own."""
    prepared = preparing.prepare(settings(ray_session / "asked"), ray_session / "asked" / "run")
    entered: list[notice.Asked] = []
    enter = notice.Asked.__enter__

    def remembered(asked: notice.Asked) -> notice.Asked:
        entered.append(asked)
        return enter(asked)

    monkeypatch.setattr(notice.Asked, "__enter__", remembered)

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and event["update"] == 5:
            entered[-1]._hear(signal.SIGUSR1, None)

    with pytest.raises(TryAgain, match=r"was asked to end: update \d+ of \d+ is saved\. .* --resume goes on"):
        driver.fit(prepared, on_event=on_event)
    reached = max(checkpoint.updates(prepared.run.checkpoints))
    assert 5 <= reached < prepared.updates
    assert summary.status(prepared.run.events()) == "interrupted"
    assert prepared.run.events("yielded") == []
    assert not notice.given(prepared.run)
    again = preparing.prepare(prepared.config, prepared.run.folder, "resume")
    found = driver.fit(again)
    assert (found["status"], found["updates"]) == ("finished", prepared.updates)
    assert [event["update"] for event in prepared.run.events("started")] == [0, reached]
    names = "model.safetensors"
    assert (prepared.run.artifact / names).read_bytes() == (trained.run / "artifact" / names).read_bytes()
