"""Journals and histories of searches without training: a formula gives the score of settings."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.config import Config
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from tests.conftest import write_rows
from tune.history import History, replay_journal

Event = dict[str, Any]
FULL, RUNGS = 6400, 3
"""Rows of a full run; rungs, at 0.2, 0.4 and 0.8 of it."""
BEST_LR, BEST_K = 3e-4, 4


def score_of(lr: float, k: float, rows: int) -> float:
    """Highest at BEST_LR and BEST_K, and rising with the rows."""
    distance = 0.5 * math.log10(lr / BEST_LR) ** 2 + 0.02 * math.log2(k / BEST_K) ** 2
    return round((0.95 - 0.3 * distance) * (1 - 0.25 * math.exp(-3 * rows / FULL)), 4)


def rung_result(trial: int, rung: int, score: float, **more: Any) -> Event:
    rows = round(0.2 * 2**rung * FULL)
    fields = {"step": rows // 32, "rows": rows, "score": score, "loss": 1 - score, "seconds": rows / 100}
    return {"kind": "rung_result", "trial": trial, "rung": rung, **fields, **more}


def finished(trial: int, holdout: float, **more: Any) -> Event:
    fields = {"step": FULL // 32, "rows": FULL, "score": holdout + 0.004, "holdout_score": holdout, "holdout_rows": 250}
    return {
        "kind": "finished",
        "trial": trial,
        **fields,
        "seconds": FULL / 100 + trial,
        "seconds_to_target": None,
        **more,
    }


def created(trial: int, settings: Event | None = None, by: str = "gp", **more: Any) -> Event:
    return {
        "kind": "created",
        "trial": trial,
        "settings": settings or {},
        "proposed_by": by,
        "repeat_of": None,
        "seed": None,
        **more,
    }


def events(trials: int = 20, *, failed: tuple[int, ...] = (7,), end: bool = True) -> Iterator[Event]:
    """A whole search of learning rate and k: halving, the two best and trial 0 to their ends, once more with a seed."""
    draw, tried = random.Random(0), {0: (2e-4, 4.0)}
    for number in range(trials):
        if number:
            tried[number] = (10 ** draw.uniform(-4.3, -3.0), draw.choice([1, 2, 4, 8]))
        lr, k = tried[number]
        settings = {"optim.lr": lr, "train.aggregation_frequency": k, "train.global_batch_size": None}
        by = "recipe" if not number else "spread" if number < 5 else "gp"
        yield created(number, settings if number else {}, by)
        if number in failed:
            yield {"kind": "failed", "trial": number, "error": "OutOfMemoryError: <b>CUDA</b> is full", "seconds": 0.0}
        else:
            yield rung_result(number, 0, score_of(lr, k, round(0.2 * FULL)))
    yield {"kind": "stopped", "reason": "the rows of 8 full runs are spent"}
    left = [number for number in tried if number not in failed]
    for rung in range(1, RUNGS):
        rows = round(0.2 * 2**rung * FULL)
        left = sorted(left, key=lambda number: -score_of(*tried[number], rows))[: max(2, len(left) // 2)]
        for number in left:
            yield rung_result(number, rung, score_of(*tried[number], rows))
    if not end:
        return
    final = dict.fromkeys([0, *left[:2]])
    for number in final:
        if number not in failed:
            yield finished(number, score_of(*tried[number], FULL))
    for place, number in enumerate(final):
        if number not in failed:
            yield created(trials + place, {}, "seed", repeat_of=number, seed=7)
            yield finished(trials + place, score_of(*tried[number], FULL) - 0.002)
    if left:
        yield {"kind": "usage", "seconds": 1234.5, "slot_seconds": 2400.0}
        yield {"kind": "winner", "winner": left[0], "verdict": {"kind": "unopposed", "winner": left[0]}}


def history(*args: Any, **options: Any) -> History:
    return replay_journal(events(*args, **options))


def configured(folder: Path, recipe: str = "intent", /, **overrides: Any) -> Config:
    rows = write_rows(folder / "rows.csv", [("a parcel", "parcel")])
    return config.load_config(recipe, {"data.path": str(rows), "optim.lr": 2e-4, **overrides})


def make_search(folder: Path, journal: Sequence[Event], recipe: str = "intent", /, **overrides: Any) -> Run:
    """A search's folder: its configuration, its journal, and of every trial the configuration and the log."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Run(folder / "search")
    selection = run_folders.write_frozen_config(outcome, configured(folder, recipe, **overrides))
    outcome.trials.write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in journal))
    for trial in replay_journal(journal).original_trials:
        run = outcome.trial(trial.number)
        run_folders.write_frozen_config(run, config.with_overrides(selection, dict(trial.settings)))
        per = config.load_config(str(run.config)).recipe.global_batch_size
        run.append_event("started", step=0, total_steps=FULL // per, workers=2, precision="fp32")
        came = {result.rows: result.score for result in trial.rung_results}
        came |= {trial.final_result.rows: trial.final_result.score} if trial.final_result else {}
        for rows in range(320, max(came, default=0) + 1, 320):
            run.append_event(
                "progress", step=rows // per, total_steps=FULL // per, rows=rows, loss=640 / rows + trial.number / 100
            )
        for rows, score in came.items():
            run.append_event("evaluated", split="valid", step=rows // per, scores={"accuracy": score, "rows": 500})
    return outcome
