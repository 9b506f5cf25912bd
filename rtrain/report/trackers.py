"""Experiment trackers: TensorBoard and MLflow receive the figures of a run.

The process that follows the run's events feeds the trackers. Failed figures are queued and sent again; figures that are
missing at the end are sent by the next command on the run. A failing tracker does not stop the run.
"""

import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core import atomic_write, events, json_files
from rtrain.core.errors import Problem, TemporaryFailureError, UserError, redact
from rtrain.core.run_folder import Run

Event = dict[str, Any]
RunOutcome = Literal["finished", "failed", "interrupted"]
OnEvent = Callable[[Event], None]
REQUIRED_MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Modules of each tracker, installed by its extra."""
RUN_ID_FILE = "mlflow.json"
TRACKER_BEHIND = "tracker_behind"
"""Event of a failed tracker with `missing_since_step`, the first missing step; None once it has all figures."""
RETRY_S = 30.0
"""Seconds from a failure to the next attempt."""


class Tracker(Protocol):
    """Interface of a tracker. Methods may raise exceptions of the library."""

    is_new: bool
    """Whether the tracker does not know this run yet; it then gets all logged figures."""

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Log figures after `step` steps; `time` is in seconds since 1970."""
        ...

    def close(self, outcome: RunOutcome) -> None: ...


def check_installed(config: Config) -> list[Problem]:
    """List the trackers whose libraries are missing, before the run starts."""
    problems = []
    for name in config.deploy.report.trackers:
        if missing_modules := [module for module in REQUIRED_MODULES[name] if importlib.util.find_spec(module) is None]:
            reason = f"{name} needs {', '.join(missing_modules)}, which is not installed"
            fix = f"run: pip install 'rtrain[{name}]'"
            problems.append(Problem("report.trackers", name, reason, fix, code="not_installed"))
    return problems


@contextmanager
def follow_run(config: Config, run: Run, on_event: OnEvent) -> Iterator[None]:
    """Feed the configured trackers from the run's events within the context."""
    if not config.deploy.report.trackers:
        yield
        return
    past, feeds = run.events(), list[TrackerFeed]()
    outcome: RunOutcome = "failed"
    try:
        for name in config.deploy.report.trackers:  # a failure closes the earlier ones
            feeds.append(TrackerFeed(name, TRACKERS[name](config, run), run, past, on_event))
        with ExitStack() as stack:
            for feed in feeds:  # one thread per tracker, so that a slow server does not delay the others
                stack.enter_context(events.EventFollower([(run.folder, {})], feed))
            yield
        outcome = "finished"
    except (KeyboardInterrupt, SystemExit, TemporaryFailureError):
        outcome = "interrupted"
        raise
    finally:
        for feed in feeds:
            feed.close(outcome)


def send_missing(config: Config, run: Run, on_event: OnEvent) -> None:
    """Send missing figures to the trackers of a finished run."""
    logged = run.events(TRACKER_BEHIND)
    if any(_first_missing_step(name, logged) is not None for name in config.deploy.report.trackers):
        try:
            with follow_run(config, run, on_event):
                pass
        except UserError as error:  # the server is still unreachable
            on_event({"kind": "stage", "text": str(error)})


def _first_missing_step(name: str, past: Sequence[Event]) -> int | None:
    """First step with missing figures of a tracker, from the run's log."""
    events_of_tracker = [event for event in past if event["kind"] == TRACKER_BEHIND and event["tracker"] == name]
    return events_of_tracker[-1]["missing_since_step"] if events_of_tracker else None


class TrackerFeed:
    """Sends each step to one tracker once; a restart repeats steps with the same figures.

    The test scores are sent again if the end of the run calibrated a threshold.
    """

    def __init__(self, name: str, tracker: Tracker, run: Run, past_events: Sequence[Event], on_event: OnEvent):
        self._name, self._tracker, self._run, self._on_event = name, tracker, run, on_event
        self._latest_steps: dict[tuple[str, bool], int] = {}
        """The newest sent step by (name, whether it is a final test score)."""
        self._unsent: list[tuple[dict[str, float], int, float]] = []
        self._retry_at = 0.0
        since = _first_missing_step(name, past_events)
        self._is_missing = since is not None
        for event in past_events:
            self(event, sends=tracker.is_new or (since is not None and extract_values(event)[1] >= since))

    def __call__(self, event: Event, sends: bool = True) -> None:
        values, step = extract_values(event)
        is_final_test = bool(event.get("calibration")) and event["split"] == "test"
        new_values = {
            name: value for name, value in values.items() if step > self._latest_steps.get((name, is_final_test), -1)
        }
        self._latest_steps |= {(name, is_final_test): step for name in new_values}
        if new_values and sends:
            self._unsent.append((new_values, step, event["time"]))
            if time.monotonic() >= self._retry_at:
                self._send()

    def close(self, outcome: RunOutcome) -> None:
        self._send()
        if self._unsent:
            self._report(f"{self._name} lacks the figures from step {self._unsent[0][1]} on; --resume sends them")
            return
        try:
            self._tracker.close(outcome)
        except Exception as error:
            self._report(f"{self._name} was not closed: {_first_line(error)}")

    def _send(self) -> None:
        try:
            while self._unsent:
                self._tracker.log(*self._unsent[0])
                del self._unsent[0]
        except Exception as error:  # e.g. an unreachable server or a full disk, which must not stop the training
            if not self._is_missing:
                self._report(f"{self._name} failed; its figures are queued and sent again: {_first_line(error)}")
                self._log_missing(self._unsent[0][1])
            self._retry_at = time.monotonic() + RETRY_S
        else:
            if self._is_missing:
                self._report(f"{self._name} has all figures again")
                self._log_missing(None)

    def _log_missing(self, step: int | None) -> None:
        self._is_missing = step is not None
        self._run.append_event(TRACKER_BEHIND, tracker=self._name, missing_since_step=step)

    def _report(self, text: str) -> None:
        self._on_event({"kind": "stage", "text": text})


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def extract_values(event: Event) -> tuple[dict[str, float], int]:
    """Return (values by name, step) of an event; no values for events without figures."""
    kind = event["kind"]
    if kind == "progress":
        return _finite_values("train", {"loss": event["loss"]}), event["step"]
    if kind == "evaluated":
        return _finite_values(event["split"], event["scores"]), event["step"]
    if kind == "trained":
        return _finite_values("seconds", event["seconds"]), event["steps"]
    return {}, 0


def _finite_values(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a mapping, as `group/name`, without scores by label or slice."""
    return {
        # What every tracker takes in a name.
        f"{group}/{re.sub(r'[^A-Za-z0-9_. -]', '_', name)}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and name != "rows"
    }


# ---------------------------------------------------------------------------------------------------------- TensorBoard


class TensorBoardTracker:
    """Event files under `report.tensorboard_dir` (default: `tensorboard` beside the run), one folder per run."""

    def __init__(self, config: Config, run: Run):
        from tensorboard.summary import Writer

        root = config.deploy.report.tensorboard_dir
        folder = (Path(root) if root else run.folder.parent / "tensorboard") / run.name
        self.is_new = not (folder.is_dir() and any(folder.iterdir()))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"report.tensorboard_dir: {folder} cannot be made ({error.strerror})"
            raise UserError(text, code="unwritable") from None
        self._writer = Writer(str(folder))

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=time)
        self._writer.flush()

    def close(self, outcome: RunOutcome) -> None:
        self._writer.close()


# --------------------------------------------------------------------------------------------------------------- MLflow


class MLflowTracker:
    """An MLflow run in the experiment of the recipe's name; a resumed run continues its MLflow run.

    The server is `report.mlflow_uri`, else MLFLOW_TRACKING_URI, else a SQLite file beside the run.
    """

    def __init__(self, config: Config, run: Run):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        settings = config.deploy.report
        uri = (
            settings.mlflow_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{run.folder.parent / 'mlflow.db'}"
        )
        try:
            self._client = MlflowClient(uri)
            self._run_id, self.is_new = self._open_run(settings.mlflow_experiment or config.recipe.name, uri, run)
            if self.is_new:
                self._log_params(config)
        except MlflowException as error:
            reason = (str(error).splitlines() or [""])[0][:300]
            fix = "set report.mlflow_uri to a server that answers, or take mlflow out of report.trackers"
            text = f"report.mlflow_uri: {redact(uri)} cannot be used ({redact(reason)}); {fix}"
            raise UserError(text, code="unreachable") from None

    def _open_run(self, experiment: str, uri: str, run: Run) -> tuple[str, bool]:
        """Return (id of the MLflow run, whether it is new). The run folder stores the id by server address."""
        path, address = run.folder / RUN_ID_FILE, redact(uri)
        run_ids = json_files.load_json_object(path) if path.is_file() else {}
        if run_id := run_ids.get(address):
            self._client.update_run(run_id, status="RUNNING")
            return str(run_id), False
        existing_experiment = self._client.get_experiment_by_name(experiment)
        experiment_id = (
            existing_experiment.experiment_id if existing_experiment else self._client.create_experiment(experiment)
        )
        new_run_id: str = self._client.create_run(
            experiment_id, run_name=run.name, tags={"rtrain.run": str(run)}
        ).info.run_id
        atomic_write.write_text(path, json.dumps({**run_ids, address: new_run_id}))
        return new_run_id, True

    def _log_params(self, config: Config) -> None:
        for name, value in configuration.flatten_config(config).items():
            self._client.log_param(self._run_id, name, redact(str(value))[:500])

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(1000 * time), step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, outcome: RunOutcome) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[outcome]
        self._client.set_terminated(self._run_id, status)


TRACKERS: Mapping[str, Callable[[Config, Run], Tracker]] = {"tensorboard": TensorBoardTracker, "mlflow": MLflowTracker}
