"""Notice to a running start: end after the coming update, with a checkpoint. Given where nodes go or come.

The driver watches the cluster and leaves a file in the run folder; rank 0 looks for it before each update and tells the
other workers in the exchange that counts the rows, so that all of them end after the same update.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtrain.training import placement
from rtrain.training.recovery import workers_for

NAME = "notice"
LOOK_EVERY_S = 1.0
GROW_AFTER_S = 10.0
"""New CPUs must stay this long before a run is restarted on them: nodes that come and go would only cost restarts."""
SAY_EVERY_S = 30.0


def give(run: Path, reason: str) -> None:
    (run / NAME).write_text(reason)


def given(run: Path) -> bool:
    return (run / NAME).is_file()


def take(run: Path) -> str | None:
    """The reason of a notice, which is thereby done with."""
    path = run / NAME
    reason = path.read_text() if path.is_file() else None
    path.unlink(missing_ok=True)
    return reason


def cpus() -> float:
    """Logical CPUs of the nodes that are here to stay."""
    import ray

    leaving = _leaving()
    nodes = (node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving)
    return float(sum(node["Resources"].get("CPU", 0.0) for node in nodes))


class Watch:
    """While it is entered, watches the cluster for one start of a run, from a thread of the driver."""

    def __init__(self, run: Path, workers: int, wanted: Callable[[float], int], say: Callable[[dict[str, Any]], None]):
        self._run, self._workers, self._wanted, self._say = run, workers, wanted, say
        self._since: float | None = None
        self._said = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="rtrain-watch")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        # Before the session ends: a thread must not be inside Ray's core then.
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        failed = False
        while not self._done.wait(LOOK_EVERY_S):
            try:
                self._once()
            except Exception as error:  # the next look may do better; without any, no preemption would be noticed
                if not failed:
                    failed = True
                    text = f"a look at the cluster's nodes failed ({type(error).__name__}: {error}); looking on"
                    self._say({"kind": "stage", "text": text})

    def _once(self) -> None:
        here = placement.nodes(self._run)
        if not here and time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            self._say({"kind": "waiting", "workers": self._workers, "cpus": cpus()})
        if not here or given(self._run):
            return
        if here & set(_leaving()):
            give(self._run, "preemption")
        elif self._wanted(cpus()) > self._workers:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > GROW_AFTER_S:
                give(self._run, "resize")
        else:
            self._since = None


def _leaving() -> dict[str, int]:
    import ray

    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return found


def wanted(most: int, least: int | None, spare: int) -> Callable[[float], int]:
    """Workers that a number of CPUs allows; see `recovery.workers_for`."""
    return lambda found: workers_for(most, least, found, spare)
