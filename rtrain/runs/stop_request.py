"""Stop requests: end an attempt after the current step, with a checkpoint.

The driver watches the cluster and receives signals; it writes a file in the run folder. Rank 0 polls the file and
broadcasts it in the all-reduce that counts the rows, so all ranks stop after the same step.

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
from rtrain.cluster.autoscaler_requests import ResourceBundle
from rtrain.core.errors import TemporaryFailureError
from rtrain.core.run_folder import Run
from rtrain.runs import resource_leases
from rtrain.runs.recovery import GrowthTimer, usable_workers

WAITING_EVENT = "waiting"
"""Kind of the event of a run that waits for nodes."""
SIGNALED = "signaled"
"""Reason after a signal to the command: its runs stop and can be resumed."""
DIVERGED = "diverged"
"""Reason of a search: the trial has diverged and is not resumed."""
WorkerCount = Callable[[Sequence[capacity.NodeSpec]], int]
"""Number of workers of an attempt on these nodes; 0: wait for more."""

POLL_INTERVAL_S = 1.0
GROW_DELAY_S = 10.0
"""Seconds that new CPUs must stay before a run restarts on them: nodes that come and go would cost restarts."""
WAIT_EVENT_INTERVAL_S = 30.0


def request_stop(run: Run, reason: str) -> None:
    """Write the request atomically: a search may repeat it while the driver of its trial consumes it."""
    draft = run.stop_request.with_name(f".{run.stop_request.name}.{threading.get_native_id()}")
    draft.write_text(reason)
    draft.replace(run.stop_request)


def stop_requested(run: Run) -> bool:
    return run.stop_request.is_file()


def consume_stop(run: Run) -> str | None:
    """Remove the stop request and return its reason, or None."""
    reason = run.stop_request.read_text() if stop_requested(run) else None
    run.stop_request.unlink(missing_ok=True)
    return reason


class StopRequestPoller:
    """Polls for a stop request once a second, in a thread: all ranks wait for rank 0 before each step, and a shared
    folder may respond late. Use as a context manager."""

    def __init__(self, run: Run):
        self._run, self._requested, self._stopped = run, threading.Event(), threading.Event()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    def __enter__(self) -> "StopRequestPoller":
        threading.Thread(target=self._poll, daemon=True, name="rtrain-stop-request").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _poll(self) -> None:
        while not self.is_requested:
            with contextlib.suppress(OSError):  # the next poll may succeed
                if stop_requested(self._run):
                    self._requested.set()
            if self._stopped.wait(POLL_INTERVAL_S):
                return


class StoppedByRequest(TemporaryFailureError):
    """The command was stopped by a request, after a checkpoint."""

    code = "stop_requested"


class StopOnSignal:
    """Requests a stop on SIGUSR1, which batch systems send some time before they end a job. SIGTERM is not handled. Use
    as a context manager.

    Python handles signals in the main thread alone, so in another thread (a trial of a search) it does nothing. A
    search handles the signal for its trials, without a run of its own.

    """

    def __init__(self, run: Run | None = None):
        self._run = run
        self.is_requested = False
        """Stays true between two attempts, when the file is removed."""

    def __enter__(self) -> Self:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._previous_handler = signal.signal(signal.SIGUSR1, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGUSR1, self._previous_handler)

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        if self._run is not None:
            request_stop(self._run, SIGNALED)


class NodeWait:
    """Logs `waiting` events of a run that waits for nodes. A search reads them from the logs of its trials."""

    def __init__(
        self, run: Run, needs: capacity.ResourceRequest, requested_places: Callable[[], Sequence[ResourceBundle]]
    ):
        """`requested_places`: the resources requested from an autoscaler."""
        self._run, self.needs, self._requested_places = run, needs, requested_places
        self.reset()

    def reset(self) -> None:
        """Restart the waiting time."""
        self._started_at, self._reported_at = time.monotonic(), -math.inf

    def report_if_due(self, workers: int | None, delay_s: float) -> None:
        """Report after `delay_s` of waiting, and at most once per `WAIT_EVENT_INTERVAL_S`."""
        now = time.monotonic()
        if now - self._started_at >= delay_s and now - self._reported_at >= WAIT_EVENT_INTERVAL_S:
            self.report(workers)

    def report(self, workers: int | None) -> None:
        """Log the event. `workers`: the awaited number; None for the minimum."""
        self._reported_at = time.monotonic()
        free_nodes = capacity.available_nodes()
        total_workers, free_workers = (
            self.needs.capacity_of(hosts).worker_slots for hosts in (capacity.live_nodes(), free_nodes)
        )
        # Ray starts the processes of a group one after the other, which may take minutes.
        is_starting = workers is not None and self.needs.max_workers(free_nodes, workers) == workers
        autoscaler_limits, places = capacity.autoscaler_limits(), self._requested_places()
        request_fields = (
            {
                "autoscaler_request": autoscaler_requests.describe_request(
                    places, autoscaler_limits, self._reported_at - self._started_at
                )
            }
            if autoscaler_limits.node_types and places
            else {}
        )
        resource_name = capacity.WORKER_RESOURCE[self.needs.device]
        self._run.append_event(
            WAITING_EVENT,
            workers=workers,
            needs=resource_name,
            total_workers=total_workers,
            free_workers=free_workers,
            is_starting=is_starting,
            **request_fields,
        )


class ClusterMonitor:
    """Watches the cluster during an attempt, from a thread of the driver. Use as a context manager."""

    def __init__(
        self,
        run: Run,
        workers: int,
        count_usable_workers: WorkerCount,
        on_event: Callable[[dict[str, Any]], None],
        node_wait: NodeWait,
        repeat_request: Callable[[], None] = lambda: None,
    ):
        """`repeat_request` repeats the run's request to the autoscaler."""
        self._run, self._workers, self._count_usable_workers, self._on_event = (
            run,
            workers,
            count_usable_workers,
            on_event,
        )
        self._node_wait, self._repeat_request = node_wait, repeat_request
        self.used_nodes: set[str] = set()
        """Ids of the nodes that had workers of this attempt."""
        self._growth = GrowthTimer(GROW_DELAY_S)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True, name="rtrain-watch")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        # Before the Ray session ends: no thread may be inside Ray's core then.
        self._stopped.set()
        self._thread.join()

    def _poll(self) -> None:
        has_failed = False
        while not self._stopped.wait(POLL_INTERVAL_S):
            try:
                self._check_cluster()
            except Exception as error:  # the next poll may succeed; without any, no preemption would be noticed
                if not has_failed:
                    has_failed = True
                    message = f"polling the cluster's nodes failed ({type(error).__name__}: {error}); retrying"
                    self._on_event({"kind": "stage", "text": message})

    def _check_cluster(self) -> None:
        self._repeat_request()  # always: a request that is not repeated expires while workers start or save
        workers_by_node = resource_leases.workers_by_node(self._run)
        self.used_nodes |= workers_by_node.keys()
        if workers_by_node:
            self._node_wait.reset()
        else:
            self._node_wait.report_if_due(self._workers, WAIT_EVENT_INTERVAL_S)
        if not workers_by_node or stop_requested(self._run):
            return
        if workers_by_node.keys() & capacity.draining_node_ids():
            request_stop(self._run, "preemption")
            return
        total_workers = self._count_usable_workers(capacity.live_nodes())
        free_workers = self._count_usable_workers(capacity.available_nodes(workers_by_node, self._node_wait.needs))
        if self._growth.should_grow(time.monotonic(), self._workers, total_workers, free_workers):
            request_stop(self._run, "resize")


def make_worker_count(max_workers: int, min_workers: int | None, needs: capacity.ResourceRequest) -> WorkerCount:
    """Return a function that counts the workers that fit on nodes, with their data tasks; see
    `recovery.usable_workers`."""
    return partial(_count_workers, max_workers, min_workers, needs)


def _count_workers(
    max_workers: int, min_workers: int | None, needs: capacity.ResourceRequest, hosts: Sequence[capacity.NodeSpec]
) -> int:
    return usable_workers(max_workers, min_workers, needs.max_workers(hosts))
