"""What a table needs of a run's log, without parsing its thousands of progress lines; and whether the run is held."""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rtrain.report import summary
from rtrain.run import Run

Event = dict[str, Any]
PROGRESS = b'"kind": "progress"'
KIND_WITHIN = 64
"""Bytes of a line in which its kind stands: it follows the time."""

LATEST = 1e11
"""Seconds since 1970, in the year 5138: a time past it is damage, and no calendar shows it."""


def skim(log: Path) -> list[Event]:
    """The events of a log, the oldest first; of its progress the newest alone. Lines that are no events are left out.

    A log of a million updates takes a second; parsing all of its lines would take ten.
    """
    try:
        lines = log.read_bytes().split(b"\n")
    except OSError:  # it may go while it is looked at
        return []
    newest = max((place for place, line in enumerate(lines) if _is_progress(line)), default=None)
    return list(_parsed(line for place, line in enumerate(lines) if place == newest or not _is_progress(line)))


def _is_progress(line: bytes) -> bool:
    return line.find(PROGRESS, 0, KIND_WITHIN) >= 0


def _parsed(lines: Iterator[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            event = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if not (isinstance(event, dict) and isinstance(event.get("kind"), str)):
            continue
        at = event.get("time")
        if isinstance(at, int | float) and 0 <= at < LATEST:
            yield event


def status(run: Run, log: list[Event]) -> str:
    """One of `rtrain.report.summary.STATUSES`, or `running`, or `new` where no start was logged.

    A run whose log is open and whose lock nobody holds was killed: it is `interrupted`.
    """
    told = summary.status(log)
    if told != "running":
        return told
    if is_held(run):
        return "running"
    return "interrupted" if any(event["kind"] == "started" for event in log) else "new"


def is_held(run: Run) -> bool:
    """Whether a process trains the run (`rtrain.runs.opening.hold`). Storage without locks cannot tell, and counts as
    free."""
    try:
        with run.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
