"""Budgets of time and money of a search, and a resume with larger ones. Without Ray."""

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
from rtrain.core.errors import TemporaryFailureError
from rtrain.core.run_folder import Run
from rtrain.runs import controller
from tests.support.searches import make_search, settings
from tune import search
from tune.history import Journal
from tune.report import optuna_export
from tune.trainable import SearchTask
from tune.trial_pool import SlotPool

MINUTES = {"max_minutes": 30.0, "max_cost": None, "worker_cost_per_hour": None}


def started(
    result: Run,
    selection: Config,
    on_event: controller.OnEvent | None = None,
    attempt: type[search.SearchAttempt] = search.SearchAttempt,
) -> search.SearchAttempt:
    task = SearchTask(config.to_document(selection), frozenset(), result.folder, result.folder.parent)
    return attempt(selection, task, 1, on_event)


@pytest.mark.parametrize(
    ("overrides", "stopped"),
    [
        ({"tune.max_minutes": 600}, None),
        ({}, None),  # no limit at all
        ({"tune.max_minutes": 30}, "30 minutes are over"),  # as before
        ({"tune.max_minutes": 40}, "30 minutes are over"),  # 50 were taken
    ],
)
def test_a_resume_with_more_time_asks_for_further_trials(
    overrides: dict[str, Any], stopped: str | None, tmp_path: Path
) -> None:
    before: dict[str, Any] = {"tune.max_minutes": 30}
    result = make_search(tmp_path, [0.5, 0.6, 0.7], ended=False, **before)
    journal = Journal(result.trials)
    journal.append("stopped", reason="30 minutes are over", budget=MINUTES)
    journal.append("usage", seconds=3000.0, slot_seconds=3000.0)
    item = started(result, settings(tmp_path, 9, **overrides))
    item.reopen_if_affordable()
    assert item.history.stop_reason == stopped
    assert Journal(result.trials).history == item.history
    if stopped is None:
        assert item.exhausted_budget() is None


def test_the_minutes_of_a_search_that_is_killed_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search on spot nodes would have its whole time again with each start."""
    result, clock = make_search(tmp_path, [0.5, 0.6], ended=False), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limits = {"tune.max_minutes": 30}

    class Killed(Exception):
        pass

    def hear(slots: Any, look: Callable[[], None]) -> None:
        for _ in range(700):
            clock[0] += 1
            look()
            if clock[0] == 2495:  # in the middle of a rung
                raise Killed

    item = started(result, settings(tmp_path, 9, **limits))
    monkeypatch.setattr(item.search_log, "receive", hear)
    with pytest.raises(Killed):
        item.assign_until_done(SlotPool(Run(tmp_path), None, threading.Thread()), lambda value, idle: [])
    clock[0] = 0.0
    second = started(result, settings(tmp_path, 9, **limits))
    assert 1495 + 100 - search.USAGE_INTERVAL_S <= second.history.seconds <= 1495 + 100  # 100 by its first start
    assert second.exhausted_budget() is None
    clock[0] += 216
    assert second.exhausted_budget() == "30 minutes are over"


def test_an_error_of_a_full_disk_is_the_search_s_though_nothing_more_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials lie in the search's folder: the disk that is full is the journal's, too, and that of all it leaves."""

    def full(*arguments: Any, **named_settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Interrupted(search.SearchAttempt):
        def execute(self) -> None:
            raise TemporaryFailureError("trial 1 was interrupted", code="machine_failed")

    item = started(make_search(tmp_path, [0.5, 0.6], ended=False), settings(tmp_path, 9), attempt=Interrupted)
    for module, name in ((Journal, "append"), (optuna_export, "export_study"), (controller, "write_traceback")):
        monkeypatch.setattr(module, name, full)
    with pytest.raises(TemporaryFailureError) as raised:
        item.run()
    assert raised.value.code == "machine_failed"


def test_an_end_that_has_begun_is_gone_on_with_whatever_time_there_is(tmp_path: Path) -> None:
    """Three trials went from the first rung to their ends: a larger field would order them to the second one."""
    no_slots: Any = None
    result, worked = make_search(tmp_path, [0.5, 0.6, 0.7], ended=False), list[str]()

    class WithoutSlots(search.SearchAttempt):
        def assign_until_done(self, slot_pool: SlotPool, next_assignments: search.NextAssignments) -> None:
            worked.append(next_assignments.__name__)

    Journal(result.trials).append("stopped", reason="30 minutes are over", budget=MINUTES)
    for minutes in (30, 600):
        item = started(result, settings(tmp_path, 9, **{"tune.max_minutes": minutes}), attempt=WithoutSlots)
        item.reopen_if_affordable()
        item.run_phases(no_slots)
        assert item.history.stop_reason == "30 minutes are over"
    assert worked == ["next_halving", "next_finals", "next_finals"]
    assert Journal(result.trials).history.is_in_finals


def test_money_is_what_the_slots_are_billed_for_whatever_they_did(tmp_path: Path) -> None:
    """Two hours of three slots of two workers each, which trained for some minutes and waited for the rest."""
    result = make_search(tmp_path, [0.5, 0.6], ended=False)
    before = Journal(result.trials).history.slot_seconds
    Journal(result.trials).append("usage", seconds=7200.0, slot_seconds=3 * 7200.0)
    limits = {"tune.max_cost": 20, "tune.worker_cost_per_hour": 2.0, "train.workers": 2}
    item = started(result, settings(tmp_path, 9, **limits))
    assert item.history.billed_cost(2, 2.0) == pytest.approx((before + 3 * 7200) / 3600 * 4)
    assert item.exhausted_budget() == f"{item.history.billed_cost(2, 2.0):.2f} of 20 are spent"
    assert started(result, settings(tmp_path, 9, **{**limits, "tune.max_cost": 25})).exhausted_budget() is None


def test_slots_that_work_now_are_billed_before_their_answers_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    result = make_search(tmp_path, [0.5, 0.6], ended=False)
    limits = {"tune.max_cost": 20, "tune.worker_cost_per_hour": 2.0, "train.workers": 2}
    item = started(result, settings(tmp_path, 9, **limits))
    item.slot_count = 3
    clock[0] += 7200
    assert item.exhausted_budget() is not None
    item.log_usage()
    second = started(result, settings(tmp_path, 9, **limits))
    assert second.exhausted_budget() is not None
    assert second.history.slot_seconds == pytest.approx(100 + 3 * 7200)
