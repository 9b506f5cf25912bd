"""The slots of a search: Ray Tune trials, each with a worker group that runs one assignment after another.

Ray Tune starts a slot's process, and restarts it after every death; its workers request their own CPUs or GPUs.
`tune.search` decides the assignments: the driver puts them into a slot's mailbox, and the slots put outcomes into a
common one. A killed slot loses its current assignment only. This module decides when a slot has died too often, since a
trial may be the cause.
"""

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.tune

from rtrain import ray_internals
from rtrain.cluster import capacity, placement
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.runs import stop_request, worker_pool
from tune import trainable
from tune.trainable import Assignment, Outcome, SearchTask

# A slot needs no CPU: its workers have theirs. Tune refuses an empty bundle, so slots reserve 0.001 of the head-node
# resource.
SLOT_RESOURCES = {"CPU": 0, ray_internals.HEAD_RESOURCE: 0.001}
REPORTS_MAILBOX = "reports"
LOGGERS_VARIABLE = "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"
"""Turns off Tune's loggers: a search has its own journal."""
MAX_LOSSES = 3
"""Maximum losses of an assignment before its trial fails, and maximum deaths of an idle slot, since its last
assignment, before the search ends."""
POLL_INTERVAL_S = 1.0
"""Seconds between two checks for ended slots."""
IDLE_RELEASE_S = 30.0
"""Seconds that an idle slot keeps its workers; their start takes about ten."""
SHUTDOWN_TIMEOUT_S = 60.0
"""Seconds for the slots to shut down."""


@dataclass(frozen=True)
class SlotReport:
    """Report of a slot: it has started (no assignment), or the outcomes of an assignment."""

    slot: int
    mailbox: str
    """Mailbox of this process of the slot."""
    assignment: Assignment | None = None
    outcomes: tuple[Outcome, ...] = ()


def count_slots(config: Config, device: str) -> int:
    """Return the number of slots: `tune.max_concurrent_trials`, or as many as fit on the cluster.

    Raises `ConfigError` if the requested number does not fit, with the largest number that fits.
    """
    workers, requested = config.recipe.train.workers, config.deploy.tune.max_concurrent_trials
    needs = capacity.resource_request_from_config(config, device)
    fitting = max(1, placement.max_concurrent_runs(capacity.live_nodes(), capacity.autoscaler_limits(), needs, workers))
    if requested is None or requested <= fitting:
        return requested or fitting
    data_cpus = needs.capacity_for(workers).data_cpus if device == "cpu" else 0
    available = capacity.max_accelerators(device, needs.labels)
    data_clause = f", {data_cpus} per trial for data tasks" if device == "cpu" else ""
    reason = (
        f"{requested} trials of {workers} workers need {requested * (workers + data_cpus)} logical "
        f"{capacity.WORKER_RESOURCE[device]}s{data_clause}; the Ray cluster has {available}"
    )
    fix = f"write {fitting}, or {max(1, available // requested - data_cpus)} for train.workers"
    raise ConfigError([Problem("tune.max_concurrent_trials", requested, reason, fix, code="too_large")])


def _run_slot(settings: dict[str, Any], mailbox_server: Any, task: SearchTask) -> None:
    """The trainable of Ray Tune: run assignments until the shutdown message."""
    slot = int(settings["slot"])
    mailbox = f"slot {slot} {time.time_ns()}"
    workers = worker_pool.ReusableWorkerGroup(_slot_run(Run(task.search), slot), mailbox_server)
    ray.get(mailbox_server.put.remote(REPORTS_MAILBOX, SlotReport(slot, mailbox)))
    try:
        for message_number in itertools.count():
            assignment = _next_assignment(mailbox_server.take.remote(mailbox, message_number), workers)
            if assignment is None:
                return
            outcomes = trainable.run_assignment(assignment, task, workers)
            ray.get(mailbox_server.put.remote(REPORTS_MAILBOX, SlotReport(slot, mailbox, assignment, tuple(outcomes))))
    finally:
        workers.shut_down()


def _next_assignment(pending_message: Any, workers: worker_pool.ReusableWorkerGroup) -> Assignment | None:
    """Return the slot's next assignment. An idle slot releases its workers: after a lost node another slot may need
    their CPUs."""
    if not ray.wait([pending_message], timeout=IDLE_RELEASE_S)[0]:
        workers.shut_down()
    assignment: Assignment | None = ray.get(pending_message)
    return assignment


def _slot_run(search: Run, slot: int) -> Run:
    return Run(search.ray_storage / f"slot-{slot:02d}")


class SlotDeaths(ray.tune.Callback):
    """Collects the deaths of slot processes that Ray Tune reports."""

    def __init__(self) -> None:
        self.restarted_slots: list[int] = []
        """An entry for each death after which Tune restarts the slot."""
        self.ended_slots: list[int] = []
        """Slots that Tune does not restart, since they died before their start."""

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.restarted_slots.append(int(trial.config["slot"]))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.ended_slots.append(int(trial.config["slot"]))


@dataclass
class SlotPool:
    search: Run
    mailbox_server: Any
    tuner: threading.Thread
    deaths: SlotDeaths = field(default_factory=SlotDeaths)
    idle_deaths: Counter[int] = field(default_factory=Counter)
    """Deaths by slot since its last finished or lost assignment, which no trial has caused."""
    mailboxes: dict[int, str] = field(default_factory=dict)
    """Mailbox of each started slot."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    """Current assignment by slot."""
    reports_read: int = 0
    """Number of reports that were read."""
    error: Exception | None = None
    stop_signal: stop_request.StopOnSignal = field(default_factory=stop_request.StopOnSignal)
    """Requests the end of the search after its trials have saved checkpoints."""

    @property
    def idle_slots(self) -> list[int]:
        return [] if self.stop_signal.is_requested else sorted(self.mailboxes.keys() - self.assignments.keys())

    def assign(self, slot: int, assignment: Assignment) -> None:
        self.assignments[slot] = assignment
        ray.get(self.mailbox_server.put.remote(self.mailboxes[slot], assignment))

    def wait(self, on_poll: Callable[[], None] = lambda: None) -> tuple[Assignment | None, tuple[Outcome, ...] | None]:
        """Wait for the next report and return (assignment, outcomes).

        (assignment, None): the slot died with the assignment. (None, ()): a slot has started.

        Args:
            on_poll: called about every `POLL_INTERVAL_S`.

        Raises:
            UserError: a slot died too often without an assignment, or no slot is left.
            StoppedByRequest: a stop was requested, and no assignment is left.
        """
        pending_report = self.mailbox_server.take.remote(REPORTS_MAILBOX, self.reports_read)
        while True:
            on_poll()
            if self.stop_signal.is_requested:
                self._request_stops()
            ended_slots = [slot for slot in self.deaths.ended_slots if slot in self.mailboxes]
            if ray.wait([pending_report], timeout=POLL_INTERVAL_S)[0]:
                break
            if not self.tuner.is_alive():
                message = f"Ray Tune has ended before the search: {self.error or 'no slot is left'}"
                raise UserError(message, code="workers_lost")
            self._count_deaths()
            for slot in ended_slots:  # their earlier reports are read by now
                del self.mailboxes[slot]
                if (lost_assignment := self.assignments.pop(slot, None)) is not None:
                    return lost_assignment, None
        report: SlotReport = ray.get(pending_report)
        self.reports_read += 1
        self._count_deaths()
        assignment = self.assignments.pop(report.slot, None)
        if assignment is not None:
            self.idle_deaths[report.slot] = 0
        if report.assignment is not None:
            return report.assignment, report.outcomes
        self.mailboxes[report.slot] = report.mailbox
        return assignment, () if assignment is None else None

    def _request_stops(self) -> None:
        if not self.assignments:
            raise stop_request.StoppedByRequest(
                f"{self.search} was stopped by a request. Continue it with the same command and --resume"
            )
        for assignment in self.assignments.values():  # repeated: a starting trial consumes earlier requests
            with suppress(FileNotFoundError):  # the trial has no folder yet
                stop_request.request_stop(self.search.trial(assignment.trial), stop_request.SIGNALED)

    def _count_deaths(self) -> None:
        while self.deaths.restarted_slots:
            slot = self.deaths.restarted_slots.pop(0)
            self.idle_deaths[slot] += 1
            if self.idle_deaths[slot] > MAX_LOSSES:
                raise UserError(
                    f"the process of slot {slot} died {self.idle_deaths[slot]} times without an assignment; see the "
                    "logs of Ray's workers. Continue with the same command and --resume",
                    code="workers_lost",
                )
            if slot not in self.assignments:
                self.mailboxes.pop(slot, None)  # no process reads it


@contextmanager
def open_slots(config: Config, task: SearchTask, count: int) -> Iterator[SlotPool]:
    """Start `count` slots. They shut down at the end of the block, and are killed if it raises."""
    search, mailbox_server, deaths = Run(task.search), worker_pool.start_mailbox_server(), SlotDeaths()
    attempt_number = len(list(search.ray_storage.iterdir())) if search.ray_storage.is_dir() else 0
    stop_file = search.folder / ".stop_slots"
    stop_file.unlink(missing_ok=True)
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(partial(_run_slot, mailbox_server=mailbox_server, task=task), SLOT_RESOURCES),
        param_space={"slot": ray.tune.grid_search(list(range(count)))},
        run_config=ray.tune.RunConfig(
            # A new name per attempt: under an old name Ray would unpickle its last state.
            name=f"tune-{attempt_number:03d}",
            storage_path=str(search.ray_storage),
            failure_config=ray.tune.FailureConfig(max_failures=-1),
            stop=_StopWhenFileExists(stop_file),
            callbacks=[ray_internals.make_silent_progress(), deaths],
            verbose=0,
        ),
    )

    def fit() -> None:
        try:
            tuner.fit()
        except Exception as error:
            pool.error = error

    has_user_value = LOGGERS_VARIABLE in os.environ
    os.environ.setdefault(LOGGERS_VARIABLE, "1")
    pool = SlotPool(search, mailbox_server, threading.Thread(target=fit, daemon=True, name="rtrain-tune"), deaths)
    pool.tuner.start()
    try:
        with pool.stop_signal:
            yield pool
        for mailbox in pool.mailboxes.values():
            ray.get(mailbox_server.put.remote(mailbox, None))
        pool.tuner.join(SHUTDOWN_TIMEOUT_S)
    finally:
        if not has_user_value:  # a user's own Tuner in this process keeps its loggers
            os.environ.pop(LOGGERS_VARIABLE, None)
        # No thread may be inside Ray's core when the session ends.
        stop_file.touch()
        pool.tuner.join(worker_pool.RAY_SHUTDOWN_TIMEOUT_S)
        stop_file.unlink(missing_ok=True)
        for slot in range(count):
            worker_pool.release_group(_slot_run(search, slot))
        ray.kill(mailbox_server)


class _StopWhenFileExists(ray.tune.Stopper):
    def __init__(self, file: Path):
        self._stop_file = file

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stop_file.exists()
