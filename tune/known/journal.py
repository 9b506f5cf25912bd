"""`trials.jsonl` of a search: its journal, one event a line. It is only added to, and the search is rebuilt from it.

asked     trial, settings, by, of, seed                        a trial's settings are decided
reached   trial, rung, update, rows, score, loss, seconds      it came to a rung
finished  trial, update, rows, score, held, ...                it came to its end
failed    trial, error                                         diverged  trial, why
stopped   why                                                  no further trial is asked for
spent     seconds                                              how long a start of the search took
chosen    best, verdict                                        the search has ended
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from tune.known.history import History, replay


class Journal:
    """The journal of one search. One process writes it: the one that holds the search's lock."""

    def __init__(self, path: Path):
        self.path = path
        self.history = replay(read(path))

    def append(self, kind: str, **fields: Any) -> History:
        """Add an event; returns the history with it. It is on the disk when this returns, also if the machine stops."""
        event = {"time": round(time.time(), 3), "kind": kind, **fields}
        data = json.dumps(event, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self.path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            # A killed writer may have left half a line: it must not take this event with it.
            file.write(data if file.read(1) in (b"", b"\n") else b"\n" + data)
            file.flush()
            os.fsync(file.fileno())
        self.history = self.history.after(json.loads(data))
        return self.history


def read(path: Path) -> list[dict[str, Any]]:
    """All events. A torn line, left by a writer that was killed, is no event."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().decode("utf-8", "replace").split("\n"):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict) and "kind" in event:  # searches of an earlier version listed trials, without kinds
            found.append(event)
    return found
