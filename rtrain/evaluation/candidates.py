"""Models of a comparison, found by folder: a run, the winner of a search, or another artifact of a run. Differences of
their settings; curves and cost of their training."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem, UserError, redact
from rtrain.core.run_folder import Run, resolve_run
from rtrain.data.order import RowOrder
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact
from rtrain.metrics.registry import get_metric
from rtrain.report import summary
from rtrain.report.sections.run_details import last_event_per_step
from rtrain.report.summary import ROWS_READ_EVENTS, STATUSES
from rtrain.tasks import base

LETTERS = "ABCDEFGH"
"""One letter per candidate, as many as the charts have colors."""


@dataclass(frozen=True)
class Candidate:
    letter: str
    name: str
    """The folders that distinguish it from other candidates."""
    run: Run
    folder: Path
    """Folder of the artifact; missing before the run ends."""
    config: Config

    def __str__(self) -> str:
        return f"{self.letter} ({self.name})"

    @property
    def is_run_artifact(self) -> bool:
        """Whether this is the run's own artifact and not a derived artifact."""
        return self.folder == self.run.artifact

    @cached_property
    def metadata(self) -> Artifact | None:
        """artifact.json; None without an artifact."""
        return (
            artifact.read_artifact(self.folder, verify=False) if (self.folder / artifact.FILE_NAME).is_file() else None
        )

    @property
    def output(self) -> str:
        return base.get_task(self.config.recipe.task).output

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summary.summarize(self.run)


def find_candidates(folders: Sequence[Path]) -> list[Candidate]:
    """Find the candidates in the given order.

    Raises `UserError` for a folder without a run, a duplicate, and runs of different tasks.
    """
    if not 2 <= len(folders) <= len(LETTERS):
        fix = "name the reference run first, then the others"
        raise ConfigError(
            [Problem("runs", len(folders), f"a comparison needs two to {len(LETTERS)} runs", fix, code="out_of_range")]
        )
    models = [_find_model(folder.absolute()) for folder in folders]
    # Links and .. may lead to the same folder.
    resolved_folders = [model_folder.resolve() for _, model_folder in models]
    for place, resolved_folder in enumerate(resolved_folders):
        if (earlier := resolved_folders.index(resolved_folder)) < place:
            raise UserError(
                f"{folders[place]} and {folders[earlier]} are the same model; name another run", code="duplicate_name"
            )
    names = _unique_names(models)
    candidates = [
        Candidate(letter, name, run, folder, configuration.load_config(str(run.config)))
        for letter, name, (run, folder) in zip(LETTERS, names, models, strict=False)
    ]
    first = candidates[0]
    for candidate in candidates[1:]:
        task, other = first.config.recipe.task, candidate.config.recipe.task
        if task != other:
            raise UserError(
                f"the task of {first.run} is {task}, the task of {candidate.run} is {other}, and their scores are not "
                f"comparable; name runs of one task",
                code="task_mismatch",
            )
    return candidates


def _find_model(folder: Path) -> tuple[Run, Path]:
    if (folder / artifact.FILE_NAME).is_file():
        if Run(folder.parent).exists:
            return Run(folder.parent), folder
        reason = "is an artifact outside of its run, so its rows and training are unknown"
        raise UserError(f"{folder} {reason}; name the folder of its run, or an artifact inside one", code="not_a_run")
    run = resolve_run(folder)
    return run, run.artifact


def _unique_names(models: Sequence[tuple[Run, Path]]) -> list[str]:
    """Name each model by its run's folder, prefixed by its search and suffixed by a derived artifact.

    Equal names get more parent folders.
    """
    names: list[str] = []
    for depth in range(max(len(model_folder.parts) for _, model_folder in models)):
        names = [
            "/".join(
                run.folder.parts[-1 - depth - Run(run.folder.parent).is_search :]
                + (() if model_folder == run.artifact else (model_folder.name,))
            )
            for run, model_folder in models
        ]
        if len(set(names)) == len(names):
            break
    return names


@dataclass(frozen=True)
class SettingDifference:
    """A value that differs between candidates."""

    name: str
    values: tuple[str, ...]
    """One per candidate; `-` if missing."""


@dataclass(frozen=True)
class SettingDifferences:
    weight_settings: tuple[SettingDifference, ...]
    """Settings that change the weights."""
    other_settings: tuple[SettingDifference, ...]
    """Settings of speed, cluster and serving."""
    versions: tuple[SettingDifference, ...]
    digests: tuple[SettingDifference, ...]


def collect_settings(candidates: Sequence[Candidate]) -> SettingDifferences:
    configs = [candidate.config for candidate in candidates]
    differences = _find_differences(
        # The global batch size follows from workers, micro-batch size and aggregation frequency.
        [
            configuration.flatten_config(config) | {"train.global_batch_size": config.recipe.global_batch_size}
            for config in configs
        ]
    )
    weight_names = {
        name for config in configs for name in configuration.flatten_document(config.recipe.weight_settings())
    }
    created_events = [candidate.run.first_event("created") or {} for candidate in candidates]
    digests = map(_collect_digests, candidates, created_events)
    return SettingDifferences(
        tuple(difference for difference in differences if difference.name in weight_names),
        tuple(difference for difference in differences if difference.name not in weight_names),
        _find_differences([created.get("versions") or {} for created in created_events]),
        _find_differences(list(digests)),
    )


def _collect_digests(candidate: Candidate, created: Mapping[str, Any]) -> dict[str, Any]:
    # Files by content: the same file may have another path.
    origin = {
        f"files, {role}": ", ".join(sorted(sha256[:12] for sha256 in files.values()))
        for role, files in (created.get("origin") or {}).items()
    }
    return {
        "rows": created.get("data_digest"),
        "row order": candidate.summary["order_digest"],
        "artifact": None if candidate.metadata is None else candidate.metadata.version,
        **origin,
    }


def _find_differences(settings_by_candidate: Sequence[Mapping[str, Any]]) -> tuple[SettingDifference, ...]:
    names = dict.fromkeys(name for settings in settings_by_candidate for name in settings)
    rows = {name: [settings.get(name) for settings in settings_by_candidate] for name in names}
    return tuple(
        # Secrets in addresses are redacted.
        SettingDifference(name, tuple("-" if value is None else redact(str(value)) for value in values))
        for name, values in rows.items()
        if any(value != values[0] for value in values)
    )


# ------------------------------------------------------------------------------------------------------------ training


Event = dict[str, Any]


@dataclass(frozen=True)
class CurvePoint:
    rows: int
    """Rows trained on up to this point."""
    seconds: float
    """Seconds since the first attempt, without the time between attempts."""
    value: float


@dataclass(frozen=True)
class Curves:
    loss: tuple[CurvePoint, ...]
    score: tuple[CurvePoint, ...]
    """Headline score of the validation rows; larger is better."""


@dataclass(frozen=True)
class TrainingCost:
    status: str
    steps: int
    rows_seen: int
    seconds: float
    """Wall-clock time from the run's creation to its last event."""
    train_seconds: float
    worker_seconds: float
    """Seconds of training times workers."""
    rows_per_second: float
    workers: int | None
    megabytes: float | None
    """Size of the artifact's weights; None without an artifact."""


def read_curves(candidate: Candidate) -> Curves:
    headline, log = get_metric(candidate.output).headline, candidate.run.events()
    count_rows = _make_row_counter(log, candidate.config.recipe.global_batch_size)
    seconds = {id(event): elapsed for event, elapsed in iter_active_seconds(log)}

    def make_points(events: Sequence[Event], value: Callable[[Event], float | None]) -> tuple[CurvePoint, ...]:
        return tuple(
            CurvePoint(count_rows(event["step"]), round(seconds[id(event)], 3), float(number))
            for event in last_event_per_step(events)
            if (number := value(event)) is not None and math.isfinite(number)
        )

    progress = [event for event in log if event["kind"] == "progress"]
    # Evaluations with a calibrated threshold repeat the scores of the best step, so they are no points of the curve.
    evaluations = [
        event
        for event in log
        if event["kind"] == "evaluated" and event["split"] == "valid" and "calibration" not in event
    ]
    return Curves(
        make_points(progress, lambda event: event.get("loss")),
        make_points(evaluations, lambda event: event["scores"].get(headline)),
    )


def _make_row_counter(log: Sequence[Event], global_batch_size: int) -> Callable[[int], int]:
    """Make a function from steps to trained rows: the last step of an epoch has the remaining rows."""
    rows = next(
        (event["rows"]["train"] for event in log if event["kind"] in ROWS_READ_EVENTS and "rows" in event), None
    )
    if not rows:
        return lambda step: step * global_batch_size
    return RowOrder("", rows, global_batch_size, epochs=1, seed=0).rows_until


def iter_active_seconds(log: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield (event, seconds of all attempts up to it), without the time between attempts."""
    elapsed, started_at, seconds_before = 0.0, None, 0.0
    for event in log:
        if event["kind"] == "started":
            started_at, seconds_before = event["time"], elapsed
        if started_at is not None:
            elapsed = seconds_before + max(0.0, event["time"] - started_at)
        yield event, elapsed
        if event["kind"] in (*STATUSES, "crashed"):
            started_at = None


def iter_training_seconds(log: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield (event, seconds of training up to it) for each event with the training time of its attempt.

    Training time excludes evaluations, checkpoints and waiting for rows, so that runs with more evaluations or pauses
    are comparable. A resumed attempt continues from the seconds of its first step: steps lost in a crash do not count.
    """
    seconds_by_step, seconds_before = {0: 0.0}, 0.0
    for event in log:
        if event["kind"] == "started":
            seconds_by_step = {step: seconds for step, seconds in seconds_by_step.items() if step <= event["step"]}
            seconds_before = seconds_by_step[max(seconds_by_step)]
        elif "train_s" in event:
            seconds_by_step[event["step"]] = seconds_before + event["train_s"]
            yield event, seconds_by_step[event["step"]]
        elif event["kind"] == "trained":
            seconds_by_step[event["steps"]] = seconds_before + event["seconds"].get("train", 0.0)
            yield event, seconds_by_step[event["steps"]]


def collect_cost(candidate: Candidate) -> TrainingCost:
    summary, metadata = candidate.summary, candidate.metadata
    seconds, workers = summary["seconds"], summary["workers"]
    return TrainingCost(
        status=summary["status"],
        steps=summary["steps"],
        rows_seen=summary["rows_seen"],
        seconds=seconds["total"],
        train_seconds=seconds["train"],
        worker_seconds=round(seconds["train"] * (workers or 1), 1),
        rows_per_second=summary["rows_per_second"],
        workers=workers,
        megabytes=None if metadata is None else round(artifact.model_size_mb(candidate.folder, metadata.engine), 1),
    )
