"""The two faults of a rehearsal, in the middle of a run: a spot notice, and a node that is gone without one.

When they come, and what became of the run, are read from the run's log: both are pure. `Saboteur` acts.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from rtrain.cluster.rehearsal.book import Machine
from rtrain.cluster.rehearsal.up import Up

Kind = Literal["notice", "kill"]
Events = Sequence[Mapping[str, Any]]
NOTICE_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds between a cloud's notice and the end of the machine."""
WORKER, REPLICA = "ray::RayTrainWorker", "ray::ServeReplica"
"""What the processes of workers, and of an endpoint's replicas, are called."""


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

    @property
    def passed(self) -> bool:
        """A notice costs no update; after a kill the run goes on."""
        return self.is_over and (
            self.kind == "kill" or (self.recomputed == 0 and self.seconds_to_checkpoint is not None)
        )


def due(events: Events, met: Sequence[Fault], wanted: Sequence[Kind], updates: int) -> Kind | None:
    """The fault that is to come now; None for none. They come at equal distances, each once the run has got over the
    last one. `updates`: those of the whole run."""
    if len(met) == len(wanted) or (met and not met[-1].is_over):
        return None
    last = events[-1] if events else {}
    place = (len(met) + 1) * updates // (len(wanted) + 2)
    return wanted[len(met)] if last.get("kind") == "progress" and last["update"] >= place else None


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

    def __init__(self, up: Up, wanted: Sequence[Kind], updates: int):
        self._up, self._wanted, self._updates = up, wanted, updates
        self.met: list[Fault] = []

    def look(self, events: Events) -> Fault | None:
        """Returns a fault that has just come."""
        self._take_away()
        if self.met and not self.met[-1].is_over:
            follow(self.met[-1], events)
        kind = due(events, self.met, self._wanted, self._updates)
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
