"""By how much chance makes the scores of a search differ. Pure."""

import math
import statistics
from collections.abc import Callable

from tune.known.aim import at
from tune.known.history import History, Trial


def ended(history: History) -> float | None:
    """Standard deviation of a trial's final score from seed to seed; None where no trial has ended with several."""
    return _pooled(history, lambda trial: trial.finished.score if trial.finished else None)


def at_first_rung(history: History) -> float | None:
    """Standard deviation of a trial's score at the first rung from seed to seed; None where none was repeated there.

    It is known from few pairs, and two scores may be alike by chance. What the rows alone make of a pair, by those that
    its two trainings answer differently, is known better, and is the least that seeds can differ by.
    """
    seeds = _pooled(history, lambda trial: one.score if (one := at(trial, 0)) else None)
    rows = [one.luck for trial in history.trials if (one := at(trial, 0)) is not None and one.luck is not None]
    least = math.sqrt(statistics.fmean(luck**2 for luck in rows)) if rows else 0.0
    return None if seeds is None else max(seeds, least)


def _pooled(history: History, score: Callable[[Trial], float | None]) -> float | None:
    """Over the trials that have a score with several seeds."""
    squares, free = 0.0, 0
    for trial in history.own:
        found = [score(one) for one in history.trials if trial.number in (one.number, one.of)]
        if len(scores := [one for one in found if one is not None]) > 1:
            squares += statistics.pvariance(scores) * len(scores)
            free += len(scores) - 1
    return math.sqrt(squares / free) if free else None
