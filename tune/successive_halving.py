"""Objectives of a search, and successive halving with frozen trials: how trials rank at a rung, which continue, and to
which rung. Pure functions.

All trials are trained to the first rung, a share of a full run's rows. The better half continues from its checkpoints
to twice the rows, and so on, until `FINALISTS` trials are left for the finals (Jamieson and Talwalkar 2016,
arXiv:1502.07943). Nothing is trained twice: a frozen trial resumes from its checkpoint (Swersky et al. 2014,
arXiv:1406.3896).
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rtrain.config import TuneConfig
from tune.history import History, RungResult, Trial

REDUCTION = 2
MAX_TRIALS = 1 << 20
"""Upper bound of the trials of any budget."""
FINALISTS = 2
"""Trials that are left for the finals, in addition to trial 0."""
ScoreAndCost = tuple[float, float]
"""(score, cost) of a trial."""


@dataclass(frozen=True)
class Objective:
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
        results = [(trial, result) for trial in trials if (result := rung_result(trial, rung))]
        fronts: Mapping[int, int] = {}
        if self.kind == "pareto":
            fronts = _pareto_fronts(
                {trial.number: (result.score, trial.pareto_cost(result.seconds)) for trial, result in results}
            )

        def sort_key(item: tuple[Trial, RungResult]) -> tuple[float, ...]:
            trial, result = item
            # NaN does not compare, so a sort would be undefined.
            score = -math.inf if math.isnan(result.score) else result.score
            loss = math.inf if result.loss is None or math.isnan(result.loss) else result.loss
            reached_target = self.kind == "time_to_target" and self.target is not None and score >= self.target
            seconds = result.seconds if reached_target else math.inf
            return fronts.get(trial.number, 0), seconds, -score, loss, trial.number

        return [trial for trial, _ in sorted(results, key=sort_key)]


def rung_result(trial: Trial, rung: int) -> RungResult | None:
    return next((result for result in trial.rung_results if result.rung == rung), None)


def _pareto_fronts(score_and_cost: dict[int, ScoreAndCost]) -> dict[int, int]:
    """Return the front of each trial. Front 0 is not dominated; front 1 only by trials of front 0, and so on."""

    def is_dominated(costs: ScoreAndCost) -> bool:
        return any(
            score >= costs[0] and cost <= costs[1] and (score, cost) != costs for score, cost in remaining.values()
        )

    remaining, front_by_trial = dict(score_and_cost), dict[int, int]()
    while remaining:
        # NaN may leave no undominated trial.
        front = [number for number, costs in remaining.items() if not is_dominated(costs)] or list(remaining)
        front_by_trial |= dict.fromkeys(front, max(front_by_trial.values(), default=-1) + 1)
        remaining = {number: costs for number, costs in remaining.items() if number not in front}
    return front_by_trial


@dataclass(frozen=True)
class RungSchedule:
    """The rungs of a search: trained rows at which its trials are compared."""

    rungs: tuple[int, ...]
    full_rows: int
    """Rows of a full run, over all epochs."""

    @classmethod
    def from_first_rung(cls, first_share: float, full_rows: int) -> "RungSchedule":
        """Start at the share `first_share` of a full run, and double the rows up to a full run."""
        rung_rows, rows = list[int](), max(1, round(first_share * full_rows))
        while rows < full_rows or not rung_rows:
            rung_rows.append(min(rows, full_rows))
            rows *= REDUCTION
        return cls(tuple(rung_rows), full_rows)

    def total_rows(self, trials: int) -> int:
        """Return the rows that so many trials need until `FINALISTS` are left."""
        total, previous_rung = 0, 0
        for rung in self.rungs:
            total, previous_rung, trials = total + trials * (rung - previous_rung), rung, num_survivors(trials)
            if trials <= FINALISTS:
                break
        return total

    def max_trials(self, rows: int) -> int:
        """Return the maximum number of trials within `rows`; at least 1."""
        upper_bound = 2
        while upper_bound < MAX_TRIALS and self.total_rows(upper_bound) <= rows:
            upper_bound *= 2
        # The rows are monotonic in the number of trials; bisection, since the budget has no upper bound.
        return max(1, bisect_right(range(1, upper_bound), rows, key=self.total_rows))


def exact_trial_counts(planned_trials: int) -> tuple[int, ...]:
    """Return numbers of trials from about half of `planned_trials` that halving reduces to exactly `FINALISTS`. One
    more trial would need a further rung."""
    powers = [FINALISTS * REDUCTION**power for power in range(max(1, planned_trials).bit_length())]
    smallest = max((power for power in powers if power <= planned_trials / 2), default=FINALISTS)
    return tuple(power for power in powers if smallest <= power < planned_trials)


def num_survivors(trials: int) -> int:
    return min(trials, max(FINALISTS, math.ceil(trials / REDUCTION)))


@dataclass(frozen=True)
class TrainTo:
    """Train this trial to this rung, or to its end if `rung` is None."""

    trial: int
    rung: int | None


def next_promotions(
    history: History, schedule: RungSchedule, objective: Objective, accepts_trials: bool
) -> list[TrainTo] | None:
    """Return the trials that must reach their next rung; None when the halving is over.

    Failed and diverged trials take no part; repeated trials stop at the first rung.

    Args:
        accepts_trials: further trials may be created, so none is compared yet. An empty list then requests one.
    """
    competitors = [trial for trial in history.original_trials if trial.is_valid]
    repeats = [
        trial for trial in history.trials if trial.repeat_of is not None and trial.is_valid and not trial.final_result
    ]
    for rung in range(len(schedule.rungs)):
        awaited_trials = competitors + (repeats if accepts_trials else [])
        pending = [trial for trial in awaited_trials if rung_result(trial, rung) is None]
        if pending or (rung == 0 and accepts_trials):
            return [TrainTo(trial.number, rung) for trial in pending]
        if len(competitors) > FINALISTS:
            competitors = select_survivors(competitors, rung, objective)
        if len(competitors) <= FINALISTS:
            return None
    return None


def select_survivors(trials: Sequence[Trial], rung: int, objective: Objective) -> list[Trial]:
    """Return the better half of the trials at a rung that all have reached, ordered by number."""
    best_first = objective.rank(trials, rung)
    return sorted(best_first[: num_survivors(len(best_first))], key=lambda trial: trial.number)


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
    squares, degrees = 0.0, 0
    for trial in history.original_trials:
        seed_scores = [score(repeat) for repeat in history.trials if trial.number in (repeat.number, repeat.repeat_of)]
        if len(scores := [value for value in seed_scores if value is not None]) > 1:
            squares += statistics.pvariance(scores) * len(scores)
            degrees += len(scores) - 1
    return math.sqrt(squares / degrees) if degrees else None
