"""How the sides came to be: curves of loss and score over rows and seconds, and what each one cost."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain.core.run_folder import Run
from rtrain.data.order import Order
from rtrain.evaluation.candidates import Side
from rtrain.inference import artifact
from rtrain.metrics.registry import metric_for
from rtrain.report.sections.curves import newest
from rtrain.report.summary import ROWS_READ, STATUSES

Event = dict[str, Any]


@dataclass(frozen=True)
class Point:
    rows: int
    """Rows trained on so far."""
    seconds: float
    """Since the first start, without the time between an end and the next start."""
    value: float


@dataclass(frozen=True)
class Curves:
    loss: tuple[Point, ...]
    score: tuple[Point, ...]
    """The headline on the validation rows; larger is better."""


@dataclass(frozen=True)
class Cost:
    status: str
    updates: int
    rows_seen: int
    seconds: float
    """Wall clock from the run's creation to its last event."""
    train_seconds: float
    worker_seconds: float
    """Seconds of training times workers: what the machines were held for."""
    rows_per_second: float
    workers: int | None
    megabytes: float | None
    """Size of the weights that answer; None before there is an artefact."""


def curves(run: Run, rows_per_update: int, output: str) -> Curves:
    headline = metric_for(output).headline
    log = run.events()
    trained_on = _rows_until(log, rows_per_update)
    seconds = {id(event): passed for event, passed in clock(log)}

    def points(events: Sequence[Event], value: str) -> tuple[Point, ...]:
        return tuple(
            Point(trained_on(event["update"]), round(seconds[id(event)], 3), float(_value(event, value)))
            for event in newest(events)
            if _value(event, value) is not None and math.isfinite(_value(event, value))
        )

    progress = [event for event in log if event["kind"] == "progress"]
    # Scores are measured once more with what was chosen by them (a threshold): no point of the curve.
    scored = [e for e in log if e["kind"] == "evaluated" and e["split"] == "valid" and "chosen" not in e]
    return Curves(points(progress, "loss"), points(scored, headline))


def _rows_until(log: Sequence[Event], rows_per_update: int) -> Callable[[int], int]:
    """Rows trained on after so many updates: an epoch's last one has what is left of the rows."""
    rows = next((event["rows"]["train"] for event in log if event["kind"] in ROWS_READ and "rows" in event), None)
    if not rows:
        return lambda update: update * rows_per_update
    return Order("", rows, rows_per_update, epochs=1, seed=0).rows_until


def _value(event: Event, name: str) -> Any:
    return event.get(name) if event["kind"] == "progress" else event["scores"].get(name)


def clock(log: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """(event, seconds of all starts up to it). What lies between the end of a start and the next one is left out: a
    pause, a night."""
    passed, begun, base = 0.0, None, 0.0
    for event in log:
        if event["kind"] == "started":
            begun, base = event["time"], passed
        if begun is not None:
            passed = base + max(0.0, event["time"] - begun)
        yield event, passed
        if event["kind"] in (*STATUSES, "crashed"):
            begun = None


def trained(log: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """(event, seconds of training up to it), for each event that tells how long its start has trained by then: what the
    updates took, without evaluations, checkpoints and the waiting for rows. So runs that evaluate more often, or pause,
    are no slower by it. A start goes on from the seconds of the update that it begins with: what was trained beyond and
    lost in a crash does not count."""
    known, base = {0: 0.0}, 0.0
    for event in log:
        if event["kind"] == "started":
            known = {update: seconds for update, seconds in known.items() if update <= event["update"]}
            base = known[max(known)]
        elif "train_s" in event:
            known[event["update"]] = base + event["train_s"]
            yield event, known[event["update"]]
        elif event["kind"] == "trained":
            known[event["updates"]] = base + event["seconds"].get("train", 0.0)
            yield event, known[event["updates"]]


def cost(side: Side) -> Cost:
    found = side.summary
    made, workers = side.made, found["workers"]
    return Cost(
        status=found["status"],
        updates=found["updates"],
        rows_seen=found["rows_seen"],
        seconds=found["seconds"]["total"],
        train_seconds=found["seconds"]["train"],
        worker_seconds=round(found["seconds"]["train"] * (workers or 1), 1),
        rows_per_second=found["rows_per_second"],
        workers=workers,
        megabytes=None if made is None else round(artifact.size_mb(side.folder, made.engine), 1),
    )
