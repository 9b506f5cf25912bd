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
from rtrain.report import collect
from rtrain.runs import run_folders
from tests.conftest import write_rows
from tests.support.reports import write_predictions
from tune import finals, holdout_scores
from tune.history import SEED_REPEAT, FinalResult, Journal, RungResult

UPDATES = 40
"""Updates of a full run."""
ROWS_PER_UPDATE = 32
LABELS = ("login", "parcel", "refund")
POINTS: Sequence[Mapping[str, Any]] = [
    {"optim.lr": lr, "train.aggregation_frequency": frequency, "train.global_batch_size": None}
    for frequency in (4, 2, 8)
    for lr in (1e-3, 1e-4, 3e-4)
]
"""Settings of the trials after trial 0."""
SETTINGS: Mapping[str, Any] = {
    "tune.space": {
        "optim.lr": {"low": 1e-4, "high": 1e-3, "log": True},
        "train.aggregation_frequency": [2, 4, 8],
    },
    "tune.min_resource_fraction": 0.25,
    "optim.lr": 2e-4,
}


def settings(folder: Path, trials: int, **overrides: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_rows(folder / "rows.csv", [("a parcel", "parcel")])
    return config.load_config("intent", {"data.path": str(rows), **SETTINGS, "tune.trials": trials, **overrides})


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
    """A search whose trials have these scores at their rungs, on so many validation rows; None: the trial failed.

    The better half continues from each rung. Then, unless the search has not `ended`, trial 0 and the two best
    others are trained to their ends, where about a share `ends` of their answers is right (by default their score); and
    so are the `repeats`: (trial, seed, share).
    """
    selection = settings(folder, len(scores), **overrides)
    result = Run(folder / "search")
    run_folders.write_frozen_config(result, selection)
    journal = Journal(result.trials)
    for number in range(len(scores)):
        by = "recipe" if number == 0 else "spread" if number < 4 else "gp"
        journal.append("created", trial=number, settings=_point(number), proposed_by=by, repeat_of=None, seed=None)
        run_folders.write_frozen_config(result.trial(number), config.with_overrides(selection, _point(number)))
    for number, score in enumerate(scores):
        if score is None:
            error = (errors or {}).get(number, "ValueError: no")
            _begin(result.trial(number))
            result.trial(number).append_event("failed", error=error)
            journal.append("failed", trial=number, error=error, seconds=0.0)
    history = {number: score for number, score in enumerate(scores) if score is not None}
    _rungs(result, journal, history, rows, diverged or {})
    if ended:
        _end(result, journal, selection, history, rows, ends or {}, repeats)
    journal.append("usage", seconds=100.0, slot_seconds=100.0)
    return result


def answered(run: Run, right: float, rows: int = 60, seed: int = 0) -> None:
    """Answers of a run that was trained to its end, about that share of them right. For one seed,
    a larger share includes the correct rows of a smaller share; another seed has other correct rows."""
    target = np.random.default_rng(0).integers(0, len(LABELS), rows)
    luck = np.random.default_rng([1, seed])
    other = (target + luck.integers(1, len(LABELS), rows)) % len(LABELS)
    text = np.where(luck.uniform(size=rows) < right, target, other)
    arguments = ([LABELS[code] for code in codes] for codes in (target, text))
    write_predictions(run.folder, *arguments, split="valid", seed=seed)


def _point(number: int) -> dict[str, Any]:
    return dict(POINTS[(number - 1) % len(POINTS)]) if number else {}


def _rungs(search: Run, journal: Journal, scores: Mapping[int, float], rows: int, diverged: Mapping[int, str]) -> None:
    """Every trial to its rungs: the better half continues from each, until two are left."""
    left, rung, update = list(scores), 0, UPDATES // 4
    for number in left:
        _begin(search.trial(number))
    while update < UPDATES:
        for number in left:
            _train(search.trial(number), update // 2, update, scores[number], rows)
            search.trial(number).append_event("paused", step=update)
            loss = 2.0 / update + number / 100
            item = RungResult(rung, update, ROWS_PER_UPDATE * update, scores[number], loss, seconds=float(update))
            journal.append("rung_result", trial=number, **asdict(item))
            if rung == 0 and number in diverged:
                journal.append("diverged", trial=number, reason=diverged[number], seconds=0.0)
        left = [number for number in left if number not in diverged]
        if len(left) <= 2:
            return
        left = sorted(left, key=lambda number: (-scores[number], number))[: math.ceil(len(left) / 2)]
        rung, update = rung + 1, 2 * update


def _end(
    search: Run,
    journal: Journal,
    selection: Config,
    scores: Mapping[int, float],
    rows: int,
    ends: Mapping[int, float],
    repeats: Sequence[tuple[int, int, float]],
) -> None:
    sound = [trial.number for trial in journal.history.trials if trial.is_valid]
    best = sorted((number for number in sound if number), key=lambda number: (-scores[number], number))[:2]
    for number in [number for number in sound if number == 0] + best:
        _finish(search, journal, selection, number, ends.get(number, scores[number]), rows, seed=0)
    for original, seed, right in repeats:
        number = len(journal.history.trials)
        journal.append(
            "created", trial=number, settings=_point(original), proposed_by=SEED_REPEAT, repeat_of=original, seed=seed
        )
        run_folders.write_frozen_config(
            search.trial(number), config.with_overrides(selection, {**_point(original), "train.seed": seed})
        )
        _begin(search.trial(number))
        _finish(search, journal, selection, number, right, rows, seed)
    if any(trial.final_result for trial in journal.history.trials):
        answers = holdout_scores.collect_holdout_scores(
            search, journal.history, selection.deploy.tune.holdout_fraction, 1
        )
        full = ROWS_PER_UPDATE * UPDATES
        limits = finals.FinalsSettings(full, (3 + len(repeats)) * full if repeats else 0)
        expected = finals.next_runs(journal.history, answers, limits)
        assert isinstance(expected, finals.SearchVerdict), expected
        journal.append("winner", winner=expected.winner, verdict=asdict(expected))
        search.append_event("searched", winner=expected.winner, trials=len(journal.history.trials))


def _finish(search: Run, journal: Journal, selection: Config, number: int, right: float, rows: int, seed: int) -> None:
    """Train a trial to its end, and log its result."""
    run = search.trial(number)
    _train(run, UPDATES // 2 + UPDATES // 4, UPDATES, right, rows)
    answered(run, right, rows, seed)
    run.append_event("finished", step=UPDATES)
    answers = collect.read_answers(run, "valid")
    assert answers is not None  # they were just written
    remaining = holdout_scores.holdout_mask(np.arange(rows, dtype=np.uint64), selection.deploy.tune.holdout_fraction)
    remaining = remaining if remaining.any() else ~remaining
    score, holdout = float(answers.is_correct.mean()), float(answers.is_correct[remaining].mean())
    seconds, all_rows = 2.0 * UPDATES, ROWS_PER_UPDATE * UPDATES
    item = FinalResult(UPDATES, all_rows, score, holdout, int(remaining.sum()), seconds, seconds_to_target=seconds / 2)
    journal.append("finished", trial=number, **asdict(item))


def _begin(run: Run) -> None:
    run.append_event("created", run=run.name, recipe="intent", task="classification")
    run.append_event("started", step=0, total_steps=UPDATES, workers=2, precision="fp32")


def _train(run: Run, first: int, last: int, score: float, rows: int) -> None:
    """Two evaluations on the way to a rung or the end, the first with a lower score."""
    for update, share in ((first, 0.8), (last, 1.0)):
        run.append_event("progress", step=update, total_steps=UPDATES, loss=2.0 / update, rows=ROWS_PER_UPDATE * update)
        run.append_event("evaluated", split="valid", step=update, scores={"accuracy": score * share, "rows": rows})
