"""A search's folder as a search leaves it, made without Ray: its journal, and trials with logs, scores and answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config
from rtrain.config import Config
from rtrain.core.run_folder import Run
from rtrain.report import row_predictions
from rtrain.runs import run_folders
from tests.conftest import write_rows
from tests.reports import write_predictions
from tune import finals, holdout_scores
from tune.history import SEED, Finished, Journal, Reached

UPDATES = 40
"""Updates of a full run."""
ROWS_PER_UPDATE = 32
LABELS = ("login", "parcel", "refund")
POINTS: Sequence[Mapping[str, Any]] = [
    {"optim.lr": lr, "train.aggregation_frequency": frequency, "train.rows_per_update": None}
    for frequency in (4, 2, 8)
    for lr in (1e-3, 1e-4, 3e-4)
]
"""Settings of the trials after trial 0."""
SETTINGS: Mapping[str, Any] = {
    "tune.space": {
        "optim.lr": {"low": 1e-4, "high": 1e-3, "log": True},
        "train.aggregation_frequency": [2, 4, 8],
    },
    "tune.first_rung": 0.25,
    "optim.lr": 2e-4,
}


def settings(folder: Path, trials: int, **overrides: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_rows(folder / "rows.csv", [("a parcel", "parcel")])
    return config.load("intent", {"data.path": str(rows), **SETTINGS, "tune.trials": trials, **overrides})


def make_search(
    folder: Path,
    scores: Sequence[float | None],
    *,
    rows: int = 60,
    ended: bool = True,
    ends: Mapping[int, float] | None = None,
    repeats: Sequence[tuple[int, int, float]] = (),
    errors: Mapping[int, str] | None = None,
    diverged: Mapping[int, str] | None = None,
    **overrides: Any,
) -> Run:
    """A search whose trials came to these scores at their rungs, on so many validation rows; one without failed.

    The better half of them goes on at each rung. Then, unless the search has not `ended`, trial 0 and the two best
    others are trained to their ends, where about a share `ends` of their answers is right (by default their score); and
    so are the `repeats`: (trial, seed, share).
    """
    chosen = settings(folder, len(scores), **overrides)
    found = Run(folder / "search")
    run_folders.freeze(found, chosen)
    journal = Journal(found.trials)
    for number in range(len(scores)):
        by = "recipe" if number == 0 else "spread" if number < 4 else "gp"
        journal.append("asked", trial=number, settings=_point(number), by=by, of=None, seed=None)
        run_folders.freeze(found.trial(number), config.with_overrides(chosen, _point(number)))
    for number, score in enumerate(scores):
        if score is None:
            error = (errors or {}).get(number, "ValueError: no")
            _begin(found.trial(number))
            found.trial(number).append("failed", error=error)
            journal.append("failed", trial=number, error=error, seconds=0.0)
    known = {number: score for number, score in enumerate(scores) if score is not None}
    _rungs(found, journal, known, rows, diverged or {})
    if ended:
        _end(found, journal, chosen, known, rows, ends or {}, repeats)
    journal.append("spent", seconds=100.0, slot_seconds=100.0)
    return found


def answered(run: Run, right: float, rows: int = 60, seed: int = 0) -> None:
    """Answers of a run that was trained to its end, about that share of them right. With one seed a larger share has
    right what a smaller one has; another seed is right on other rows."""
    target = np.random.default_rng(0).integers(0, len(LABELS), rows)
    luck = np.random.default_rng([1, seed])
    other = (target + luck.integers(1, len(LABELS), rows)) % len(LABELS)
    said = np.where(luck.uniform(size=rows) < right, target, other)
    given = ([LABELS[code] for code in codes] for codes in (target, said))
    write_predictions(run.folder, *given, split="valid", seed=seed)


def _point(number: int) -> dict[str, Any]:
    return dict(POINTS[(number - 1) % len(POINTS)]) if number else {}


def _rungs(search: Run, journal: Journal, scores: Mapping[int, float], rows: int, diverged: Mapping[int, str]) -> None:
    """Every trial to its rungs: at each of them the better half goes on, until two are left."""
    left, rung, update = list(scores), 0, UPDATES // 4
    for number in left:
        _begin(search.trial(number))
    while update < UPDATES:
        for number in left:
            _train(search.trial(number), update // 2, update, scores[number], rows)
            search.trial(number).append("paused", update=update)
            loss = 2.0 / update + number / 100
            one = Reached(rung, update, ROWS_PER_UPDATE * update, scores[number], loss, seconds=float(update))
            journal.append("reached", trial=number, **asdict(one))
            if rung == 0 and number in diverged:
                journal.append("diverged", trial=number, why=diverged[number], seconds=0.0)
        left = [number for number in left if number not in diverged]
        if len(left) <= 2:
            return
        left = sorted(left, key=lambda number: (-scores[number], number))[: math.ceil(len(left) / 2)]
        rung, update = rung + 1, 2 * update


def _end(
    search: Run,
    journal: Journal,
    chosen: Config,
    scores: Mapping[int, float],
    rows: int,
    ends: Mapping[int, float],
    repeats: Sequence[tuple[int, int, float]],
) -> None:
    sound = [trial.number for trial in journal.history.trials if trial.sound]
    best = sorted((number for number in sound if number), key=lambda number: (-scores[number], number))[:2]
    for number in [number for number in sound if number == 0] + best:
        _finish(search, journal, chosen, number, ends.get(number, scores[number]), rows, seed=0)
    for of, seed, right in repeats:
        number = len(journal.history.trials)
        journal.append("asked", trial=number, settings=_point(of), by=SEED, of=of, seed=seed)
        run_folders.freeze(search.trial(number), config.with_overrides(chosen, {**_point(of), "train.seed": seed}))
        _begin(search.trial(number))
        _finish(search, journal, chosen, number, right, rows, seed)
    if any(trial.finished for trial in journal.history.trials):
        answers = holdout_scores.every(search, journal.history, chosen.deploy.tune.held_back, 1)
        full = ROWS_PER_UPDATE * UPDATES
        wanted = finals.next_runs(journal.history, full, (3 + len(repeats)) * full if repeats else 0, answers)
        assert isinstance(wanted, finals.Verdict), wanted
        journal.append("chosen", best=wanted.best, verdict=wanted.to_document())
        search.append("searched", best=wanted.best, trials=len(journal.history.trials))


def _finish(search: Run, journal: Journal, chosen: Config, number: int, right: float, rows: int, seed: int) -> None:
    """Train a trial to its end, and write down what it came to."""
    run = search.trial(number)
    _train(run, UPDATES // 2 + UPDATES // 4, UPDATES, right, rows)
    answered(run, right, rows, seed)
    run.append("finished", update=UPDATES)
    answers = row_predictions.read(run, "valid")
    assert answers is not None  # they were just written
    kept = holdout_scores.mask(np.arange(rows, dtype=np.uint64), chosen.deploy.tune.held_back)
    kept = kept if kept.any() else ~kept
    score, held = float(answers.right.mean()), float(answers.right[kept].mean())
    seconds, all_rows = 2.0 * UPDATES, ROWS_PER_UPDATE * UPDATES
    one = Finished(UPDATES, all_rows, score, held, int(kept.sum()), seconds, to_target=seconds / 2)
    journal.append("finished", trial=number, **asdict(one))


def _begin(run: Run) -> None:
    run.append("created", run=run.name, recipe="intent", task="classification")
    run.append("started", update=0, of=UPDATES, workers=2, precision="fp32")


def _train(run: Run, first: int, last: int, score: float, rows: int) -> None:
    """Two evaluations on the way to a rung or the end, the first with a lower score."""
    for update, share in ((first, 0.8), (last, 1.0)):
        run.append("progress", update=update, of=UPDATES, loss=2.0 / update, rows=ROWS_PER_UPDATE * update)
        run.append("evaluated", split="valid", update=update, scores={"accuracy": score * share, "rows": rows})
