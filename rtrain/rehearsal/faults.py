"""The two faults of a rehearsal: a spot notice, and the loss of a node without one.

Their time and the run's recovery are computed from the run's log; both are pure. `ClusterFaultInjector` acts.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from rtrain.rehearsal.machines.local_cluster import RehearsalCluster
from rtrain.rehearsal.machines.machine_registry import MachineRecord

FaultKind = Literal["notice", "kill"]
EventLog = Sequence[Mapping[str, Any]]
FAULT_POSITIONS: Mapping[FaultKind, int] = {"notice": 8, "kill": 2}
"""A fault is injected after an eighth, or a half, of the steps. Watchers poll every 5 s, in which a small run may
end."""
NOTICE_PERIOD_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds between a cloud's notice and the end of the machine."""
MAX_CHECKPOINT_S, MAX_REJOIN_S = 10.0, 60.0
"""The shortest notice is 30 s. A third of it is allowed for the checkpoint; the rest is for slow storage. A run that
leaves a new node unused for longer than a minute wastes it."""
WORKER_PROCESS_PREFIX = "ray::RayTrainWorker"
"""Prefix of worker process names."""


@dataclass
class InjectedFault:
    """An injected fault, and the run's recovery."""

    kind: FaultKind
    node: str
    type: str
    time: float
    """Time of the fault, in seconds since 1970."""
    at_step: int = -1
    """Steps logged before the interruption."""
    resumed_from_step: int = -1
    recomputed_steps: int = -1
    """Steps that were recomputed."""
    seconds_to_checkpoint: float | None = None
    """Seconds from a notice until the last checkpoint before the restart was complete on storage."""
    seconds_to_next_step: float = -1.0
    """Seconds from the fault to the end of the first new step."""
    full_size_at: float | None = None
    """When the first new step with the previous number of workers ended, in seconds since 1970."""
    seconds_after_join: float | None = None
    """Seconds from the join of the first replacement node until the run had its full size; None if it did not need
    one."""

    @property
    def has_recovered(self) -> bool:
        return self.full_size_at is not None

    def problems(self) -> list[str]:
        """Reasons for failure: a notice must cost no step, and its checkpoint must be complete in time; after both
        faults the run must recover, and use a new node in time."""
        if not self.has_recovered:
            return ["the run did not recover"]
        problems, checkpoint_s, rejoin_s = list[str](), self.seconds_to_checkpoint, self.seconds_after_join
        if self.kind == "notice":
            problems += [f"{self.recomputed_steps} steps were recomputed"] if self.recomputed_steps else []
            if checkpoint_s is None:
                problems.append("no checkpoint was written")
            elif checkpoint_s > MAX_CHECKPOINT_S:
                problems.append(
                    f"its checkpoint was complete after {checkpoint_s:.1f} s; {MAX_CHECKPOINT_S:.0f} s are allowed"
                )
        if rejoin_s is not None and rejoin_s > MAX_REJOIN_S:
            message = f"all workers trained {rejoin_s:.1f} s after a node had joined; {MAX_REJOIN_S:.0f} s are allowed"
            problems.append(message)
        return problems

    @property
    def has_passed(self) -> bool:
        return not self.problems()


def due_fault(
    events: EventLog,
    injected: Sequence[InjectedFault],
    planned: Sequence[FaultKind],
    total_steps: int,
    min_workers: int = 1,
) -> FaultKind | None:
    """The fault that is due now, or None. Each comes at its position, once the run has recovered from the previous one
    and has `min_workers`. `total_steps`: steps of the whole run."""
    if len(injected) == len(planned) or (injected and not injected[-1].has_recovered):
        return None
    if next((event["workers"] for event in reversed(events) if event["kind"] == "started"), 0) < min_workers:
        return None
    last_event = events[-1] if events else {}
    kind = planned[len(injected)]
    return (
        kind
        if last_event.get("kind") == "progress" and last_event["step"] >= total_steps // FAULT_POSITIONS[kind]
        else None
    )


def record_recovery(fault: InjectedFault, events: EventLog) -> None:
    """Record the run's recovery since the fault."""
    fault_index = next((index for index, event in enumerate(events) if event["time"] > fault.time), len(events))
    restart_index = next(
        (number for number in range(fault_index, len(events)) if events[number]["kind"] == "started"), None
    )
    saved_at = next((event["time"] for event in events[fault_index:restart_index] if event["kind"] == "saved"), None)
    if saved_at is not None and fault.kind == "notice":
        fault.seconds_to_checkpoint = round(saved_at - fault.time, 1)
    if restart_index is None:
        return
    fault.at_step = max((event["step"] for event in events[:restart_index] if event["kind"] == "progress"), default=0)
    fault.resumed_from_step = events[restart_index]["step"]
    fault.recomputed_steps = max(0, fault.at_step - fault.resumed_from_step)
    previous_workers = next(
        (event["workers"] for event in reversed(events[:fault_index]) if event["kind"] == "started"), 0
    )
    workers = 0
    for event in events[restart_index:]:
        if event["kind"] == "started":
            workers = event["workers"]
        elif event["kind"] == "progress" and event["step"] > fault.at_step:
            if fault.seconds_to_next_step < 0:
                fault.seconds_to_next_step = round(event["time"] - fault.time, 1)
            if workers >= previous_workers:
                fault.full_size_at = event["time"]
                return


def seconds_after_join(fault: InjectedFault, join_times: Collection[float]) -> float | None:
    """Compute `InjectedFault.seconds_after_join`; `join_times`: join times of the nodes, in seconds since 1970."""
    first_join = min((at for at in join_times if at > fault.time), default=None)
    return (
        round(fault.full_size_at - first_join, 1)
        if first_join is not None and fault.full_size_at is not None and fault.full_size_at > first_join
        else None
    )


class ClusterFaultInjector:
    """Polls a run's log, and injects each fault when it is due."""

    def __init__(self, cluster: RehearsalCluster, planned: Sequence[FaultKind], total_steps: int, min_workers: int = 1):
        """`min_workers`: minimum workers of the run when a fault is injected."""
        self._cluster, self._planned, self._total_steps, self._min_workers = cluster, planned, total_steps, min_workers
        self.injected: list[InjectedFault] = []

    def inject_due_fault(self, events: EventLog) -> InjectedFault | None:
        """Inject a due fault, and return it."""
        self._terminate_noticed()
        if self.injected and not self.injected[-1].has_recovered:
            record_recovery(self.injected[-1], events)
        kind = due_fault(events, self.injected, self._planned, self._total_steps, self._min_workers)
        node = find_training_node(self._cluster) if kind else None
        if kind is None or node is None:
            return None
        fault = InjectedFault(kind, node, self._cluster.registry.all_machines()[node].type, time.time())
        if kind == "notice":
            self._cluster.metadata_by_machine[node].terminates_at = (
                fault.time + NOTICE_PERIOD_S[self._cluster.plan.watcher or "aws"]
            )
        else:
            self._cluster.cloud.cut_power(node)
        self.injected.append(fault)
        return fault

    def _terminate_noticed(self) -> None:
        """Terminate the machines whose notice has expired."""
        for name, machine in self._cluster.registry.live_machines().items():
            terminates_at = self._cluster.metadata_by_machine[name].terminates_at
            if terminates_at is not None and time.time() > terminates_at and machine.pid is not None:
                self._cluster.cloud.cut_power(name)


def find_training_node(cluster: RehearsalCluster) -> str | None:
    """A machine with workers of a run, a spot machine if possible."""
    candidates = [
        (not cluster.plan.types_by_name[machine.type].is_spot, name)
        for name, machine in machines_with_process(cluster, WORKER_PROCESS_PREFIX).items()
    ]
    return min(candidates)[1] if candidates else None


def machines_with_process(cluster: RehearsalCluster, prefix: str) -> dict[str, MachineRecord]:
    """Worker machines that run a process whose command line begins with `prefix`."""
    return {
        name: live_machine
        for name, live_machine in cluster.registry.live_machines().items()
        if name != cluster.head_name and live_machine.pid is not None and _has_process(live_machine.pid, prefix)
    }


def _has_process(pid: int, prefix: str) -> bool:
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(prefix):
                    return True
    return False
