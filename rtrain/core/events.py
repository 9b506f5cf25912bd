"""The append-only log of a run, one JSON object a line. Every report about a run is computed from it."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

FILE_NAME = "events.jsonl"
ROW_EVENTS = (
    *("tokenized", "tokens_reused", "strategy", "vocabulary", "quarantined_rows", "selected_rows"),
    *("unlabeled", "head", "labels", "overlap", "texts", "conflicts"),
)
"""Kinds of events about a run's rows, which are logged before the run is followed. The first event is of the first or
second kind."""


def make_phase_event(text: str, phase: str) -> dict[str, Any]:
    """Make the event of a phase that takes seconds, for the progress line only; it is not in a run's log.

    `phase`: name for its seconds in the summary.
    """
    return {"kind": "phase_started", "text": text, "phase": phase}


def append_event(folder: Path, kind: str, **fields: Any) -> None:
    """Add one event to a run's log."""
    append_event_to_file(folder / FILE_NAME, kind, **fields)


def append_event_to_file(path: Path, kind: str, /, *, sync: bool = False, **fields: Any) -> dict[str, Any]:
    """Append one event to a file, and return it as parsed. One write call, so that readers never see half a line of a
    live writer. With `sync` it is durable when this returns."""
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}, ensure_ascii=False)
    # A lone surrogate (in a file name or an error's text) is not UTF-8; JSON escapes it with a backslash.
    data = line.encode("utf-8", "backslashreplace") + b"\n"
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        # A killed writer may have left half a line, which must not corrupt this event.
        file.write(data if file.read(1) in (b"", b"\n") else b"\n" + data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    event: dict[str, Any] = json.loads(data)
    return event


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """All events of a run's log."""
    return read_events_file(run_folder / FILE_NAME)


def read_events_file(path: Path) -> list[dict[str, Any]]:
    """Return all events of a file, or none if it is missing. A torn line of a killed writer is skipped."""
    return list(parse_events(path.read_bytes())) if path.is_file() else []


def parse_events(data: bytes) -> Iterator[dict[str, Any]]:
    """The events of a log's bytes."""
    # Not splitlines: texts may hold other line separators. Half a line may end inside a character.
    for line in data.decode("utf-8", "replace").split("\n"):
        try:
            event = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            yield event


def find_last_trained_attempt(
    events: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the newest event `trained` with the `started` of the same attempt: figures of an attempt, such as seconds,
    exclude the steps of earlier attempts. None where no attempt has finished."""
    started_event, last_attempt = None, None
    for event in events:
        if event["kind"] == "started":
            started_event = event
        elif event["kind"] == "trained" and started_event is not None:
            last_attempt = started_event, event
    return last_attempt


class EventTail:
    """Reads events added since the last call, or since its creation; `from_start`: from the start of the log."""

    def __init__(self, run_folder: Path, *, from_start: bool = False):
        self._path = run_folder / FILE_NAME
        self._offset = 0 if from_start or not self._path.is_file() else self._path.stat().st_size

    def read_new(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete_lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete_lines)
        return list(parse_events(complete_lines))


class EventFollower:
    """A context manager that calls `on_event` for each new event of some runs, with the extra fields of its run."""

    def __init__(self, runs: Iterable[tuple[Path, dict[str, Any]]], on_event: Callable[[dict[str, Any]], None] | None):
        self._tails = [(EventTail(run), fields) for run, fields in runs]
        self._on_event, self._is_stopped = on_event, threading.Event()
        self._thread = threading.Thread(target=self._forward_events, daemon=True)

    def __enter__(self) -> Self:
        if self._on_event:
            self._thread.start()
        return self

    def add(self, run_folder: Path, fields: dict[str, Any]) -> None:
        """Follow one more run, from its next event on."""
        # A new list: the thread may be reading the old one.
        self._tails = [*self._tails, (EventTail(run_folder), fields)]

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        if self._on_event:
            self._thread.join()

    def _forward_events(self) -> None:
        assert self._on_event
        while True:
            is_stopped = self._is_stopped.wait(0.2)
            for tail, fields in self._tails:
                for event in tail.read_new():
                    self._on_event({**event, **fields})
            if is_stopped:
                return
