"""rtrain's own side of a comparison: the command of a run, and the figures that the run's events give."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import common

Events = Sequence[Mapping[str, Any]]


def settings(workers: int, passes: int, seed: int) -> dict[str, Any]:
    """Command of a run that trains like the peers, without an evaluation before its last step."""
    return {
        "data.valid_share": 0,
        "data.max_tokens": common.MAX_TOKENS,
        "model.pooling": "own",  # as in Transformers' classifiers, which the peers train
        "optim.lr": common.LEARNING_RATE,
        "optim.weight_decay": common.WEIGHT_DECAY,
        "optim.max_grad_norm": common.CLIP_NORM,
        "optim.warmup": common.WARMUP,
        "train.epochs": 1,
        "train.workers": workers,
        "train.micro_batch_size": common.MICRO_BATCH_SIZE,
        "train.aggregation_frequency": passes,
        "train.precision": "bf16",
        "train.seed": seed,
        "train.keep_checkpoints": 1,
        "train.log_every": 1,
    }


def command(rows: Path, test: Path, run: Path, settings: Mapping[str, Any]) -> list[str]:
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    files = ["--data", str(rows), "--test", str(test), "--out", str(run)]
    return [sys.executable, "-m", "rtrain", "train", "intent", *files, *arguments, "--json"]


def measured(events: Events) -> dict[str, float]:
    """Figures of a finished run that nothing interrupted."""
    times, _ = progress(events)
    (trained,) = (event for event in events if event["kind"] == "trained")
    losses = [event["loss"] for event in events if event["kind"] == "progress"]
    seconds = trained["seconds"]
    busy = seconds["train"] + seconds.get("input_wait", 0.0)
    return {
        "rows": trained["rows_seen"],
        "seconds": times[-1] - times[0],
        "updates": trained["steps"],
        "loss": common.last_quarter(losses),
        "pad_ratio": trained["padded_tokens"] / trained["real_tokens"],
        "input_wait_share": seconds.get("input_wait", 0.0) / busy,
        "first_batch_s": seconds["first_batch"],
    }


def progress(events: Events) -> tuple[list[float], list[int]]:
    """(times, rows trained on until then): at the begin of the first update, when its rows are there, and at the end of
    each update that was logged."""
    (started,) = (event for event in events if event["kind"] == "started")
    (trained,) = (event for event in events if event["kind"] == "trained")
    updates = [event for event in events if event["kind"] == "progress"]
    begin = started["time"] + trained["seconds"]["first_batch"]
    return [begin, *(event["time"] for event in updates)], [0, *(event["rows"] for event in updates)]


def together(runs: Sequence[Events]) -> dict[str, float]:
    """Figures of runs that train at the same time: their rows over the time in which all of them train."""
    series = [progress(events) for events in runs]
    begin, end = max(times[0] for times, _ in series), min(times[-1] for times, _ in series)
    if end <= begin:
        raise SystemExit("the runs did not train at the same time: give them more rows (--rows)")
    rows = (np.interp(end, *points) - np.interp(begin, *points) for points in series)
    losses = [measured(events)["loss"] for events in runs]
    return {"rows": float(sum(rows)), "seconds": end - begin, "loss": statistics.fmean(losses)}
