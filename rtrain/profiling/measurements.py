"""The figures of a profile, from what its workers have left (`rtrain.trainer.profiler`)."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain.core import json_files
from rtrain.core.errors import UserError
from rtrain.parallel.timeline import Span
from rtrain.profiling.cases import Length
from rtrain.trainer import step_timing
from rtrain.trainer.step_timing import PARTS, Window


@dataclass(frozen=True)
class Update:
    window: Window
    rows: int
    """On this worker, as are its passes and its tokens."""
    passes: int
    real_tokens: int


@dataclass(frozen=True)
class Worker:
    rank: int
    host: str
    cores: int
    """That its process may use."""
    cpu_seconds: float
    """Its process's, all threads, over all of its updates."""
    seconds: float
    """Those of all of its updates."""
    epoch: int
    """Nanoseconds since 1970 at its clock's zero."""
    updates: tuple[Update, ...]


def read_worker(path: Path) -> Worker:
    document = json_files.read(path)
    updates = tuple(_update(one) for one in document.pop("windows"))
    return Worker(**document, updates=updates)


def _update(found: Mapping[str, Any]) -> Update:
    spans = tuple(Span(*one) for one in found["spans"])
    window = Window(found["number"], found["start"], found["stop"], spans)
    return Update(window, *(found[name] for name in ("rows", "passes", "real_tokens")))


@dataclass(frozen=True)
class Facts:
    """What else is known of a row."""

    name: str
    settings: Mapping[str, Any]
    precision: str
    device: str
    rows_per_update: int
    order_digest: str
    """Digest of the rows of all updates that were trained, in their order."""
    save_every: int
    """Updates between two checkpoints of the recipe's own."""
    run_updates: int
    """Updates of a whole run of the recipe."""
    within: int = 1
    """Workers of a replica, each of which tells the replica's rows."""


def of_row(facts: Facts, workers: Sequence[Worker], length: Length) -> dict[str, Any]:
    """A row of the profile's document. Seconds; `parts` of a worker add up to its `update`.

    Raises `UserError` where the workers have not trained all of `length`.
    """
    measured = {worker.rank: _measured(worker, length) for worker in workers}
    of_workers = [_of_worker(worker, measured[worker.rank]) for worker in workers]
    update = statistics.fmean(one["update"] for one in of_workers)
    updates = list(zip(*measured.values(), strict=True))
    counts = {
        name: statistics.fmean(sum(getattr(one, name) for one in each) for each in updates) / facts.within
        for name in ("rows", "real_tokens", "passes")
    }
    saves = [_saved(one) for worker in workers for one in worker.updates if _saved(one)]
    save = statistics.fmean(saves) if saves else 0.0
    return {
        "name": facts.name,
        "settings": dict(facts.settings),
        "workers": len(workers),
        "precision": facts.precision,
        "device": facts.device,
        "rows_per_update": facts.rows_per_update,
        "passes_per_update": round(counts["passes"] * facts.within / len(workers), 3),
        "update": update,
        "median": statistics.median(one.window.wall / 1e9 for each in measured.values() for one in each),
        "rows_per_second": counts["rows"] / update,
        "real_tokens_per_second": counts["real_tokens"] / update,
        "of_workers": of_workers,
        "checkpoint": {"seconds": save, "every": facts.save_every, "per_update": save / facts.save_every},
        "order_digest": facts.order_digest,
        "run_updates": facts.run_updates,
        "hosts": {worker.host: worker.cores for worker in workers},
    }


def _measured(worker: Worker, length: Length) -> list[Update]:
    """The updates that are measured: not those of the warm-up, nor the last, which ends with a checkpoint."""
    if len(worker.updates) != length.until:
        raise UserError(
            f"worker {worker.rank} has trained {len(worker.updates)} updates in one go, not {length.until}: the start "
            "was interrupted, and what it measured is not whole; profile again",
            code="interrupted",
        )
    return list(worker.updates[length.warm_up : -1])


def _of_worker(worker: Worker, updates: Sequence[Update]) -> dict[str, Any]:
    each = [step_timing.parts(one.window) for one in updates]
    found = {name: statistics.fmean(one.of[name] for one in each) / 1e9 for name in PARTS}
    return {
        "rank": worker.rank,
        "host": worker.host,
        "update": statistics.fmean(one.window.wall for one in updates) / 1e9,
        "parts": found,
        "hidden": statistics.fmean(one.hidden for one in each) / 1e9,
        "cores_busy": round(worker.cpu_seconds / worker.seconds, 3),
        "each": [
            {
                "update": one.window.number,
                "seconds": one.window.wall / 1e9,
                "parts": {name: value / 1e9 for name, value in parts.of.items()},
                "hidden": parts.hidden / 1e9,
            }
            for one, parts in zip(updates, each, strict=True)
        ],
    }


def _saved(update: Update) -> float:
    """Seconds of the update's checkpoint; 0 where it has none."""
    return step_timing.parts(update.window).of[step_timing.CHECKPOINT] / 1e9
