"""The two faults of a rehearsal, in the middle of a run: a spot notice, and a node that is gone without one.

When they come, and what became of the run, are read from the run's log: both are pure. `Saboteur` acts.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from rtrain.rehearsal.machines.local_cluster import Up
from rtrain.rehearsal.machines.machine_registry import Machine

Kind = Literal["notice", "kill"]
Events = Sequence[Mapping[str, Any]]
PLACES: Mapping[Kind, int] = {"notice": 8, "kill": 2}
"""A fault comes once an eighth, or a half, of the updates are made. A notice is looked for every 5 s, in which a small
run may come to its end."""
NOTICE_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds between a cloud's notice and the end of the machine."""
CHECKPOINT_WITHIN_S, WHOLE_WITHIN_S = 10.0, 60.0
"""A notice leaves 30 s on the clouds that tell least. A third of it is for the checkpoint, as the rest is needed where
storage is slow. A run that trains with fewer workers than it may for longer than a minute wastes the node that came."""
WORKER = "ray::RayTrainWorker"
"""What the processes of workers are called."""


@dataclass
class Fault:
    """A fault, and what became of the run."""

    kind: Kind
    node: str
    type: str
    time: float
    """When it came, in seconds since 1970."""
    at_update: int = -1
    """Updates that had been logged when the run was ended by it."""
    resumed_from: int = -1
    recomputed: int = -1
    """Updates that were computed again."""
    seconds_to_checkpoint: float | None = None
    """From a notice until the checkpoint with which the run left the node was whole on its storage."""
    seconds_to_next_update: float = -1.0
    """From the fault to the end of the first update that the run had not reached before it."""
    whole: float | None = None
    """When the first such update of as many workers as before had ended, in seconds since 1970."""
    seconds_after_join: float | None = None
    """From the join of the first node that came after the fault until the run was whole; None where it was whole
    without one."""

    @property
    def is_over(self) -> bool:
        return self.whole is not None

    def problems(self) -> list[str]:
        """Why it does not pass: a notice costs no update, and its checkpoint is whole in time; after both faults the
        run goes on, and takes a node that came in time."""
        if not self.is_over:
            return ["the run did not get over it"]
        found, saved, joined = list[str](), self.seconds_to_checkpoint, self.seconds_after_join
        if self.kind == "notice":
            found += [f"{self.recomputed} updates were computed again"] if self.recomputed else []
            if saved is None:
                found.append("no checkpoint was written for it")
            elif saved > CHECKPOINT_WITHIN_S:
                found.append(f"its checkpoint was whole after {saved:.1f} s, {CHECKPOINT_WITHIN_S:.0f} are allowed")
        if joined is not None and joined > WHOLE_WITHIN_S:
            text = f"all workers trained {joined:.1f} s after a node had joined, {WHOLE_WITHIN_S:.0f} are allowed"
            found.append(text)
        return found

    @property
    def passed(self) -> bool:
        return not self.problems()


def due(events: Events, met: Sequence[Fault], wanted: Sequence[Kind], updates: int, workers: int = 1) -> Kind | None:
    """The fault that is to come now; None for none. Each comes at its place, once the run has got over the last one and
    has at least so many workers. `updates`: those of the whole run."""
    if len(met) == len(wanted) or (met and not met[-1].is_over):
        return None
    if next((event["workers"] for event in reversed(events) if event["kind"] == "started"), 0) < workers:
        return None
    last = events[-1] if events else {}
    kind = wanted[len(met)]
    return kind if last.get("kind") == "progress" and last["update"] >= updates // PLACES[kind] else None


def follow(fault: Fault, events: Events) -> None:
    """Write down what has become of the run since the fault."""
    place = next((place for place, event in enumerate(events) if event["time"] > fault.time), len(events))
    again = next((number for number in range(place, len(events)) if events[number]["kind"] == "started"), None)
    saved = next((event["time"] for event in events[place:again] if event["kind"] == "saved"), None)
    if saved is not None and fault.kind == "notice":
        fault.seconds_to_checkpoint = round(saved - fault.time, 1)
    if again is None:
        return
    fault.at_update = max((event["update"] for event in events[:again] if event["kind"] == "progress"), default=0)
    fault.resumed_from = events[again]["update"]
    fault.recomputed = max(0, fault.at_update - fault.resumed_from)
    before = next((event["workers"] for event in reversed(events[:place]) if event["kind"] == "started"), 0)
    workers = 0
    for event in events[again:]:
        if event["kind"] == "started":
            workers = event["workers"]
        elif event["kind"] == "progress" and event["update"] > fault.at_update:
            if fault.seconds_to_next_update < 0:
                fault.seconds_to_next_update = round(event["time"] - fault.time, 1)
            if workers >= before:
                fault.whole = event["time"]
                return


def after_join(fault: Fault, joined: Collection[float]) -> float | None:
    """`Fault.seconds_after_join`; `joined`: when each node has joined the cluster, in seconds since 1970."""
    came = min((at for at in joined if at > fault.time), default=None)
    return round(fault.whole - came, 1) if came is not None and fault.whole is not None and fault.whole > came else None


class Saboteur:
    """Looks at a run's log again and again, and meets the run with each fault when it is due."""

    def __init__(self, up: Up, wanted: Sequence[Kind], updates: int, workers: int = 1):
        """`workers`: the fewest that the run has when a fault comes."""
        self._up, self._wanted, self._updates, self._workers = up, wanted, updates, workers
        self.met: list[Fault] = []

    def look(self, events: Events) -> Fault | None:
        """Returns a fault that has just come."""
        self._take_away()
        if self.met and not self.met[-1].is_over:
            follow(self.met[-1], events)
        kind = due(events, self.met, self._wanted, self._updates, self._workers)
        node = training_node(self._up) if kind else None
        if kind is None or node is None:
            return None
        fault = Fault(kind, node, self._up.book.all()[node].type, time.time())
        if kind == "notice":
            self._up.told[node].ends = fault.time + NOTICE_S[self._up.plan.watcher or "aws"]
        else:
            self._up.cloud.cut(node)
        self.met.append(fault)
        return fault

    def _take_away(self) -> None:
        """The machines whose notice has run out."""
        for name, one in self._up.book.up().items():
            ends = self._up.told[name].ends
            if ends is not None and time.time() > ends and one.pid is not None:
                self._up.cloud.cut(name)


def training_node(up: Up) -> str | None:
    """A machine on which workers of a run are; a spot one, where there is any."""
    found = [(not up.plan.by_name[one.type].is_spot, name) for name, one in machines_with(up, WORKER).items()]
    return min(found)[1] if found else None


def machines_with(up: Up, sign: str) -> dict[str, Machine]:
    """The machines, but for the head's, on which a process runs whose command line begins with `sign`."""
    return {
        name: one
        for name, one in up.book.up().items()
        if name != up.head and one.pid is not None and _runs(one.pid, sign)
    }


def _runs(pid: int, sign: str) -> bool:
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(sign):
                    return True
    return False
