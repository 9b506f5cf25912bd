"""Notice to a running start: end after the coming update, with a checkpoint. Given where nodes go or come, and where
the driver is told that its time is nearly up.

The driver watches the cluster and leaves a file in the run folder; rank 0 looks for it before each update and tells the
other workers in the exchange that counts the rows, so that all of them end after the same update.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Self

from rtrain.cluster import autoscaler_requests, capacity
from rtrain.cluster.autoscaler_requests import Place
from rtrain.core.errors import TryAgain
from rtrain.core.run_folder import Run
from rtrain.runs import resource_leases
from rtrain.runs.recovery import Growth, workers_for

WAITING = "waiting"
"""The event of a start that waits for nodes."""
ASKED = "asked"
"""The reason of a notice that follows a signal to the command: it ends with its runs, to be gone on with."""
DIVERGED = "diverged"
"""The reason of a notice that a search gives: the run ends there, and nothing starts it again."""
Wanted = Callable[[Sequence[capacity.Host]], int]
"""How many workers a start may have on such nodes; 0 means that it waits for more."""

LOOK_EVERY_S = 1.0
GROW_AFTER_S = 10.0
"""New CPUs must stay this long before a run is restarted on them: nodes that come and go would only cost restarts."""
SAY_EVERY_S = 30.0


def give(run: Run, reason: str) -> None:
    """Whole or not at all: a search gives it again and again, while the driver of its trial takes it."""
    draft = run.notice.with_name(f".{run.notice.name}.{threading.get_native_id()}")
    draft.write_text(reason)
    draft.replace(run.notice)


def given(run: Run) -> bool:
    return run.notice.is_file()


def take(run: Run) -> str | None:
    """Read the reason of a notice, if there is one, and remove it."""
    reason = run.notice.read_text() if given(run) else None
    run.notice.unlink(missing_ok=True)
    return reason


class Look:
    """Looks for a notice once a second, in a thread, inside a `with` block. All ranks wait for rank 0 before each step,
    and a shared folder may answer late."""

    def __init__(self, run: Run):
        self._run, self._given, self._done = run, threading.Event(), threading.Event()

    @property
    def is_given(self) -> bool:
        return self._given.is_set()

    def __enter__(self) -> "Look":
        threading.Thread(target=self._look, daemon=True, name="rtrain-notice").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _look(self) -> None:
        while not self.is_given:
            with contextlib.suppress(OSError):  # the next look may do better
                if given(self._run):
                    self._given.set()
            if self._done.wait(LOOK_EVERY_S):
                return


class AskedToEnd(TryAgain):
    """The command was asked to end, and what it trains is saved."""

    code = "asked_to_end"


class Asked:
    """While it is entered, SIGUSR1 asks the run to end after the coming update: a batch system sends a signal some time
    before it ends a job. SIGTERM, which means at once, is left alone.

    Python takes signals in the main thread alone; entered in another (a trial of a search), it hears of none. A search
    hears for its trials, and has no run of its own that could be given notice.
    """

    def __init__(self, run: Run | None = None):
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
        if self._run is not None:
            give(self._run, ASKED)


class Waiting:
    """Says of a run that it waits for nodes: with which it could go on, and for how long it has waited.

    Logged: a search follows the logs of its trials, and has no other word of them.
    """

    def __init__(self, run: Run, needs: capacity.Needs, asked: Callable[[], Sequence[Place]]):
        """`asked`: what an autoscaler is asked for meanwhile."""
        self._run, self.needs, self._asked = run, needs, asked
        self.over()

    def over(self) -> None:
        """It waits no more, or has not begun to."""
        self._since, self._said = time.monotonic(), -math.inf

    def look(self, workers: int | None, patience_s: float) -> None:
        """Say so, not before it has waited for `patience_s`, and not too often; see `say`."""
        now = time.monotonic()
        if now - self._since >= patience_s and now - self._said >= SAY_EVERY_S:
            self.say(workers)

    def say(self, workers: int | None) -> None:
        """`workers`: those that it waits for; None for the least number."""
        self._said = time.monotonic()
        nodes = capacity.free()
        has, free = (self.needs.offered(hosts).places for hosts in (capacity.up(), nodes))
        # Ray places many processes one after the other, and starts them so: minutes, where each node starts one.
        starting = workers is not None and self.needs.most(nodes, workers) == workers
        may, asked = capacity.may_start(), self._asked()
        more = {"asked": autoscaler_requests.told(asked, may, self._said - self._since)} if may.kinds and asked else {}
        needs = capacity.NEEDS[self.needs.device]
        self._run.append(WAITING, workers=workers, needs=needs, has=has, free=free, starting=starting, **more)


class Watch:
    """While it is entered, watches the cluster for one start of a run, from a thread of the driver."""

    def __init__(
        self,
        run: Run,
        workers: int,
        wanted: Wanted,
        say: Callable[[dict[str, Any]], None],
        waiting: Waiting,
        ask: Callable[[], None] = lambda: None,
    ):
        """`ask` repeats what the run asks the autoscaler for."""
        self._run, self._workers, self._wanted, self._say = run, workers, wanted, say
        self._waiting, self._ask = waiting, ask
        self.nodes: set[str] = set()
        """Ids of the nodes that have had workers of this start."""
        self._growth = Growth(GROW_AFTER_S)
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
        own = resource_leases.workers_by_node(self._run)
        self.nodes |= own.keys()
        if own:
            self._waiting.over()
        else:
            self._waiting.look(self._workers, SAY_EVERY_S)
        if not own or given(self._run):
            return
        if own.keys() & capacity.leaving():
            give(self._run, "preemption")
            return
        had = self._wanted(capacity.up())
        free = self._wanted(capacity.free(own, self._waiting.needs))
        if self._growth.look(time.monotonic(), self._workers, had, free):
            give(self._run, "resize")


def wanted(most: int, least: int | None, needs: capacity.Needs) -> Wanted:
    """Workers that nodes allow, beside the data tasks of as many; see `recovery.workers_for`."""
    return partial(_wanted, most, least, needs)


def _wanted(most: int, least: int | None, needs: capacity.Needs, hosts: Sequence[capacity.Host]) -> int:
    return workers_for(most, least, needs.most(hosts))
