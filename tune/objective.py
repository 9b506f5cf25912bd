"""Objectives of a search: ranking of trials at a rung, values for the sampler, and the seed noise of scores. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rtrain.config import TuneConfig
from tune.history import History, RungResult, Trial

ScoreAndCost = tuple[float, float]
"""(score, cost) of a trial."""


@dataclass(frozen=True)
class Objective:
    """The objective by the `tune` settings."""

    kind: str = "score"
    target: float | None = None
    cost: str = "training"

    @classmethod
    def from_settings(cls, tune: TuneConfig) -> "Objective":
        return cls(tune.objective, tune.target, tune.cost)

    def sampler_value(self, trial: Trial, result: RungResult) -> float | tuple[float, ...]:
        """Return the sampler's value of a trial at its first rung; larger is better, for each objective."""
        return result.score if self.kind == "score" else (result.score, -trial.pareto_cost(result.seconds))

    def rank(self, trials: Sequence[Trial], rung: int) -> list[Trial]:
        """Return the trials with a result at a rung, best first; ties by number.

        `score`: by score, then by loss. `time_to_target`: trials that reached the target by seconds, before all others
        by score. `pareto`: by non-dominated front (Deb et al. 2002, NSGA-II), within a front by score.

        """
        result_by_trial = {trial.number: result for trial in trials if (result := rung_result(trial, rung))}
        ranked_trials = [trial for trial in trials if trial.number in result_by_trial]
        score_and_cost = {
            trial.number: (
                result_by_trial[trial.number].score,
                trial.pareto_cost(result_by_trial[trial.number].seconds),
            )
            for trial in ranked_trials
        }
        front_by_trial = _pareto_fronts(score_and_cost) if self.kind == "pareto" else {}

        def sort_key(trial: Trial) -> tuple[float, ...]:
            result = result_by_trial[trial.number]
            # NaN does not compare, so a sort would be undefined.
            score = -math.inf if math.isnan(result.score) else result.score
            loss = math.inf if result.loss is None or math.isnan(result.loss) else result.loss
            reached_target = self.kind == "time_to_target" and self.target is not None and score >= self.target
            return (
                front_by_trial.get(trial.number, 0),
                result.seconds if reached_target else math.inf,
                -score,
                loss,
                trial.number,
            )

        return sorted(ranked_trials, key=sort_key)


def rung_result(trial: Trial, rung: int) -> RungResult | None:
    return next((result for result in trial.rung_results if result.rung == rung), None)


def _pareto_fronts(score_and_cost: dict[int, ScoreAndCost]) -> dict[int, int]:
    """Return the front of each trial. Front 0 is not dominated; front 1 only by trials of front 0, and so on."""
    remaining, front_by_trial = dict(score_and_cost), dict[int, int]()
    while remaining:
        front = [
            number
            for number, costs in remaining.items()
            if not any(_dominates(other, costs) for other in remaining.values())
        ]
        front = front or list(remaining)  # NaN may leave no undominated trial
        front_by_trial |= dict.fromkeys(front, max(front_by_trial.values(), default=-1) + 1)
        remaining = {number: costs for number, costs in remaining.items() if number not in front}
    return front_by_trial


def _dominates(first: ScoreAndCost, second: ScoreAndCost) -> bool:
    return first[0] >= second[0] and first[1] <= second[1] and first != second


def final_seed_std(history: History) -> float | None:
    """Return the standard deviation of final scores over seeds; None if no trial has finished with several seeds."""
    return _pooled_std(history, lambda trial: trial.final_result.score if trial.final_result else None)


def first_rung_seed_std(history: History) -> float | None:
    """Return the standard deviation of scores at the first rung over seeds; None if no trial was repeated there.

    The estimate has few pairs, and two scores may be alike by chance. The variance over rows, from predictions that
    differ between two trainings, is more certain, and is a lower bound.

    """
    seed_std = _pooled_std(history, lambda trial: result.score if (result := rung_result(trial, 0)) else None)
    row_stds = [
        result.row_std
        for trial in history.trials
        if (result := rung_result(trial, 0)) is not None and result.row_std is not None
    ]
    min_std = math.sqrt(statistics.fmean(row_std**2 for row_std in row_stds)) if row_stds else 0.0
    return None if seed_std is None else max(seed_std, min_std)


def _pooled_std(history: History, score: Callable[[Trial], float | None]) -> float | None:
    """Pool the standard deviation over the trials with several seeds."""
    squares, degrees = 0.0, 0
    for trial in history.original_trials:
        seed_scores = [score(repeat) for repeat in history.trials if trial.number in (repeat.number, repeat.repeat_of)]
        if len(scores := [value for value in seed_scores if value is not None]) > 1:
            squares += statistics.pvariance(scores) * len(scores)
            degrees += len(scores) - 1
    return math.sqrt(squares / degrees) if degrees else None
