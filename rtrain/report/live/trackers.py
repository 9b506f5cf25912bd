"""Experiment trackers: TensorBoard or MLflow is told what a run logs while it runs, by one line of configuration.

The process that follows the run's events feeds the trackers, and the workers know nothing of them. A tracker that fails
is dropped with a line that says so; the run goes on.
"""

import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from rtrain import config as configuration, documents, drafts, events
from rtrain.config import Config
from rtrain.errors import Problem, TryAgain, UserError, hide
from rtrain.run import Run

Event = dict[str, Any]
Outcome = Literal["finished", "failed", "interrupted"]
Say = Callable[[Event], None]

MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Modules that a tracker imports, which its extra installs."""
RUN_ID = "mlflow.json"


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
            problems.append(Problem("report.trackers", name, reason, f"run: pip install 'rtrain[{name}]'"))
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
            feeds.append(Feed(name, _OPEN[name](config, run), past, say))
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


class Feed:
    """Tells one tracker each update once: a restart repeats updates, with the same figures. The scores of the test rows
    are told once more where the end of a run has chosen something, a threshold say, by which they are the run's."""

    def __init__(self, name: str, tracker: Tracker, past: Sequence[Event], say: Say):
        self._name, self._say = name, say
        self._tracker: Tracker | None = tracker
        self._told: dict[tuple[str, bool], int] = {}
        """The newest update that was told, by name, and whether by what was chosen at the end."""
        fresh = tracker.fresh
        for event in past:
            self(event, tell=fresh)

    def __call__(self, event: Event, tell: bool = True) -> None:
        values, update = figures(event)
        chosen = bool(event.get("chosen")) and event["split"] == "test"
        new = {name: value for name, value in values.items() if update > self._told.get((name, chosen), -1)}
        self._told |= {(name, chosen): update for name in new}
        if new and tell:
            self._guard(lambda tracker: tracker.log(new, update, event["time"]))

    def close(self, outcome: Outcome) -> None:
        self._guard(lambda tracker: tracker.close(outcome))

    def _guard(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:  # a server that is gone, a full disk: nothing that should end a training
            self._tracker = None
            first = (str(error).splitlines() or [""])[0][:200]
            text = f"{self._name} failed and is told no more: {type(error).__name__}: {first}"
            self._say({"kind": "stage", "text": text})


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
            raise UserError(f"report.tensorboard_dir: {folder} cannot be made ({error.strerror})") from None
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
            raise UserError(f"report.mlflow_uri: {hide(uri)} cannot be used ({hide(reason)}); {fix}") from None

    def _open(self, experiment: str, uri: str, run: Run) -> tuple[str, bool]:
        """(id of the tracker's run, whether it is new). The id is kept in the run folder, for its address."""
        path, address = run.folder / RUN_ID, hide(uri)
        known = documents.read(path) if path.is_file() else {}
        if run_id := known.get(address):
            self._client.update_run(run_id, status="RUNNING")
            return str(run_id), False
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        made: str = self._client.create_run(place, run_name=run.name, tags={"rtrain.run": str(run)}).info.run_id
        drafts.write_text(path, json.dumps({**known, address: made}))
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


_OPEN: Mapping[str, Callable[[Config, Run], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
