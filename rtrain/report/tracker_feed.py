"""Feeds the trackers of a run from its log, each in a thread of its own.

The log on disk is the queue: a thread reads new events, and stores in the run folder how many its tracker has. A failed
event is sent again, and later events wait for it. The next command on the run, or `rtrain report RUN --trackers`, sends
the events that a tracker lacks at the end of a command. A process that dies between an event and the stored number
sends this event twice; each tracker ignores the second one by its step.
"""

import importlib.util
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rtrain.config import Config
from rtrain.core import events, plugins
from rtrain.core.errors import Problem, TemporaryFailureError, UserError
from rtrain.core.run_folder import Run, quote_path
from rtrain.report import summary
from rtrain.report.trackers import TRACKERS, RunFacts, Tracker, TrackerState, extract_values

OnEvent = Callable[[dict[str, Any]], None]
REQUIRED_MODULES = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic", "pandas"),
    "wandb": ("wandb",),
}
"""Modules of each tracker, installed by its extra."""
POLL_S = 0.2
MAX_RETRY_S = 30.0
"""Longest wait for the next attempt. The first retry follows at once, the others wait 2, 4, 8 ... s."""
START_DEADLINE_S = 60.0
"""Seconds in which a tracker must start before a new run does."""
FINISH_DEADLINE_S, INTERRUPT_DEADLINE_S = 60.0, 10.0
"""Seconds at the end of a command for the remaining events, and after an interruption: a spot node has 30 s in all."""
LAST_WAITS_S = (0.0, 1.0, 2.0)
"""Seconds before each attempt at the end of a command."""
UPLOAD_BYTES_PER_S = 1e6
"""Slowest upload of an artifact that a command waits for."""
SAVE_INTERVAL = 100
"""Events between two stored numbers while a tracker gets the past."""


def check_installed(config: Config) -> list[Problem]:
    """List the trackers whose libraries are missing, before the run starts."""
    problems = (find_missing_library("report.trackers", name) for name in config.deploy.report.trackers)
    return [problem for problem in problems if problem is not None]


def find_missing_library(field: str, name: str) -> Problem | None:
    """The problem of a tracker whose libraries are missing, or None. `field`: setting or argument that needs it."""
    modules = [module for module in REQUIRED_MODULES.get(name, ()) if importlib.util.find_spec(module) is None]
    reason, fix = f"{name} needs {', '.join(modules)}, which is not installed", f"run: pip install 'rtrain[{name}]'"
    return Problem(field, name, reason, fix, code="not_installed") if modules else None


@contextmanager
def follow_run(config: Config, run: Run, on_event: OnEvent) -> Iterator[None]:
    """Feed the configured trackers from the run's events within the context.

    Raises `UserError` if a tracker cannot start a run that has not begun; in a resumed run it is retried.
    """
    must_start, status = run.first_event("started") is None, "failed"
    feeds = [TrackerFeed(name, config, run.folder, on_event) for name in config.deploy.report.trackers]
    try:
        for feed in feeds:
            feed.start(must_start)
        yield
        status = summary.run_status(run.events())
        if status == "running":  # the end of this command is not in the log yet
            trained = run.last_event("trained")
            status = "paused" if trained is not None and not trained["finished"] else "finished"
    except (KeyboardInterrupt, SystemExit, TemporaryFailureError):
        status = "interrupted"
        raise
    finally:
        _stop_feeds(feeds, run, status)


def _stop_feeds(feeds: Sequence["TrackerFeed"], run: Run, status: str) -> None:
    for feed in feeds:
        feed.request_stop(status)
    deadline = time.monotonic() + INTERRUPT_DEADLINE_S
    if status == "finished":
        artifact_bytes = sum(path.stat().st_size for path in run.artifact.rglob("*") if path.is_file())
        deadline = time.monotonic() + FINISH_DEADLINE_S + artifact_bytes / UPLOAD_BYTES_PER_S
    for feed in feeds:
        feed.join(deadline)


def send_missing(config: Config, run: Run, on_event: OnEvent, *, always: bool = False) -> None:
    """Send missing events of a run that has ended to its trackers; `always`: start trackers that have all, too."""
    names = config.deploy.report.trackers
    if always or not all(TrackerState(run.folder, name).values.get("is_finished") for name in names):
        with follow_run(config, run, on_event):
            pass


class TrackerFeed:
    """Sends each event to one tracker once. A restart of the workers repeats steps; the tracker gets their figures
    once.

    The test scores are sent again if the end of the run calibrated a threshold.
    """

    def __init__(self, name: str, config: Config, run_folder: Path, on_event: OnEvent):
        self._name, self._folder, self._on_event = name, run_folder, on_event
        with plugins.attribute_errors():
            self._tracker: Tracker = TRACKERS[name]() if name in TRACKERS else plugins.find_value("tracker", name)()
        self._state = TrackerState(run_folder, name)
        self._facts = RunFacts(run_folder, config, self._state)
        self._tail = events.EventTail(run_folder, from_start=True)
        self._pending = deque[dict[str, Any]]()
        self._position = 0
        """Events of the log that were sent, or skipped since an earlier command had sent them."""
        self._latest_steps: dict[tuple[str, bool], int] = {}
        """The newest sent step by (name, whether it is a final test score)."""
        self._failures, self._retry_at = 0, 0.0
        self._is_started = self._is_complete = self._must_start = False
        self._start_error: Exception | None = None
        self._first_attempt, self._stop, self._status = threading.Event(), threading.Event(), "failed"
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self, must_start: bool) -> None:
        """Start the thread; with `must_start`, wait for the tracker and raise `UserError` if it fails."""
        self._must_start = must_start
        self._thread.start()
        if not must_start:
            return
        if not self._first_attempt.wait(START_DEADLINE_S):
            self._start_error = TimeoutError(f"no answer in {START_DEADLINE_S:g} s")
        if isinstance(self._start_error, UserError):
            raise self._start_error
        if self._start_error is not None:
            reason = f"{self._name} cannot start ({_first_line(self._start_error)})"
            raise UserError(f"report.trackers: {reason}; repair it, or leave it out", code="unreachable")

    def request_stop(self, status: str) -> None:
        """End the thread after the events of the log; `status` of this command is one of `summary.STATUSES`."""
        self._status = status
        self._stop.set()

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline` (`time.monotonic`), and report a tracker that lacks events."""
        if self._thread.ident is None:  # an earlier tracker did not start
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._is_complete and self._start_error is None:
            command = f"rtrain report {quote_path(self._folder)} --trackers"
            self._report(f"{self._name} lacks events of the run; --resume sends them, or {command}")

    def _work(self) -> None:
        while not self._first_attempt.is_set() or not self._stop.wait(POLL_S):
            if time.monotonic() >= self._retry_at:
                self._try_send()
            self._first_attempt.set()
        for wait_s in LAST_WAITS_S if self._start_error is None else ():
            time.sleep(wait_s)
            if self._try_send(is_last=True):
                self._is_complete = True
                break
        try:
            self._tracker.close()
        except Exception as error:
            self._report(f"{self._name} was not closed: {_first_line(error)}")

    def _try_send(self, *, is_last: bool = False) -> bool:
        """Send all new events, and with `is_last` the summary. Returns whether the tracker has all of them."""
        try:
            if not self._is_started:
                self._tracker.start(self._facts)
                self._is_started = True
                self._first_attempt.set()  # a new run may begin
                self._state.values.setdefault("sent_events", 0)
                self._state.values["is_open"] = True
                self._state.save()
            self._send_events()
            if is_last:
                self._tracker.finish({**summary.summarize(Run(self._folder)), "status": self._status})
                self._state.values |= {"is_finished": self._status == "finished", "is_open": False}
                self._state.save()
        except Exception as error:  # e.g. an unreachable server or a full disk, which must not stop the training
            if self._must_start and not self._first_attempt.is_set():
                self._start_error = error
                return False
            if not self._failures:
                self._report(f"{self._name} failed; its events wait and are sent again: {_first_line(error)}")
            self._retry_at = time.monotonic() + (min(MAX_RETRY_S, 2.0**self._failures) if self._failures else 0.0)
            self._failures += 1
            return False
        if self._failures:
            self._report(f"{self._name} has all events again")
        self._failures = 0
        return True

    def _send_events(self) -> None:
        """Send the pending events and the newer ones of the log. At most one reading of the log is held."""
        sent_before = self._state.values["sent_events"]
        try:
            while self._has_pending():
                event = self._pending[0]
                values, step = extract_values(event)
                is_final_test = bool(event.get("calibration")) and event["split"] == "test"
                new_values = {
                    name: value
                    for name, value in values.items()
                    if step > self._latest_steps.get((name, is_final_test), -1)
                }
                if self._position >= self._state.values["sent_events"]:
                    self._tracker.log({**event, "step": step, "values": new_values})
                    self._state.values["sent_events"] = self._position + 1
                self._position += 1
                self._latest_steps |= {(name, is_final_test): step for name in new_values}
                del self._pending[0]
                if self._position % SAVE_INTERVAL == 0:
                    self._state.save()
        finally:
            if self._state.values["sent_events"] != sent_before:
                self._state.save()

    def _has_pending(self) -> bool:
        if not self._pending:
            self._pending.extend(self._tail.read_new())
        return bool(self._pending)

    def _report(self, text: str) -> None:
        self._on_event({"kind": "stage", "text": text})


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
