"""A job on a rehearsed cluster: followed until it ends, disturbed by a spot notice and by the loss of a node
without one.

The time of a fault and the run's recovery are computed from the run's log; both are pure. `JobFollower` also records
the cluster's listening sockets, which are checked against a list of allowed ones.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

import psutil

from rtrain.cluster.jobs import job_names
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.rehearsal.local_cluster import LogFunction, RehearsalCluster
from rtrain.rehearsal.machine import MachineRecord

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
POLL_INTERVAL_S = 0.3
LISTENER_CHECK_INTERVAL_S = 5.0
STATUS_TIMEOUT_S = 60.0
SILENCE_TIMEOUT_S = 600.0
"""Seconds without a log line after which a rehearsal is aborted."""
STATUS_INTERVAL_S = 30.0
Scope = Literal["loopback", "network"]
PROCESS_ROLES = (
    # Fragments of the command line; the first match counts.
    ("control service", "gcs_server"),
    ("raylet", "/raylet/raylet "),
    ("node agent", "ray::DashboardAgent"),
    ("runtime environments", "ray::RuntimeEnvAgent"),
    ("autoscaler", "monitor.py"),
    ("dashboard", "dashboard.py"),
    ("dashboard", "ray-dashboard"),
    ("Ray Client", "ray.util.client.server"),
    ("process of a job", "ray::"),
    ("process of a job", "default_worker.py"),
    ("driver", "-m rtrain"),
)
METRICS_ROLE = "metrics of the dashboard"
"""Cluster metrics, which Ray (2.60) serves to anyone; the dashboard's process serves them."""
ALLOWED_SCOPES: dict[str, Scope] = {
    "control service": "network",
    "raylet": "network",
    "node agent": "network",
    "runtime environments": "network",
    "autoscaler": "network",
    "process of a job": "network",
    "driver": "network",
    METRICS_ROLE: "network",
    # The job API runs any code of a token holder: it is reachable by SSH only.
    "dashboard": "loopback",
}
"""Allowed scope of each role. `network` is the cluster's own network, which admits nobody else: these listeners require
the cluster's token, or synchronize gradients. Any other listener is a finding."""


@dataclass
class InjectedFault:
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
        if self.kind == "notice" and self.recomputed_steps:
            problems.append(f"{self.recomputed_steps} steps were recomputed")
        if self.kind == "notice" and checkpoint_s is None:
            problems.append("no checkpoint was written")
        if self.kind == "notice" and checkpoint_s is not None and checkpoint_s > MAX_CHECKPOINT_S:
            allowed = f"{MAX_CHECKPOINT_S:.0f} s are allowed"
            problems.append(f"its checkpoint was complete after {checkpoint_s:.1f} s; {allowed}")
        if rejoin_s is not None and rejoin_s > MAX_REJOIN_S:
            allowed = f"{MAX_REJOIN_S:.0f} s are allowed"
            problems.append(f"all workers trained {rejoin_s:.1f} s after a node had joined; {allowed}")
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
    if not events or len(injected) == len(planned) or (injected and not injected[-1].has_recovered):
        return None
    kind, last_event = planned[len(injected)], events[-1]
    is_due = last_event["kind"] == "progress" and last_event["step"] >= total_steps // FAULT_POSITIONS[kind]
    return kind if is_due and _last_workers(events) >= min_workers else None


def _last_workers(events: EventLog) -> int:
    """Number of workers of the last attempt."""
    return next((event["workers"] for event in reversed(events) if event["kind"] == "started"), 0)


def record_recovery(fault: InjectedFault, events: EventLog) -> None:
    """Record the run's recovery since the fault."""
    fault_index = next((index for index, event in enumerate(events) if event["time"] > fault.time), len(events))
    later_events = enumerate(events[fault_index:], fault_index)
    restart_index = next((index for index, event in later_events if event["kind"] == "started"), None)
    saved_at = next((event["time"] for event in events[fault_index:restart_index] if event["kind"] == "saved"), None)
    if saved_at is not None and fault.kind == "notice":
        fault.seconds_to_checkpoint = round(saved_at - fault.time, 1)
    if restart_index is None:
        return
    fault.at_step = max((event["step"] for event in events[:restart_index] if event["kind"] == "progress"), default=0)
    fault.resumed_from_step = events[restart_index]["step"]
    fault.recomputed_steps = max(0, fault.at_step - fault.resumed_from_step)
    previous_workers, workers = _last_workers(events[:fault_index]), 0
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
    if first_join is None or fault.full_size_at is None or fault.full_size_at <= first_join:
        return None
    return round(fault.full_size_at - first_join, 1)


class ClusterFaultInjector:
    """Polls a run's log, and injects each fault when it is due."""

    def __init__(self, cluster: RehearsalCluster, planned: Sequence[FaultKind], total_steps: int, min_workers: int = 1):
        """`min_workers`: minimum workers of the run when a fault is injected."""
        self._cluster, self._planned, self._total_steps, self._min_workers = cluster, planned, total_steps, min_workers
        self.injected: list[InjectedFault] = []

    def inject_due_fault(self, events: EventLog) -> InjectedFault | None:
        self._terminate_noticed()
        if self.injected and not self.injected[-1].has_recovered:
            record_recovery(self.injected[-1], events)
        kind = due_fault(events, self.injected, self._planned, self._total_steps, self._min_workers)
        node = find_training_node(self._cluster) if kind else None
        if kind is None or node is None:
            return None
        fault = InjectedFault(kind, node, self._cluster.registry.all_machines()[node].type, time.time())
        if kind == "notice":
            period_s = NOTICE_PERIOD_S[self._cluster.plan.watcher or "aws"]
            self._cluster.metadata_by_machine[node].terminates_at = fault.time + period_s
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
    for process in _child_processes(pid):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(prefix):
                return True
    return False


@dataclass(frozen=True, order=True)
class Listener:
    machine: str
    role: str
    scope: Scope
    port: int

    @property
    def is_allowed(self) -> bool:
        allowed_scope = ALLOWED_SCOPES.get(self.role)
        return allowed_scope == "network" or allowed_scope == self.scope

    @property
    def description(self) -> str:
        network = "the network" if self.scope == "network" else "loopback"
        return f"{self.role} listens on {network}, port {self.port} ({self.machine})"


def process_role(command: str) -> str:
    return next((role for role, sign in PROCESS_ROLES if sign in command), command[:60] or "an unnamed process")


def address_scope(address: str) -> Scope:
    return "loopback" if ip_address(address.partition("%")[0]).is_loopback else "network"


def find_listeners(machines: Iterable[tuple[str, int]], port_roles: Mapping[int, str]) -> set[Listener]:
    """Find the TCP listeners of all processes on the machines, given as (name, process id).

    `port_roles`: roles of ports that are more specific than their processes.
    """
    listeners = set[Listener]()
    for name, pid in machines:
        for process in _child_processes(pid):
            with suppress(psutil.Error):
                command_line = process.cmdline()
                if not command_line and not process.exe():
                    continue  # it is exiting: a process loses its name before its sockets
                role = process_role(" ".join(command_line))
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        port, scope = connection.laddr.port, address_scope(connection.laddr.ip)
                        listeners.add(Listener(name, port_roles.get(port, role), scope, port))
    return listeners


def _child_processes(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


class RehearsalAborted(UserError):
    """The rehearsal cannot continue; its measurements so far are judged."""


class JobFollower:
    """Follows jobs on one cluster. `logs` is the folder of its machines' output."""

    def __init__(self, cluster: RehearsalCluster, logs: Path, log: LogFunction):
        self._cluster, self._logs, self._log = cluster, logs, log
        self._listeners_checked_at = 0.0
        self._port_roles = {cluster.metrics_port: METRICS_ROLE}
        self.listeners: set[Listener] = set()
        """All sockets seen so far."""

    def follow_training(
        self,
        job: str,
        run: Run,
        injector: ClusterFaultInjector | None = None,
        should_stop: Callable[[EventLog], bool] = lambda log: False,
    ) -> None:
        """Return once a run's job has finished, or was stopped by `should_stop`. Raises `RehearsalAborted` if it
        failed, or was silent for too long."""
        name, is_stopped = run.folder.name, False
        active_at, logged_events, reported_at = time.monotonic(), 0, 0.0
        while True:
            status = self.wait_for_status(job)
            log = run.events() if run.log.is_file() else []
            self.record_listeners()
            if injector is not None and (fault := injector.inject_due_fault(log)) is not None:
                self._log(f"{fault.kind} at step {log[-1]['step']}: {fault.node} ({fault.type})")
            if status in job_names.FINAL_STATUSES:
                break
            if not is_stopped and should_stop(log):
                is_stopped = self._cluster.jobs.stop(job)
            if len(log) > logged_events:
                active_at, logged_events = time.monotonic(), len(log)
                if log[-1]["kind"] != "progress":
                    self._log(f"{name} run: {log[-1]['kind']}")
            elif time.monotonic() - active_at > SILENCE_TIMEOUT_S:
                self._cluster.jobs.stop(job)
                message = f"the {name} run has logged nothing for {SILENCE_TIMEOUT_S:.0f} s; see {self._logs}"
                raise RehearsalAborted(message, code="run_silent")
            elif time.monotonic() - reported_at > STATUS_INTERVAL_S and not log:
                reported_at = time.monotonic()
                num_nodes = len(self._cluster.registry.live_machines()) - 1
                self._log(f"{name} run: {status.lower()}, {num_nodes} worker nodes")
            time.sleep(POLL_INTERVAL_S)
        if status != "SUCCEEDED" and not is_stopped:
            lines = self._cluster.jobs.get_logs(job).strip().splitlines()[-12:]
            message = "\n".join([f"the {name} run ended as {status}; its last lines:", *lines])
            raise RehearsalAborted(message, code="run_failed")

    def wait_for_status(self, job: str) -> str:
        """Status of a job. A busy head may respond late."""
        deadline = time.monotonic() + STATUS_TIMEOUT_S
        while True:
            try:
                job_info = self._cluster.jobs.list_jobs().get(job)
            except UserError:
                if time.monotonic() > deadline or self._cluster.head_name not in self._cluster.registry.live_machines():
                    raise
            else:
                if job_info is None:
                    message = f"the head was restarted, and does not know the job {job}; see {self._logs}"
                    raise RehearsalAborted(message, code="head_restarted")
                return job_info.status
            time.sleep(POLL_INTERVAL_S)

    def record_listeners(self) -> None:
        """Record open sockets periodically: most of them are short-lived."""
        if time.monotonic() - self._listeners_checked_at < LISTENER_CHECK_INTERVAL_S:
            return
        self._listeners_checked_at = time.monotonic()
        machines = self._cluster.registry.live_machines().items()
        pids = [(name, machine.pid) for name, machine in machines if machine.pid is not None]
        self.listeners |= find_listeners(pids, self._port_roles)
