"""The finals of a search: the next runs, and the verdict. Pure functions.

Trial 0 (the recipe) and the two best others are trained to their ends, then repeated with one more seed each, a round,
until the confidence interval decides or the budget is used. All decisions follow from the history and from the
predictions of finished runs for the holdout rows, so a resumed search repeats them.

The winner is the trial with the highest mean over seeds on the holdout rows, so it is never below trial 0 there. If the
difference is not significant, the leader is still selected: one must be, both have equal inference cost, and on unseen
rows the higher mean is the better bet. The verdict reports that.

The test is repeated after every round, so alpha = 5 % is divided (Bonferroni): each round gets its share of the
remainder, over the rounds that the budget may still allow. About one search in forty reports a given setting as better
when it is not, and one in twenty either of the two (see `tune.difference_ci` for the accuracy).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from rtrain.core.errors import UserError
from rtrain.evaluation.significance import ALPHA
from rtrain.metrics.scores import MIN_ROWS
from tune import difference_ci
from tune.difference_ci import DifferenceCI, HoldoutScores
from tune.history import FinalResult, History, Trial, find_trial
from tune.successive_halving import Objective, final_seed_std

SCORE_OBJECTIVE = Objective()
NUM_CHALLENGERS = 2
"""Finalists in addition to trial 0."""
FOLD_SETTING = "data.validation_fold"
SECONDS_SCORE = "neg_seconds"
"""Score of the objective `time_to_target`: negative seconds."""


@dataclass(frozen=True)
class FinalsSettings:
    """Settings of the finals of a search."""

    full_rows: int
    """Rows of a full run."""
    budget_rows: int
    """Rows of all final runs; the finalists are trained to their ends with any budget."""
    seed: int = 0
    """The recipe's seed; round 1 has the next one, and so on."""
    folds: int = 1
    """See `holdout_scores.count_folds`."""
    objective: Objective = SCORE_OBJECTIVE
    used_steering_rows: bool = False
    """Whether there are no holdout rows."""


@dataclass(frozen=True)
class FinalRun:
    """A training in the finals."""

    trial: int
    """The trial with its settings."""
    seed: int | None = None
    """`train.seed`; None for the trial itself, with the recipe's seed."""


HoldoutScoresByRun = Mapping[FinalRun, HoldoutScores]
"""Scores of finished runs on the holdout rows."""


@dataclass(frozen=True)
class SearchVerdict:
    kind: Literal["better", "default", "unclear", "unopposed"]
    """better: significantly better than trial 0. default: trial 0 has won, by the highest mean or (`won_by_cost`) by
    the lowest cost within the seed noise. unclear: the winner has a higher mean, which is not significant. unopposed:
    trial 0 did not finish."""
    winner: int
    """Number of the winning trial."""
    compared_trial: int | None = None
    """The trial compared with trial 0: the winner, or the next best if trial 0 has won; None if no other trial
    finished."""
    score_name: str | None = None
    """Name of the compared score; larger is better."""
    baseline_score: float | None = None
    """Trial 0's mean over seeds; None if it is not finite."""
    candidate_score: float | None = None
    """Mean of `compared_trial`."""
    difference: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    """Interval of the difference, over rows and seeds; with one seed over rows; for seconds the range over seeds."""
    rows: int = 0
    seeds: int = 0
    folds: int = 1
    """Validation folds, one for each seed; 1: all seeds have the same rows; 0: the same few rows, since the validation
    rows are given."""
    used_steering_rows: bool = False
    """Whether the rows have steered the rungs too, since there are no holdout rows."""
    won_by_cost: bool = False
    """Objective `pareto`: whether the winner was selected by cost within the seed noise."""
    cost_kind: str = "training"
    """`tune.cost`."""
    baseline_reached_seeds: int | None = None
    candidate_reached_seeds: int | None = None
    """Objective `time_to_target`: seeds of trial 0 and of `compared_trial` that reached the target."""


# ------------------------------------------------------------------------------------------------------ finalists


def choose_finalists(history: History, objective: Objective) -> tuple[int, ...]:
    """Return the finalists: trial 0 and the two best others, of the valid trials. Later rungs rank first."""
    valid_trials = [trial for trial in history.original_trials if trial.is_valid]
    default_trial = [trial.number for trial in valid_trials if trial.number == 0]
    by_rung: dict[int, list[Trial]] = {}
    for trial in valid_trials:
        if trial.number and trial.rung_results:
            by_rung.setdefault(trial.rung_results[-1].rung, []).append(trial)
    ranked = (trial.number for rung in sorted(by_rung, reverse=True) for trial in objective.rank(by_rung[rung], rung))
    return (*default_trial, *itertools.islice(ranked, NUM_CHALLENGERS))


# ----------------------------------------------------------------------------------------------------------- next runs


def next_runs(
    history: History, holdout_scores: HoldoutScoresByRun, settings: FinalsSettings, allow_new_round: bool = True
) -> list[FinalRun] | SearchVerdict:
    """Return the pending runs of the finals, or the verdict.

    Args:
        holdout_scores: scores of finished runs; a finished run without scores counts as failed.
        allow_new_round: a new round may start.

    Raises:
        UserError: no trial has a score.
    """
    finalists = choose_finalists(history, settings.objective)
    if not finalists:
        raise UserError(f"no trial of the search has a score; {describe_failures(history)}", code="no_score")
    trials, folds, full_rows = history.trials, settings.folds, settings.full_rows
    if unfinished := [FinalRun(number) for number in finalists if find_trial(trials, number).final_result is None]:
        return unfinished
    remaining = tuple(number for number in finalists if FinalRun(number) in holdout_scores)
    if not remaining:
        raise UserError("the last runs of the search have no valid predictions; evaluate them again", code="no_answers")
    trial_by_run = {FinalRun(number, trial.seed): trial for number, trial in repeated_trials(history, folds)}
    rows_left = settings.budget_rows - sum(_rows_after_last_rung(find_trial(trials, number)) for number in finalists)
    seeds: list[int | None] = [None]
    alpha = ALPHA
    last_full_round: _RoundResult | None = None
    for number in itertools.count(1):  # until the budget is used
        rounds_left = max(0, min(rows_left // (2 * full_rows), folds - number if folds > 1 else math.inf))
        round_alpha = alpha / (1 + rounds_left)
        common_seeds = [seed for seed in seeds if all(FinalRun(trial, seed) in holdout_scores for trial in remaining)]
        round_result = _RoundResult.from_history(
            history, holdout_scores, remaining, common_seeds, settings, round_alpha
        )
        remaining = round_result.contenders
        next_trials = _affordable_trials(remaining, round_result.leader, rows_left, full_rows)
        if round_result.is_decided or len(next_trials) < 2 or 1 < folds <= number:
            break
        seed = settings.seed + number
        round_runs = [FinalRun(trial, seed) for trial in next_trials]
        if not allow_new_round and not any(run in trial_by_run for run in round_runs):
            break
        if pending_runs := [
            run for run in round_runs if run not in trial_by_run or trial_by_run[run].status in ("created", "frozen")
        ]:
            return pending_runs
        last_full_round = round_result if len(next_trials) < len(remaining) else last_full_round
        alpha -= round_alpha if number > 1 else 0.0  # one seed decides nothing
        rows_left -= full_rows * len(round_runs)
        seeds.append(seed)
        remaining = next_trials
    if last_full_round is not None and last_full_round.winner not in round_result.means:
        round_result = last_full_round  # the cheapest within the seed noise, by its seeds
    return round_result.to_verdict(settings)


def run_overrides(run: FinalRun, *, seed: int = 0, folds: int = 1) -> dict[str, Any]:
    """Return the overrides of a final run: its seed and, with folds, its validation fold."""
    if run.seed is None:
        return {}
    return {"train.seed": run.seed, **({FOLD_SETTING: run.seed - seed} if folds > 1 else {})}


def repeated_trials(history: History, folds: int) -> list[tuple[int, Trial]]:
    """Return (repeated trial, trial) of repeats in the finals. If there are folds, repeats of check points are left
    out: they have another fold."""
    return [
        (trial.repeat_of, trial)
        for trial in history.trials
        if trial.repeat_of is not None and (folds <= 1 or FOLD_SETTING in trial.settings)
    ]


def _rows_after_last_rung(trial: Trial) -> int:
    assert trial.final_result is not None  # `next_runs` waits for it
    return max(0, trial.final_result.rows - (trial.rung_results[-1].rows if trial.rung_results else 0))


def _affordable_trials(remaining: Sequence[int], leader: int, rows_left: int, full_rows: int) -> tuple[int, ...]:
    """Return the trials of the next round within the budget: all, else trial 0 and its nearest rival, else none.
    `remaining` is ordered best first."""
    if rows_left >= full_rows * len(remaining):
        return tuple(remaining)
    pair = (0, next((number for number in remaining if number), 0)) if leader == 0 else (0, leader)
    return pair if rows_left >= 2 * full_rows and set(pair) <= set(remaining) else ()


def describe_failures(history: History) -> str:
    trials = history.original_trials
    reasons = [f"trial {trial.number}: {trial.error or trial.divergence}" for trial in trials if not trial.is_valid]
    return f"{len(reasons)} of {len(trials)} trials failed: {'; '.join(reasons)}" if reasons else ""


# ------------------------------------------------------------------------------------------------------ round results


@dataclass(frozen=True)
class _RoundResult:
    """Result of a round, for trials with all of its seeds."""

    means: Mapping[int, float]
    compare: Callable[[int, int], tuple[DifferenceCI, bool]]
    """(baseline, candidate) -> (difference, whether the candidate is significantly better)."""
    costs: Mapping[int, float]
    """Cost by `tune.cost`; seconds of training are means over seeds."""
    tolerance: float = 0.0
    """Scores within this difference count as equal; 0 unless the objective is `pareto`."""
    reached_seeds: Mapping[int, int] = field(default_factory=dict)
    """Objective `time_to_target`: number of seeds that reached the target, by trial."""

    @staticmethod
    def from_history(
        history: History,
        holdout_scores: HoldoutScoresByRun,
        remaining: Sequence[int],
        seeds: Sequence[int | None],
        settings: FinalsSettings,
        alpha: float,
    ) -> "_RoundResult":
        trial_by_run = {
            FinalRun(number, trial.seed): trial for number, trial in repeated_trials(history, settings.folds)
        }
        trial_by_run |= {FinalRun(trial.number): trial for trial in history.original_trials}
        results_by_trial = {
            number: [result for seed in seeds if (result := trial_by_run[FinalRun(number, seed)].final_result)]
            for number in remaining
        }
        costs = {
            number: trial_by_run[FinalRun(number)].pareto_cost(float(np.mean([result.seconds for result in results])))
            for number, results in results_by_trial.items()
        }
        objective = settings.objective.kind
        if objective == "time_to_target":
            return _compare_times(results_by_trial, costs, alpha)
        is_nested = settings.folds > 1
        scores = {number: [holdout_scores[FinalRun(number, seed)] for seed in seeds] for number in remaining}
        table = difference_ci.align_rows(scores, is_nested)
        means = {number: float(np.mean([holdout.score for holdout in row])) for number, row in table.items()}

        @cache
        def compare(baseline: int, candidate: int) -> tuple[DifferenceCI, bool]:
            difference = difference_ci.difference_ci(table, baseline, candidate, is_nested=is_nested, alpha=alpha)
            # One seed or few rows are not significant.
            return difference, difference.ci_low > 0 and difference.seeds > 1 and difference.rows >= MIN_ROWS

        tolerance = (final_seed_std(history) or 0.0) if objective == "pareto" else 0.0
        return _RoundResult(means, compare, costs, tolerance)

    @property
    def leader(self) -> int:
        """The trial with the highest mean; ties: trial 0, then the lowest number."""
        return max(self.means, key=lambda number: (self.means[number], -number))

    @property
    def contenders(self) -> tuple[int, ...]:
        """Trial 0 and the trials that are not significantly below the leader, best first."""
        ranked = sorted(self.means, key=lambda number: (-self.means[number], number))
        return tuple(
            number for number in ranked if number in (0, self.leader) or not self.compare(number, self.leader)[1]
        )

    @property
    def is_decided(self) -> bool:
        if 0 not in self.means:
            return True
        return self.contenders == (0,) if self.leader == 0 else self.compare(0, self.leader)[1]

    @property
    def winner(self) -> int:
        """The leader, or the cheapest trial within the tolerance that is not below trial 0 or significantly below the
        leader."""
        if not self.tolerance:
            return self.leader
        min_mean = max(self.means[self.leader] - self.tolerance, self.means.get(0, -math.inf))
        as_good = [
            number
            for number, mean in self.means.items()
            if mean >= min_mean and (number == self.leader or not self.compare(number, self.leader)[1])
        ]
        return min(as_good, key=lambda number: (self.costs[number], number))

    def to_verdict(self, settings: FinalsSettings) -> SearchVerdict:
        winner = self.winner
        verdict = SearchVerdict(
            "unopposed",
            winner,
            folds=settings.folds,
            used_steering_rows=settings.used_steering_rows,
            won_by_cost=winner != self.leader,
            cost_kind=settings.objective.cost,
        )
        if 0 not in self.means:
            return verdict
        challengers = [number for number in self.means if number]
        compared_trial = winner or max(challengers, key=lambda number: (self.means[number], -number), default=None)
        if compared_trial is None:
            return replace(verdict, kind="default")
        difference, is_better = self.compare(0, compared_trial)
        figures: dict[str, Any] = asdict(difference)
        for name, value in figures.items():
            figures[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        return replace(
            verdict,
            kind="default" if winner == 0 else "better" if is_better else "unclear",
            compared_trial=compared_trial,
            baseline_reached_seeds=self.reached_seeds.get(0),
            candidate_reached_seeds=self.reached_seeds.get(compared_trial),
            **figures,
        )


def _compare_times(
    results_by_trial: Mapping[int, Sequence[FinalResult]], costs: Mapping[int, float], alpha: float
) -> _RoundResult:
    """Compare trials by seconds to the target.

    The value of a trial is the expected running time until a training reaches the target, with restarts after failures
    (Hansen et al. 2009, INRIA RR-6828, section 5): the mean if all seeds reached it, infinite if none did.

    The seconds are few and depend on the machine, so the interval is the range. A trial is faster if all of its seeds
    are faster than all of the other's. With S seeds each this has probability 1 / (2 S choose S) for equal trials (the
    exact rank test of Wilcoxon 1945), which must be at most alpha / 2: four seeds for 2.5 %."""
    seconds_by_trial = {
        number: np.array(
            [math.inf if result.seconds_to_target is None else result.seconds_to_target for result in results]
        )
        for number, results in results_by_trial.items()
    }
    reached_seeds = {number: int(np.isfinite(seconds).sum()) for number, seconds in seconds_by_trial.items()}

    def expected_seconds(number: int) -> float:
        total_seconds = sum(
            result.seconds if result.seconds_to_target is None else result.seconds_to_target
            for result in results_by_trial[number]
        )
        return total_seconds / reached_seeds[number] if reached_seeds[number] else math.inf

    means = {number: -expected_seconds(number) for number in results_by_trial}

    def compare(baseline: int, candidate: int) -> tuple[DifferenceCI, bool]:
        baseline_seconds, candidate_seconds = seconds_by_trial[baseline], seconds_by_trial[candidate]
        with np.errstate(invalid="ignore"):  # inf - inf
            differences = baseline_seconds - candidate_seconds
            difference = means[candidate] - means[baseline]
        count = len(baseline_seconds)
        is_significant = 1 / math.comb(2 * count, count) <= alpha / 2
        bounds = float(differences.min()), float(differences.max())
        interval = DifferenceCI(SECONDS_SCORE, means[baseline], means[candidate], difference, *bounds, 0, count)
        return interval, is_significant and bool(candidate_seconds.max() < baseline_seconds.min())

    return _RoundResult(means, compare, costs, reached_seeds=reached_seeds)
