"""`trials.jsonl` of a search: its journal, one event a line. It is only added to, and the search is rebuilt from it.

asked     trial, settings, by, of, seed                        a trial's settings are decided
reached   trial, rung, update, rows, score, loss, seconds, luck it came to a rung
finished  trial, update, rows, score, held, ...                it came to its end
failed    trial, error, seconds                                diverged  trial, why, seconds
noise     rows, chosen                                         by trial 0: most rows of an update, and the best number
stopped   why, budget                                          no further trial is asked for
reopened  budget                                               more may be: by a larger budget, on a resume
ending                                                         the halving is over
spent     seconds, slot_seconds                                how long the search took since the last such line, and
                                                               how long its slots were there, added up
chosen    best, verdict                                        the search has ended
"""

from pathlib import Path
from typing import Any

from rtrain import events
from tune.known.history import History, replay


class Journal:
    """The journal of one search. One process writes it: the one that holds the search's lock."""

    def __init__(self, path: Path):
        self.path = path
        self.history = replay(read(path))

    def append(self, kind: str, **fields: Any) -> History:
        """Add an event; returns the history with it. It is on the disk when this returns, also if the machine stops."""
        self.history = self.history.after(events.add(self.path, kind, sync=True, **fields))
        return self.history


def read(path: Path) -> list[dict[str, Any]]:
    """All events. Searches of an earlier version listed trials here, which are none."""
    return [event for event in events.read_file(path) if isinstance(event, dict) and "kind" in event]
