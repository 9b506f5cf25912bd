"""A job on a rehearsed cluster, followed until it has ended, and what listens on the cluster meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path

from rtrain.cluster.jobs import job_names
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.rehearsal import ports
from rtrain.rehearsal.faults import Events, Saboteur
from rtrain.rehearsal.machines.local_cluster import Up

Say = Callable[[str], None]
LOOK_EVERY_S = 0.3
PORTS_EVERY_S = 5.0
ANSWER_S = 60.0
QUIET_S = 600.0
"""Seconds without a line in a run's log after which a rehearsal is broken off."""
TOLD_EVERY_S = 30.0


def never(log: Events) -> bool:
    return False


class Broken(UserError):
    """The rehearsal cannot go on; what it has seen is judged."""


class Follower:
    """Follows jobs on one cluster. `logs` is the folder of what its machines print."""

    def __init__(self, made: Up, logs: Path, say: Say):
        self._made, self._logs, self._say = made, logs, say
        self._looked = 0.0
        self._known = {made.metrics_port: ports.METRICS}
        self.listeners: set[ports.Listener] = set()
        """Every socket that was seen."""

    def training(
        self, job: str, run: Run, name: str, saboteur: Saboteur | None = None, until: Callable[[Events], bool] = never
    ) -> None:
        """Return once a run's job has done its work, or has been stopped as its log is enough (`until`). Raises
        `Broken` where it has failed, or is quiet for too long."""
        quiet, seen, shown, enough = time.monotonic(), 0, 0.0, False
        while True:
            status = self.status(job)
            log = run.events() if run.log.is_file() else []
            self.look()
            if saboteur is not None and (fault := saboteur.look(log)) is not None:
                self._say(f"{fault.kind} at update {log[-1]['update']}: {fault.node} ({fault.type})")
            if status in job_names.ENDED:
                break
            if not enough and until(log):
                enough = self._made.jobs.stop(job)
            if len(log) > seen:
                quiet, seen = time.monotonic(), len(log)
                if log[-1]["kind"] != "progress":
                    self._say(f"{name} run: {log[-1]['kind']}")
            elif time.monotonic() - quiet > QUIET_S:
                self._made.jobs.stop(job)
                raise Broken(
                    f"the {name} run has logged nothing for {QUIET_S:.0f} s; see {self._logs}", code="run_silent"
                )
            elif time.monotonic() - shown > TOLD_EVERY_S and not log:
                shown = time.monotonic()
                self._say(f"{name} run: {status.lower()}, {len(self._made.book.up()) - 1} worker nodes")
            time.sleep(LOOK_EVERY_S)
        if status != "SUCCEEDED" and not enough:
            lines = self._made.jobs.logs(job).strip().splitlines()[-12:]
            raise Broken(
                "\n".join([f"the {name} run has ended as {status}; its last lines:", *lines]), code="run_failed"
            )

    def status(self, job: str) -> str:
        """That of a job. A head on a busy machine may be late with its answer."""
        give_up = time.monotonic() + ANSWER_S
        while True:
            try:
                found = self._made.jobs.all().get(job)
            except UserError:
                if time.monotonic() > give_up or self._made.head not in self._made.book.up():
                    raise
            else:
                if found is None:
                    raise Broken(
                        f"the head has started anew, and knows the job {job} no more; see {self._logs}",
                        code="head_restarted",
                    )
                return found.status
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Which sockets are open, now and then: most of them are there for some seconds only."""
        if time.monotonic() - self._looked < PORTS_EVERY_S:
            return
        self._looked = time.monotonic()
        machines = [(name, one.pid) for name, one in self._made.book.up().items() if one.pid is not None]
        self.listeners |= ports.listening(machines, self._known)
