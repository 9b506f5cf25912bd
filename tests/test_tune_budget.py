"""Time and money of a search: what counts, and what a resume with more of them does. Without Ray."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rtrain import config, events
from rtrain.config import Config
from rtrain.run import Run
from tests.searches import make_search, settings
from tune import search, trial
from tune.known.journal import Journal
from tune.slots import Slots
from tune.trial import Task

MINUTES = {"minutes": 30.0, "money": None, "price": None}


def started(found: Run, chosen: Config) -> search._Search:
    return search._Search(
        chosen, Task(config.to_document(chosen), frozenset(), found.folder, found.folder.parent), None
    )


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
    journal.append("spent", seconds=3000.0)
    one = started(found, settings(tmp_path, 9, **overrides))
    one._reopen()
    assert one._history.stopped == stopped
    assert Journal(found.trials).history == one._history
    if stopped is None:
        assert one._over() is None


def test_the_minutes_of_a_search_that_is_killed_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search on spot nodes would have its whole time again with each start."""
    found, clock = make_search(tmp_path, [0.5, 0.6], ended=False), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limits = {"tune.minutes": 30}

    class Killed(Exception):
        pass

    def hear(slots: Any) -> None:
        clock[0] += 700
        if clock[0] > 2500:
            raise Killed

    one = started(found, settings(tmp_path, 9, **limits))
    monkeypatch.setattr(one._record, "hear", hear)
    with pytest.raises(Killed):
        one._work(Slots(None, threading.Thread()), lambda given, idle: [])
    clock[0] = 0.0
    again = started(found, settings(tmp_path, 9, **limits))
    assert again._history.seconds == 1500  # 100 by its first start
    assert again._over() is None
    clock[0] += 301
    assert again._over() == "30 minutes are over"


def test_what_stopped_for_another_reason_stays_so(tmp_path: Path) -> None:
    found = make_search(tmp_path, [0.5, 0.6, 0.7], ended=False)
    Journal(found.trials).append("stopped", why="every point of the space was tried")
    one = started(found, settings(tmp_path, 9, **{"tune.minutes": 600}))
    one._reopen()
    assert one._history.stopped == "every point of the space was tried"


def test_trials_that_failed_have_cost_money_too(tmp_path: Path) -> None:
    found = make_search(tmp_path, [0.5, 0.6], ended=False)
    journal = Journal(found.trials)
    before = sum(one.seconds for one in journal.history.trials)
    journal.append("asked", trial=2, settings={}, by="gp", of=None, seed=None)
    journal.append("diverged", trial=2, why="the training loss rose", seconds=7200.0)
    one = started(found, settings(tmp_path, 9, **{"tune.money": 4, "tune.price": 2.5, "train.workers": 1}))
    assert one._over() == f"{(before + 7200) / 3600 * 2.5:.2f} of 4 are spent"


def test_seconds_of_a_run_are_those_of_all_its_starts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    log = [("started", 10), ("progress", 25), ("crashed", 30), ("started", 1000), ("failed", 1005)]
    run.log.write_text("".join(f'{{"kind": "{kind}", "time": {time}}}\n' for kind, time in log))
    assert trial.spent(run) == 25
    assert trial.spent(Run(tmp_path / "none")) == 0
    assert len(events.read_file(run.log)) == 5
