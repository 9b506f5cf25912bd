"""Experiment trackers: TensorBoard or MLflow is told what a run logs while it runs, by one line of configuration.

The process that follows the run's events feeds the trackers, and the workers know nothing of them. What a tracker fails
to take is kept and sent again; what it lacks when the process ends is sent by the next command on the run. The run goes
on meanwhile.
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
from rtrain.core.errors import Problem, TryAgain, UserError, hide
from rtrain.core.run_folder import Run

Event = dict[str, Any]
Outcome = Literal["finished", "failed", "interrupted"]
Say = Callable[[Event], None]

MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Modules that a tracker imports, which its extra installs."""
RUN_ID = "mlflow.json"
UNTRACKED = "untracked"
"""The event of a tracker that has failed, with the update `since` which it lacks figures; None once it has all."""
RETRY_S = 30.0
"""Seconds from a failure of a tracker to the next try."""


class Tracker(Protocol):
    """All that is asked of a tracker. Every method may raise what its library raises."""

    fresh: bool
    """True where it knows nothing of this run yet; it is then told all that was logged so far."""

    def log(self, values: Mapping[str, float], update: int, time: float) -> None:
        """Figures after `update` updates; `time` is seconds since 1970."""
        ...

    def close(self, outcome: Outcome) -> None: ...


def missing(config: Config) -> list[Problem]:
    """Trackers whose libraries are not installed; asked before anything starts."""
    problems = []
    for name in config.deploy.report.trackers:
        if lacking := [module for module in MODULES[name] if importlib.util.find_spec(module) is None]:
            reason = f"{name} needs {', '.join(lacking)}, which is not installed"
            fix = f"run: pip install 'rtrain[{name}]'"
            problems.append(Problem("report.trackers", name, reason, fix, code="not_installed"))
    return problems


@contextmanager
def following(config: Config, run: Run, say: Say) -> Iterator[None]:
    """While it is entered, the configured trackers are told what the run logs."""
    if not config.deploy.report.trackers:
        yield
        return
    past, feeds = run.events(), list[Feed]()
    outcome: Outcome = "failed"
    try:
        for name in config.deploy.report.trackers:  # where one is refused, those before it are closed
            feeds.append(Feed(name, TRACKERS[name](config, run), run, past, say))
        with ExitStack() as stack:
            for feed in feeds:  # each by a thread of its own: a slow server must not hold up the others
                stack.enter_context(events.Follow([(run.folder, {})], feed))
            yield
        outcome = "finished"
    except (KeyboardInterrupt, SystemExit, TryAgain):
        outcome = "interrupted"
        raise
    finally:
        for feed in feeds:
            feed.close(outcome)


def fill(config: Config, run: Run, say: Say) -> None:
    """Send trackers of a finished run the figures that they lack."""
    logged = run.events(UNTRACKED)
    if any(_first_missing_update(name, logged) is not None for name in config.deploy.report.trackers):
        try:
            with following(config, run, say):
                pass
        except UserError as error:  # its server is still away
            say({"kind": "stage", "text": str(error)})


def _first_missing_update(name: str, past: Sequence[Event]) -> int | None:
    """The update from which on a tracker lacks figures, by the run's log."""
    events_of_tracker = [event for event in past if event["kind"] == UNTRACKED and event["tracker"] == name]
    return events_of_tracker[-1]["since"] if events_of_tracker else None


class Feed:
    """Tells one tracker each update once: a restart repeats updates, with the same figures. The scores of the test rows
    are told once more where the end of a run has chosen something, a threshold say, by which they are the run's."""

    def __init__(self, name: str, tracker: Tracker, run: Run, past: Sequence[Event], say: Say):
        self._name, self._tracker, self._run, self._say = name, tracker, run, say
        self._told: dict[tuple[str, bool], int] = {}
        """The newest update that was told, by name, and whether by what was chosen at the end."""
        self._unsent: list[tuple[dict[str, float], int, float]] = []
        self._retry_at = 0.0
        since = _first_missing_update(name, past)
        self._is_missing = since is not None
        for event in past:
            self(event, tell=tracker.fresh or (since is not None and figures(event)[1] >= since))

    def __call__(self, event: Event, tell: bool = True) -> None:
        values, update = figures(event)
        chosen = bool(event.get("chosen")) and event["split"] == "test"
        new = {name: value for name, value in values.items() if update > self._told.get((name, chosen), -1)}
        self._told |= {(name, chosen): update for name in new}
        if new and tell:
            self._unsent.append((new, update, event["time"]))
            if time.monotonic() >= self._retry_at:
                self._send()

    def close(self, outcome: Outcome) -> None:
        self._send()
        if self._unsent:
            self._say_line(f"{self._name} lacks the figures from update {self._unsent[0][1]} on; --resume sends them")
            return
        try:
            self._tracker.close(outcome)
        except Exception as error:
            self._say_line(f"{self._name} was not closed: {_first_line(error)}")

    def _send(self) -> None:
        try:
            while self._unsent:
                self._tracker.log(*self._unsent[0])
                del self._unsent[0]
        except Exception as error:  # a server that is gone, a full disk: nothing that should end a training
            if not self._is_missing:
                self._say_line(f"{self._name} failed; its figures are kept and sent again: {_first_line(error)}")
                self._log_missing(self._unsent[0][1])
            self._retry_at = time.monotonic() + RETRY_S
        else:
            if self._is_missing:
                self._say_line(f"{self._name} has all figures again")
                self._log_missing(None)

    def _log_missing(self, since: int | None) -> None:
        self._is_missing = since is not None
        self._run.append(UNTRACKED, tracker=self._name, since=since)

    def _say_line(self, text: str) -> None:
        self._say({"kind": "stage", "text": text})


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def figures(event: Event) -> tuple[dict[str, float], int]:
    """(values by name, update) of an event; no values where it has none to be plotted."""
    kind = event["kind"]
    if kind == "progress":
        return _finite("train", {"loss": event["loss"]}), event["update"]
    if kind == "evaluated":
        return _finite(event["split"], event["scores"]), event["update"]
    if kind == "trained":
        return _finite("seconds", event["seconds"]), event["updates"]
    return {}, 0


def _finite(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The plain figures of a mapping, as `group/name`; scores by label or slice are the report's."""
    return {
        # What every tracker takes in a name.
        f"{group}/{re.sub(r'[^A-Za-z0-9_. -]', '_', name)}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and name != "rows"
    }


# ---------------------------------------------------------------------------------------------------------- TensorBoard


class TensorBoard:
    """Event files under `report.tensorboard_dir` (default: `tensorboard` beside the run), one folder per run."""

    def __init__(self, config: Config, run: Run):
        from tensorboard.summary import Writer

        root = config.deploy.report.tensorboard_dir
        folder = (Path(root) if root else run.folder.parent / "tensorboard") / run.name
        self.fresh = not (folder.is_dir() and any(folder.iterdir()))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"report.tensorboard_dir: {folder} cannot be made ({error.strerror})"
            raise UserError(text, code="unwritable") from None
        self._writer = Writer(str(folder))

    def log(self, values: Mapping[str, float], update: int, time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update, wall_time=time)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


# --------------------------------------------------------------------------------------------------------------- MLflow


class MLflow:
    """A run of the experiment named after the recipe; a resumed run goes on in the same one.

    At `report.mlflow_uri`, else MLFLOW_TRACKING_URI, else in a SQLite file beside the run.
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
            self._run_id, self.fresh = self._open(settings.mlflow_experiment or config.recipe.name, uri, run)
            if self.fresh:
                self._describe(config)
        except MlflowException as error:
            reason = (str(error).splitlines() or [""])[0][:300]
            fix = "set report.mlflow_uri to a server that answers, or take mlflow out of report.trackers"
            text = f"report.mlflow_uri: {hide(uri)} cannot be used ({hide(reason)}); {fix}"
            raise UserError(text, code="unreachable") from None

    def _open(self, experiment: str, uri: str, run: Run) -> tuple[str, bool]:
        """(id of the tracker's run, whether it is new). The id is kept in the run folder, for its address."""
        path, address = run.folder / RUN_ID, hide(uri)
        known = json_files.read(path) if path.is_file() else {}
        if run_id := known.get(address):
            self._client.update_run(run_id, status="RUNNING")
            return str(run_id), False
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        made: str = self._client.create_run(
            place, run_name=run.name, tags={"rtrain.core.run_folder": str(run)}
        ).info.run_id
        atomic_write.write_text(path, json.dumps({**known, address: made}))
        return made, True

    def _describe(self, config: Config) -> None:
        for name, value in configuration.flat(config).items():
            self._client.log_param(self._run_id, name, hide(str(value))[:500])

    def log(self, values: Mapping[str, float], update: int, time: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(1000 * time), update) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, outcome: Outcome) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[outcome]
        self._client.set_terminated(self._run_id, status)


TRACKERS: Mapping[str, Callable[[Config, Run], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
