"""Experiment trackers: the interface, and the clients of TensorBoard, MLflow and Weights & Biases.

A tracker is a class without constructor arguments and with the four methods of `Tracker`:

    class Slack:
        def start(self, run): ...        # `RunFacts`: name, folder, settings, `state` that outlives the process
        def log(self, event): ...        # an event of events.jsonl, with its figures in event["values"]
        def finish(self, summary): ...   # summary.json, with the status of this command
        def close(self): ...             # always called

`TRACKERS` has the class of each name in `report.trackers`; plug-ins register theirs
(`rtrain.register_tracker`). All calls come from one thread of the tracker's own, so that a slow server delays neither
the training nor other trackers. A method may raise any exception: `start`, `log` and `finish` are then called again
with the same argument (`rtrain.report.tracker_feed`).
"""

import json
import math
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core import atomic_write, json_files
from rtrain.core.errors import UserError, redact
from rtrain.core.run_folder import Run
from rtrain.inference import artifact, mlflow_model
from rtrain.report import collect

Event = Mapping[str, Any]
STATE_FILE = "trackers.json"
"""File of a run folder with the state of each tracker."""
MAX_MLFLOW_BATCH = 100
"""Most parameters of one request to MLflow."""
WANDB_REPEATED_EVENTS = 100
"""Events that wandb gets again after a killed process: it lost 4 of 100 a second. It ignores a known step."""
_STATE_LOCK = threading.Lock()


class TrackerState:
    """Progress of a tracker, kept in the run folder over resumes, separately for each of its servers."""

    def __init__(self, run_folder: Path, name: str):
        self._path, self._name = run_folder / STATE_FILE, name
        document = self._load().get(name) or {"server": "", "servers": {}}
        self._servers: dict[str, dict[str, Any]] = document["servers"]
        self.select(document["server"])

    def _load(self) -> dict[str, Any]:
        return json_files.load_json_object(self._path) if self._path.is_file() else {}

    def select(self, server: str) -> None:
        """Continue with the values of a server, at first none. A new server gets all events of the run."""
        self._server = server
        self.values: dict[str, Any] = self._servers.setdefault(server, {})
        """JSON values of the tracker itself, e.g. the id of its run, and those of the feed: `sent_events`,
        `is_finished`, and `is_open`, whether a command has the tracker open, or was killed while it had."""

    def save(self) -> None:
        with _STATE_LOCK:
            document = {"server": self._server, "servers": self._servers}
            atomic_write.write_text(self._path, json.dumps({**self._load(), self._name: document}, indent=1))


@dataclass(frozen=True)
class RunFacts:
    """The run, for a tracker that starts."""

    folder: Path
    config: Config
    state: TrackerState

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name, without passwords."""
        settings = configuration.flatten_config(self.config)
        return {name: redact(value) if isinstance(value, str) else value for name, value in settings.items()}

    @property
    def is_trial(self) -> bool:
        """Whether the run is a trial of a search, whose model is not published."""
        return Run(self.folder.parent).is_search


class Tracker(Protocol):
    """Interface of a tracker. Methods may raise exceptions of its library."""

    def start(self, run: RunFacts) -> None:
        """Open the tracker's record of the run, a new one or, by `run.state.values`, the one of an earlier command.

        An exception ends a command that begins a run; a resumed run continues, and the tracker is started later.
        """
        ...

    def log(self, event: Event) -> None:
        """Take the next event of the run's log.

        Args:
            event: its fields, `step`, and `values`: finite figures by name, e.g. `train/loss`, that no earlier event
                had for this step; empty for events without figures. `time` is in seconds since 1970.
        """
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the result of this command: summary.json with `status`, one of `rtrain.report.summary.STATUSES`."""
        ...

    def close(self) -> None:
        """Release connections and files. It is the last call, also after exceptions."""
        ...


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

    _writer: Any = None
    _stored_steps: Mapping[str, int] = {}

    def start(self, run: RunFacts) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.summary import Writer

        root = run.config.deploy.report.tensorboard_dir
        folder = (Path(root) if root else run.folder.parent / "tensorboard") / run.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"report.tensorboard_dir: {folder} cannot be made ({error.strerror})"
            raise UserError(text, code="unwritable") from None
        run.state.select(str(folder))
        if not any(folder.iterdir()):  # its files were removed
            run.state.values.clear()
        if run.state.values.get("is_open"):  # the process was killed, maybe before it saved its progress
            accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 1}).Reload()
            self._stored_steps = {name: accumulator.Tensors(name)[-1].step for name in accumulator.Tags()["tensors"]}
        self._writer = Writer(str(folder))

    def log(self, event: Event) -> None:
        for name, value in event["values"].items():
            if event["step"] > self._stored_steps.get(name, -1):
                self._writer.add_scalar(name, value, event["step"], wall_time=event["time"])
        if event["values"]:
            self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


# --------------------------------------------------------------------------------------------------------------- MLflow


class MLflowTracker:
    """An MLflow run in the experiment of the recipe's name; a resumed run continues its MLflow run.

    The server is `report.mlflow_uri`, else MLFLOW_TRACKING_URI, else a SQLite file beside the run.
    """

    def start(self, run: RunFacts) -> None:
        from mlflow.exceptions import MlflowException

        settings = run.config.deploy.report
        uri = mlflow_model.resolve_server(settings.mlflow_uri, run.folder.parent)
        run.state.select(redact(uri))
        self._facts = run
        try:
            self._client = mlflow_model.open_client(uri)
            if run_id := run.state.values.get("run_id"):
                self._client.update_run(run_id, status="RUNNING")
            else:
                experiment = settings.mlflow_experiment or run.config.recipe.name
                experiment_id = mlflow_model.find_or_create_experiment(self._client, experiment, uri)
                tags = {"rtrain.run": str(run.folder)}
                new_run = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
                run.state.values["run_id"] = new_run.info.run_id
                run.state.save()
            if not run.state.values.get("has_params"):  # MLflow refuses other values of a resumed run
                self._log_params(run.settings)
                run.state.values["has_params"] = True
        except MlflowException as error:
            reason = (str(error).splitlines() or [""])[0][:300]
            fix = "set report.mlflow_uri to a server that answers, or take mlflow out of report.trackers"
            text = f"report.mlflow_uri: {redact(uri)} cannot be used ({redact(reason)}); {fix}"
            raise UserError(text, code="unreachable") from None

    @property
    def _run_id(self) -> str:
        return str(self._facts.state.values["run_id"])

    def _log_params(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:500]) for name, value in settings.items()]
        for start in range(0, len(params), MAX_MLFLOW_BATCH):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_MLFLOW_BATCH])

    def log(self, event: Event) -> None:
        from mlflow.entities import Metric

        # MLflow ignores a repeated (name, time, step, value), so that an event may be sent twice.
        metrics = [
            Metric(name, value, int(1000 * event["time"]), event["step"]) for name, value in event["values"].items()
        ]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        status = {"finished": "FINISHED", "paused": "FINISHED", "interrupted": "KILLED"}.get(
            summary["status"], "FAILED"
        )
        run, name = Run(self._facts.folder), self._facts.config.deploy.report.mlflow_register
        if name is not None and summary["status"] == "finished" and run.is_finished and not self._facts.is_trial:
            mlflow_model.register_artifact(run.artifact, name, self._client, self._run_id)
        self._client.set_terminated(self._run_id, status)

    def close(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------- Weights & Biases


class WandbTracker:
    """A run of Weights & Biases, in the project `report.wandb_project`, else WANDB_PROJECT, else the recipe's name.

    Entity, mode, server and API key come from wandb's own environment variables and login.
    """

    _run: Any = None
    _exit_code = 1

    def start(self, run: RunFacts) -> None:
        import wandb

        project = run.config.deploy.report.wandb_project or os.environ.get("WANDB_PROJECT") or run.config.recipe.name
        run.state.select("/".join(filter(None, (os.environ.get("WANDB_ENTITY"), project))))
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        # `wandb.init` would ask for a key on the terminal.
        if mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False):
            fix = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            raise UserError(f"report.trackers: wandb has no API key; {fix}", code="missing")
        self._facts, values = run, run.state.values
        if values.get("is_open"):  # the process was killed, and with it what wandb had not written yet
            values["sent_events"] = max(0, values["sent_events"] - WANDB_REPEATED_EVENTS)
        self._run = wandb.init(
            project=project,
            id=values.setdefault("run_id", uuid.uuid4().hex[:8]),
            name=run.name,
            resume="allow",
            config=run.settings,
            dir=os.environ.get("WANDB_DIR") or run.folder.parent,
            settings=wandb.Settings(console="off", silent=True),  # the terminal belongs to the progress line
        )

    def log(self, event: Event) -> None:
        if not event["values"]:
            return
        if event["step"] < self._run.step:  # the steps of a history only rise, e.g. scores at the best step follow
            self._run.summary.update(dict(event["values"]))
        else:
            self._run.log(dict(event["values"]), step=event["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        for split, scores in summary["metrics"].items():
            self._run.summary.update(_finite_values(split, scores or {}))
        figures = ("status", "best_step", "steps", "rows_seen", "data_digest", "cost", "slices")
        self._run.summary.update({name: summary[name] for name in figures if summary.get(name)})
        self._exit_code = 0 if summary["status"] in ("finished", "paused", "stopped") else 1
        if summary["status"] == "finished":
            self._log_hardest_rows()
            self._log_artifact()

    def _log_hardest_rows(self) -> None:
        """Log a table of the rows with the largest loss, with their texts."""
        import wandb

        count = self._facts.config.deploy.report.wandb_hardest_rows
        answers = collect.read_report_answers(Run(self._facts.folder)) if count else None
        if answers is None:
            return
        rows = [int(row) for row in answers.hardest_rows(count)]
        table = wandb.Table(columns=["row", "text", "target", "prediction", "loss"], allow_mixed_types=True)
        for row, text in zip(rows, answers.read_texts(rows), strict=True):
            pair = (_to_cell(answers.target[row]), _to_cell(answers.prediction[row]))
            table.add_data(answers.format_location(row), text, *pair, float(answers.loss[row]))
        self._run.log({f"hardest_rows/{answers.split}": table}, step=self._run.step)

    def _log_artifact(self) -> None:
        """Log the artifact folder as a version of the model; wandb uploads only files that it lacks."""
        import wandb

        run = Run(self._facts.folder)
        if not run.is_finished or self._facts.is_trial:
            return
        facts = artifact.read_artifact(run.artifact)
        metadata = {name: getattr(facts, name) for name in ("version", "task", "engine", "labels", "lineage")}
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", facts.name)
        model = wandb.Artifact(name, type="model", metadata=metadata)
        model.add_dir(str(run.artifact))
        self._run.log_artifact(model, aliases=["latest", facts.version])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


def _to_cell(value: Any) -> Any:
    """Value of a cell: a number, or text; lists of tags and spans become text."""
    return value if isinstance(value, str) else float(value) if isinstance(value, int | float) else str(value)


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}
