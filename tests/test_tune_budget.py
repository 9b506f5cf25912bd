"""Time and money of a search: what counts, and what a resume with more of them does. Without Ray."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.config import Config
from rtrain.core.errors import TryAgain
from rtrain.core.run_folder import Run
from rtrain.runs import controller, failures
from tests.searches import make_search, settings
from tune import sampler, search
from tune.history import Journal
from tune.report import optuna_export
from tune.trainable import Task
from tune.trial_pool import Slots

MINUTES = {"minutes": 30.0, "money": None, "price": None}


def started(found: Run, chosen: Config, on_event: controller.OnEvent | None = None) -> search.SearchStart:
    task = Task(config.to_document(chosen), frozenset(), found.folder, found.folder.parent)
    return search.SearchStart(chosen, task, 1, on_event)


@pytest.mark.parametrize(
    ("overrides", "stopped"),
    [
        ({"tune.minutes": 600}, None),
        ({}, None),  # no limit at all
        ({"tune.minutes": 30}, "30 minutes are over"),  # as before
        ({"tune.minutes": 40}, "30 minutes are over"),  # 50 were taken
    ],
)
def test_a_resume_with_more_time_asks_for_further_trials(
    overrides: dict[str, Any], stopped: str | None, tmp_path: Path
) -> None:
    before: dict[str, Any] = {"tune.minutes": 30}
    found = make_search(tmp_path, [0.5, 0.6, 0.7], ended=False, **before)
    journal = Journal(found.trials)
    journal.append("stopped", why="30 minutes are over", budget=MINUTES)
    journal.append("spent", seconds=3000.0, slot_seconds=3000.0)
    one = started(found, settings(tmp_path, 9, **overrides))
    one.reopen()
    assert one.history.stopped == stopped
    assert Journal(found.trials).history == one.history
    if stopped is None:
        assert one.over() is None


def test_the_minutes_of_a_search_that_is_killed_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search on spot nodes would have its whole time again with each start."""
    found, clock = make_search(tmp_path, [0.5, 0.6], ended=False), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limits = {"tune.minutes": 30}

    class Killed(Exception):
        pass

    def hear(slots: Any, look: Callable[[], None]) -> None:
        for _ in range(700):
            clock[0] += 1
            look()
            if clock[0] == 2495:  # in the middle of a rung
                raise Killed

    one = started(found, settings(tmp_path, 9, **limits))
    monkeypatch.setattr(one.record, "hear", hear)
    with pytest.raises(Killed):
        one.work(Slots(Run(tmp_path), None, threading.Thread()), lambda given, idle: [])
    clock[0] = 0.0
    again = started(found, settings(tmp_path, 9, **limits))
    assert 1495 + 100 - search.SPENT_S <= again.history.seconds <= 1495 + 100  # 100 by its first start
    assert again.over() is None
    clock[0] += 216
    assert again.over() == "30 minutes are over"


def test_an_error_of_a_full_disk_is_the_search_s_though_nothing_more_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials lie in the search's folder: the disk that is full is the journal's, too, and that of all it leaves."""

    def full(*given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def decide() -> None:
        raise TryAgain("trial 1 could not go on", code="machine_failed")

    one = started(make_search(tmp_path, [0.5, 0.6], ended=False), settings(tmp_path, 9))
    monkeypatch.setattr(one, "decide", decide)
    monkeypatch.setattr(sampler, "installed", lambda: True)
    for module, name in ((Journal, "append"), (optuna_export, "export"), (failures, "keep_traceback")):
        monkeypatch.setattr(module, name, full)
    with pytest.raises(TryAgain) as raised:
        one.run()
    assert raised.value.code == "machine_failed"


def test_an_end_that_has_begun_is_gone_on_with_whatever_time_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three trials went from the first rung to their ends: a larger field would order them to the second one."""
    no_slots: Any = None
    found, worked = make_search(tmp_path, [0.5, 0.6, 0.7], ended=False), list[str]()
    Journal(found.trials).append("stopped", why="30 minutes are over", budget=MINUTES)
    for minutes in (30, 600):
        one = started(found, settings(tmp_path, 9, **{"tune.minutes": minutes}))
        monkeypatch.setattr(one, "work", lambda slots, due: worked.append(due.__name__))
        one.reopen()
        one.phases(no_slots)
        assert one.history.stopped == "30 minutes are over"
    assert worked == ["halving", "ending", "ending"]
    assert Journal(found.trials).history.ending


def test_money_is_what_the_slots_are_billed_for_whatever_they_did(tmp_path: Path) -> None:
    """Two hours of three slots of two workers each, which trained for some minutes and waited for the rest."""
    found = make_search(tmp_path, [0.5, 0.6], ended=False)
    before = Journal(found.trials).history.slot_seconds
    Journal(found.trials).append("spent", seconds=7200.0, slot_seconds=3 * 7200.0)
    limits = {"tune.money": 20, "tune.price": 2.0, "train.workers": 2}
    one = started(found, settings(tmp_path, 9, **limits))
    assert one.history.money(2, 2.0) == pytest.approx((before + 3 * 7200) / 3600 * 4)
    assert one.over() == f"{one.history.money(2, 2.0):.2f} of 20 are spent"
    assert started(found, settings(tmp_path, 9, **{**limits, "tune.money": 25})).over() is None


def test_slots_that_work_now_are_billed_before_their_answers_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    found = make_search(tmp_path, [0.5, 0.6], ended=False)
    limits = {"tune.money": 20, "tune.price": 2.0, "train.workers": 2}
    one = started(found, settings(tmp_path, 9, **limits))
    one.slot_count = 3
    clock[0] += 7200
    assert one.over() is not None
    one.spend()
    again = started(found, settings(tmp_path, 9, **limits))
    assert again.over() is not None
    assert again.history.slot_seconds == pytest.approx(100 + 3 * 7200)
