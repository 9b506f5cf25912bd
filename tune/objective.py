"""What a search is for: which of several trials is the better at a rung, what the sampler is told, and by how much
chance makes scores differ. Pure.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rtrain.config import Tune
from tune.history import History, Reached, Trial

Priced = tuple[float, float]
"""A trial's score, and what it costs."""


@dataclass(frozen=True)
class Aim:
    """The settings of `tune` with these names."""

    objective: str = "score"
    target: float | None = None
    cost: str = "training"

    @classmethod
    def of(cls, tune: Tune) -> "Aim":
        return cls(tune.objective, tune.target, tune.cost)

    def value(self, trial: Trial, one: Reached) -> float | tuple[float, ...]:
        """What the sampler is told of a trial at its first rung; larger is better, each of several for itself."""
        return one.score if self.objective == "score" else (one.score, -trial.price(one.seconds))

    def ranked(self, trials: Sequence[Trial], rung: int) -> list[Trial]:
        """The trials that have come to a rung, the best first; equal ones by their number.

        By score, and then by loss. For the least time to a target: those that have reached it by their seconds, before
        all others by score, as all have been trained on as many rows. For the front of score and cost: front by
        front (Deb et al. 2002, NSGA-II), inside a front by score.
        """
        reached = {trial.number: one for trial in trials if (one := at(trial, rung))}
        there = [trial for trial in trials if trial.number in reached]
        priced = {one.number: (reached[one.number].score, one.price(reached[one.number].seconds)) for one in there}
        depth = _fronts(priced) if self.objective == "front" else {}

        def key(trial: Trial) -> tuple[float, ...]:
            one = reached[trial.number]
            # Nothing is above or below NaN, and a sort would leave all trials where they are.
            score = -math.inf if math.isnan(one.score) else one.score
            loss = math.inf if one.loss is None or math.isnan(one.loss) else one.loss
            done = self.objective == "time" and self.target is not None and score >= self.target
            return (depth.get(trial.number, 0), one.seconds if done else math.inf, -score, loss, trial.number)

        return sorted(there, key=key)


def at(trial: Trial, rung: int) -> Reached | None:
    return next((one for one in trial.reached if one.rung == rung), None)


def _fronts(priced: dict[int, Priced]) -> dict[int, int]:
    """By trial: the number of the front that it is on. Front 0 is dominated by none; front 1 by those of front 0
    alone, and so on."""
    left, depth = dict(priced), dict[int, int]()
    while left:
        front = [n for n, one in left.items() if not any(_dominates(other, one) for other in left.values())]
        front = front or list(left)  # figures that are not numbers dominate one another in circles
        depth |= dict.fromkeys(front, max(depth.values(), default=-1) + 1)
        left = {number: one for number, one in left.items() if number not in front}
    return depth


def _dominates(one: Priced, other: Priced) -> bool:
    return one[0] >= other[0] and one[1] <= other[1] and one != other


def spread_at_end(history: History) -> float | None:
    """Standard deviation of a trial's final score from seed to seed; None where no trial has ended with several."""
    return _pooled(history, lambda trial: trial.finished.score if trial.finished else None)


def spread_at_first_rung(history: History) -> float | None:
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
