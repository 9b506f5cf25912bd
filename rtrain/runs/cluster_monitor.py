"""The cluster as the driver of a run sees it: the number of workers, the wait for nodes, restarts on more nodes."""

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from rtrain import ray_internals
from rtrain.cluster import autoscaler_requests, capacity
from rtrain.cluster.autoscaler_requests import ResourceBundle
from rtrain.config import Config
from rtrain.core.run_folder import Run
from rtrain.models.device import DeviceChoice
from rtrain.runs import recovery, stop_request, worker_pool

WAITING_EVENT = "waiting"
"""Kind of the event of a run that waits for nodes."""
POLL_INTERVAL_S = 1.0
GROW_DELAY_S = 10.0
"""Seconds that new CPUs must stay before a run restarts on them: nodes that come and go would cost restarts."""
WAIT_EVENT_INTERVAL_S = 30.0
RECOUNT_INTERVAL_S = 5.0
"""Seconds between two counts of the nodes that the autoscaler can start."""
RESOURCE_RELEASE_DELAY_S = 5.0
"""Seconds until Ray reports released CPUs as free."""


class RunCapacity:
    """The workers that the cluster can give a run.

    The workers of an elastic run are requested from the autoscaler, if there is one. A request expires unless it is
    repeated; leaving the `with` block withdraws it.
    """

    def __init__(self, run: Run, config: Config, device: DeviceChoice):
        self._run, self._max_workers, self._min_workers = run, device.workers, config.recipe.train.min_workers
        self.needs = capacity.resource_request_from_config(config, device.device)
        self._demand: autoscaler_requests.ResourceDemand | None = None
        if self._min_workers is not None and capacity.load_autoscaler_config() is not None:
            # By the absolute path: runs of one name would take nodes from each other.
            run_hash = hashlib.sha256(str(run.folder).encode()).hexdigest()[:8]
            client = ray_internals.AutoscalingClient(f"rtrain-{run.name}-{run_hash}")
            self._demand = autoscaler_requests.ResourceDemand(client)
        self._requested_at = -math.inf
        self.reset_wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._demand is not None:
            self._demand.release()

    @property
    def requests_nodes(self) -> bool:
        """Whether this object requests the workers from the autoscaler, not Ray Train."""
        return self._demand is not None

    def repeat_request(self) -> None:
        now = time.monotonic()
        if self._demand is not None and now - self._requested_at >= RECOUNT_INTERVAL_S:
            self._requested_at = now
            nodes, limits = capacity.live_nodes(), capacity.autoscaler_limits()
            self._demand.request(autoscaler_requests.run_bundles(self._max_workers, self.needs, nodes, limits))

    def count_workers(self, nodes: Sequence[capacity.NodeSpec]) -> int:
        """Count the workers of an attempt on these nodes, with their data tasks; 0: wait for more."""
        return recovery.usable_workers(self._max_workers, self._min_workers, self.needs.max_workers(nodes))

    def wait_for_workers(self, stop_signal: stop_request.StopOnSignal) -> int:
        """Return the number of workers for the next attempt by the free resources; 0 after a stop request.

        It waits, and reports that, while fewer than the minimum are free. Ray reports released CPUs of the last attempt
        and of its data tasks after a moment, so fewer workers than the nodes allow are started only after
        `RESOURCE_RELEASE_DELAY_S`.
        """
        settle_deadline = time.monotonic() + RESOURCE_RELEASE_DELAY_S
        while not (stop_signal.is_requested or stop_request.stop_requested(self._run)):
            free_nodes = capacity.available_nodes(worker_pool.workers_by_node(self._run), self.needs)
            workers, is_settled = self.count_workers(free_nodes), time.monotonic() > settle_deadline
            if workers and (is_settled or workers >= self.count_workers(capacity.live_nodes())):
                return workers
            self.repeat_request()
            if is_settled:
                self.report_wait_if_due(None, RESOURCE_RELEASE_DELAY_S)
            time.sleep(POLL_INTERVAL_S)
        return 0

    def reset_wait(self) -> None:
        """Restart the waiting time."""
        self._waiting_since, self._reported_at = time.monotonic(), -math.inf

    def report_wait_if_due(self, workers: int | None, delay_s: float) -> None:
        """Report after `delay_s` of waiting, and at most once per `WAIT_EVENT_INTERVAL_S`."""
        now = time.monotonic()
        if now - self._waiting_since >= delay_s and now - self._reported_at >= WAIT_EVENT_INTERVAL_S:
            self.report_wait(workers)

    def report_wait(self, workers: int | None) -> None:
        """Log a `waiting` event, which a search reads from the logs of its trials. `workers`: the awaited number; None
        for the minimum."""
        self._reported_at = time.monotonic()
        free_nodes, limits, places = capacity.available_nodes(), capacity.autoscaler_limits(), self._requested_places()
        fields: dict[str, Any] = {
            "workers": workers,
            "needs": capacity.WORKER_RESOURCE[self.needs.device],
            "total_workers": self.needs.capacity_of(capacity.live_nodes()).worker_slots,
            "free_workers": self.needs.capacity_of(free_nodes).worker_slots,
            # Ray starts the processes of a group one after the other, which may take minutes.
            "is_starting": workers is not None and self.needs.max_workers(free_nodes, workers) == workers,
        }
        if limits.node_types and places:
            seconds = self._reported_at - self._waiting_since
            fields["autoscaler_request"] = autoscaler_requests.describe_request(places, limits, seconds)
        self._run.append_event(WAITING_EVENT, **fields)

    def _requested_places(self) -> list[ResourceBundle]:
        """The resources requested from the autoscaler, by this object or by Ray Train."""
        if self._demand is not None:
            return self._demand.bundles
        return [autoscaler_requests.worker_bundle(self.needs)] * self._max_workers


class ClusterMonitor:
    """Watches the cluster during an attempt, from a thread of the driver. Use as a context manager."""

    def __init__(self, run: Run, workers: int, run_capacity: RunCapacity, on_event: Callable[[dict[str, Any]], None]):
        self._run, self._workers, self._capacity, self._on_event = run, workers, run_capacity, on_event
        self.used_nodes: set[str] = set()
        """Ids of the nodes that had workers of this attempt."""
        self._growth = recovery.GrowthTimer(GROW_DELAY_S)
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
        self._capacity.repeat_request()  # always: it would expire while workers start or save
        workers_by_node = worker_pool.workers_by_node(self._run)
        self.used_nodes |= workers_by_node.keys()
        if not workers_by_node:
            self._capacity.report_wait_if_due(self._workers, WAIT_EVENT_INTERVAL_S)
            return
        self._capacity.reset_wait()
        if stop_request.stop_requested(self._run):
            return
        if workers_by_node.keys() & capacity.draining_node_ids():
            stop_request.request_stop(self._run, stop_request.PREEMPTION)
            return
        total_workers = self._capacity.count_workers(capacity.live_nodes())
        free_nodes = capacity.available_nodes(workers_by_node, self._capacity.needs)
        free_workers = self._capacity.count_workers(free_nodes)
        if self._growth.should_grow(time.monotonic(), self._workers, total_workers, free_workers):
            stop_request.request_stop(self._run, "resize")
