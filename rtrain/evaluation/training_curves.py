"""Training of the candidates: curves of loss and score over rows and seconds, and the cost of each run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder
from rtrain.evaluation.candidates import Candidate
from rtrain.inference import artifact
from rtrain.metrics.registry import get_metric
from rtrain.report.sections.curves import last_event_per_step
from rtrain.report.summary import ROWS_READ_EVENTS, STATUSES

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


def read_curves(run: Run, global_batch_size: int, output: str) -> Curves:
    headline = get_metric(output).headline
    log = run.events()
    count_rows = _make_row_counter(log, global_batch_size)
    seconds = {id(event): elapsed for event, elapsed in iter_active_seconds(log)}

    def make_points(events: Sequence[Event], value: str) -> tuple[CurvePoint, ...]:
        return tuple(
            CurvePoint(count_rows(event["step"]), round(seconds[id(event)], 3), float(_get_value(event, value)))
            for event in last_event_per_step(events)
            if _get_value(event, value) is not None and math.isfinite(_get_value(event, value))
        )

    progress = [event for event in log if event["kind"] == "progress"]
    # Evaluations with a calibrated threshold repeat the scores of the best step, so they are no points of the curve.
    evaluations = [
        event
        for event in log
        if event["kind"] == "evaluated" and event["split"] == "valid" and "calibration" not in event
    ]
    return Curves(make_points(progress, "loss"), make_points(evaluations, headline))


def _make_row_counter(log: Sequence[Event], global_batch_size: int) -> Callable[[int], int]:
    """Make a function from steps to trained rows: the last step of an epoch has the remaining rows."""
    rows = next(
        (event["rows"]["train"] for event in log if event["kind"] in ROWS_READ_EVENTS and "rows" in event), None
    )
    if not rows:
        return lambda step: step * global_batch_size
    return RowOrder("", rows, global_batch_size, epochs=1, seed=0).rows_until


def _get_value(event: Event, name: str) -> Any:
    return event.get(name) if event["kind"] == "progress" else event["scores"].get(name)


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
    summary = candidate.summary
    metadata, workers = candidate.metadata, summary["workers"]
    return TrainingCost(
        status=summary["status"],
        steps=summary["steps"],
        rows_seen=summary["rows_seen"],
        seconds=summary["seconds"]["total"],
        train_seconds=summary["seconds"]["train"],
        worker_seconds=round(summary["seconds"]["train"] * (workers or 1), 1),
        rows_per_second=summary["rows_per_second"],
        workers=workers,
        megabytes=None if metadata is None else round(artifact.model_size_mb(candidate.folder, metadata.engine), 1),
    )
