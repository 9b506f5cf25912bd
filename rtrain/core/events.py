"""The run's append-only log, one JSON object a line. Everything that is reported about a run is computed from it."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

NAME = "events.jsonl"


def doing(text: str, phase: str) -> dict[str, Any]:
    """The event of something that takes seconds, said when it begins to whoever waits. It is no part of a run's log.

    `phase`: what its seconds are counted as.
    """
    return {"kind": "doing", "text": text, "phase": phase}


def append(folder: Path, kind: str, **fields: Any) -> None:
    """Add one event to a run's log."""
    add(folder / NAME, kind, **fields)


def add(path: Path, kind: str, /, *, sync: bool = False, **fields: Any) -> dict[str, Any]:
    """Add one event to a file, and return it as it will be read. Written in one call, so that a reader never sees half
    a line of a living writer. With `sync` it is on the disk when this returns, also if the machine stops."""
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}, ensure_ascii=False)
    # A lone surrogate (a file name, an error's text) is no UTF-8; its backslash form is what JSON writes for it.
    data = line.encode("utf-8", "backslashreplace") + b"\n"
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        # A killed writer may have left half a line: it must not take this event with it.
        file.write(data if file.read(1) in (b"", b"\n") else b"\n" + data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    event: dict[str, Any] = json.loads(data)
    return event


def read(run: Path) -> list[dict[str, Any]]:
    """All events of a run's log."""
    return read_file(run / NAME)


def read_file(path: Path) -> list[dict[str, Any]]:
    """All events of a file; none where there is no file. A torn line, left by a killed writer, is not an event."""
    return list(parsed(path.read_bytes())) if path.is_file() else []


def parsed(data: bytes) -> Iterator[dict[str, Any]]:
    """The events of a log's bytes."""
    # Not splitlines: texts may hold other line separators. Half a line may end inside a character.
    for line in data.decode("utf-8", "replace").split("\n"):
        try:
            event = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            yield event


def trained(log: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The newest event `trained` and the `started` of the same start: what a start counts, such as its seconds, says
    nothing of the updates of the starts before it. None where no start has come to its end."""
    begun, found = None, None
    for event in log:
        if event["kind"] == "started":
            begun = event
        elif event["kind"] == "trained" and begun is not None:
            found = begun, event
    return found


class Tail:
    """Events that were added since the last call, or since this was made; `whole`: since the log was begun."""

    def __init__(self, run: Path, *, whole: bool = False):
        self._path = run / NAME
        self._offset = 0 if whole or not self._path.is_file() else self._path.stat().st_size

    def new(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return list(parsed(complete))


class Follow:
    """While it is entered, hands each new event of some runs to `on_event`, with the fields given for its run."""

    def __init__(self, runs: Iterable[tuple[Path, dict[str, Any]]], on_event: Callable[[dict[str, Any]], None] | None):
        self._tails = [(Tail(run), fields) for run, fields in runs]
        self._on_event, self._done = on_event, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if self._on_event:
            self._thread.start()
        return self

    def add(self, run: Path, fields: dict[str, Any]) -> None:
        """Follow one more run, from its next event on."""
        self._tails = [*self._tails, (Tail(run), fields)]  # a new list: the thread may be reading the old one

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._on_event:
            self._thread.join()

    def _run(self) -> None:
        assert self._on_event
        while True:
            ended = self._done.wait(0.2)
            for tail, fields in self._tails:
                for event in tail.new():
                    self._on_event({**event, **fields})
            if ended:
                return
