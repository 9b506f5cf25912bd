"""Follow a job on a rehearsed cluster until it ends, and record the cluster's listening sockets."""

import time
from collections.abc import Callable
from pathlib import Path

from rtrain.cluster.jobs import job_names
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.rehearsal import ports
from rtrain.rehearsal.faults import ClusterFaultInjector, EventLog
from rtrain.rehearsal.machines.local_cluster import RehearsalCluster

LogFunction = Callable[[str], None]
POLL_INTERVAL_S = 0.3
LISTENER_CHECK_INTERVAL_S = 5.0
STATUS_TIMEOUT_S = 60.0
SILENCE_TIMEOUT_S = 600.0
"""Seconds without a log line after which a rehearsal is aborted."""
STATUS_INTERVAL_S = 30.0


def never_stop(log: EventLog) -> bool:
    return False


class RehearsalAborted(UserError):
    """The rehearsal cannot continue; its measurements so far are judged."""


class JobFollower:
    """Follows jobs on one cluster. `logs` is the folder of its machines' output."""

    def __init__(self, cluster: RehearsalCluster, logs: Path, log: LogFunction):
        self._cluster, self._logs, self._log = cluster, logs, log
        self._listeners_checked_at = 0.0
        self._port_roles = {cluster.metrics_port: ports.METRICS_ROLE}
        self.listeners: set[ports.Listener] = set()
        """All sockets seen so far."""

    def follow_training(
        self,
        job: str,
        run: Run,
        name: str,
        injector: ClusterFaultInjector | None = None,
        should_stop: Callable[[EventLog], bool] = never_stop,
    ) -> None:
        """Return once a run's job has finished, or was stopped by `should_stop`. Raises `RehearsalAborted` if it
        failed, or was silent for too long."""
        active_at, logged_events, reported_at, is_stopped = time.monotonic(), 0, 0.0, False
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
                raise RehearsalAborted(
                    f"the {name} run has logged nothing for {SILENCE_TIMEOUT_S:.0f} s; see {self._logs}",
                    code="run_silent",
                )
            elif time.monotonic() - reported_at > STATUS_INTERVAL_S and not log:
                reported_at = time.monotonic()
                self._log(
                    f"{name} run: {status.lower()}, {len(self._cluster.registry.live_machines()) - 1} worker nodes"
                )
            time.sleep(POLL_INTERVAL_S)
        if status != "SUCCEEDED" and not is_stopped:
            lines = self._cluster.jobs.get_logs(job).strip().splitlines()[-12:]
            raise RehearsalAborted(
                "\n".join([f"the {name} run ended as {status}; its last lines:", *lines]), code="run_failed"
            )

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
                    raise RehearsalAborted(
                        f"the head was restarted, and does not know the job {job}; see {self._logs}",
                        code="head_restarted",
                    )
                return job_info.status
            time.sleep(POLL_INTERVAL_S)

    def record_listeners(self) -> None:
        """Record open sockets periodically: most of them are short-lived."""
        if time.monotonic() - self._listeners_checked_at < LISTENER_CHECK_INTERVAL_S:
            return
        self._listeners_checked_at = time.monotonic()
        machines = [
            (name, live_machine.pid)
            for name, live_machine in self._cluster.registry.live_machines().items()
            if live_machine.pid is not None
        ]
        self.listeners |= ports.find_listeners(machines, self._port_roles)
