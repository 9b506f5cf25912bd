"""Notice to a running start: end after the coming update, with a checkpoint. Given where nodes go or come, and where
the driver is told that its time is nearly up.

The driver watches the cluster and leaves a file in the run folder; rank 0 looks for it before each update and tells the
other workers in the exchange that counts the rows, so that all of them end after the same update.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Self

from rtrain.cluster import demand, supply
from rtrain.cluster.demand import Demand
from rtrain.run import Run
from rtrain.runs import placement
from rtrain.runs.recovery import Growth, workers_for

DIVERGED = "diverged"
"""The reason of a notice that a search gives: the run ends there, and nothing starts it again."""
Wanted = Callable[[Sequence[supply.Host]], int]
"""How many workers a start may have on such nodes; 0 means that it waits for more."""

LOOK_EVERY_S = 1.0
GROW_AFTER_S = 10.0
"""New CPUs must stay this long before a run is restarted on them: nodes that come and go would only cost restarts."""
SAY_EVERY_S = 30.0


def give(run: Run, reason: str) -> None:
    run.notice.write_text(reason)


def given(run: Run) -> bool:
    return run.notice.is_file()


def take(run: Run) -> str | None:
    """Read the reason of a notice, if there is one, and remove it."""
    reason = run.notice.read_text() if given(run) else None
    run.notice.unlink(missing_ok=True)
    return reason


class Asked:
    """While it is entered, SIGUSR1 asks the run to end after the coming update: a batch system sends a signal some time
    before it ends a job. SIGTERM, which means at once, is left alone.

    Python takes signals in the main thread alone; entered in another (a trial of a search), it hears of none.
    """

    def __init__(self, run: Run):
        self._run = run
        self.given = False
        """Stays true between two starts, where the notice itself is taken away."""

    def __enter__(self) -> Self:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGUSR1, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGUSR1, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.given = True
        give(self._run, "asked")


def waiting(
    workers: int | None, device: str, asked: Demand | None = None, labels: supply.Labels = supply.ANY
) -> dict[str, Any]:
    """The event of a start that waits: for `workers`, or for the least number, where that is None. `asked`: what the
    autoscaler is asked for meanwhile."""
    needs = supply.Needs(device, labels=labels)
    has, free = (needs.offered(hosts).places for hosts in (supply.up(), supply.free()))
    event = {"kind": "waiting", "workers": workers, "needs": supply.NEEDS[device], "has": has, "free": free}
    if asked is not None and asked.places:
        event["asked"] = demand.told(asked.places, supply.may_start(), asked.seconds)
    return event


class Watch:
    """While it is entered, watches the cluster for one start of a run, from a thread of the driver."""

    def __init__(
        self,
        run: Run,
        workers: int,
        device: str,
        wanted: Wanted,
        say: Callable[[dict[str, Any]], None],
        ask: Callable[[], None] = lambda: None,
        labels: supply.Labels = supply.ANY,
    ):
        """`ask` repeats what the run asks the autoscaler for; `labels`: those of the nodes that workers may have."""
        self._run, self._workers, self._device, self._wanted, self._say = run, workers, device, wanted, say
        self._ask, self._labels = ask, labels
        self._growth, self._said = Growth(GROW_AFTER_S), time.monotonic()
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
        self._ask()  # always: a request that nobody repeats ends while workers start, or save
        own = placement.workers_by_node(self._run)
        if not own and time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            self._say(waiting(self._workers, self._device, labels=self._labels))
        if not own or given(self._run):
            return
        if own.keys() & supply.leaving():
            give(self._run, "preemption")
            return
        had = self._wanted(supply.up())
        free = self._wanted(supply.free(own, self._device))
        if self._growth.look(time.monotonic(), self._workers, had, free):
            give(self._run, "resize")


def wanted(most: int, least: int | None, needs: supply.Needs) -> Wanted:
    """Workers that nodes allow, beside the data tasks of as many; see `recovery.workers_for`."""
    return partial(_wanted, most, least, needs)


def _wanted(most: int, least: int | None, needs: supply.Needs, hosts: Sequence[supply.Host]) -> int:
    return workers_for(most, least, needs.most(hosts))
