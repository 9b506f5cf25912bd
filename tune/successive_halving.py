"""Successive halving with frozen trials: which trials continue, and to which rung. Pure functions.

All trials are trained to the first rung, a share of a full run's rows. The better half continues from its checkpoints
to twice the rows, and so on, until `FINALISTS` trials are left for the finals (Jamieson and Talwalkar 2016,
arXiv:1502.07943). Nothing is trained twice: a frozen trial resumes from its checkpoint (Swersky et al. 2014,
arXiv:1406.3896).

"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tune.history import History, Trial
from tune.objective import Objective, rung_result

REDUCTION = 2
MAX_TRIALS = 1 << 20
"""Upper bound of the trials of any budget."""
FINALISTS = 2
"""Trials that are left for the finals, in addition to trial 0."""


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
        largest: int = (
            bisect_right(range(upper_bound), rows, key=lambda trials: self.total_rows(trials) if trials else 0) - 1
        )
        return max(1, largest)


def exact_trial_counts(planned_trials: int) -> tuple[int, ...]:
    """Return numbers of trials from about half of `planned_trials` that halving reduces to exactly `FINALISTS`. One
    more trial would need a further rung."""
    powers = [FINALISTS * REDUCTION**power for power in range(max(1, planned_trials).bit_length())]
    smallest = max((power for power in powers if power <= planned_trials / 2), default=FINALISTS)
    return tuple(power for power in powers if smallest <= power < planned_trials)


def num_survivors(trials: int) -> int:
    """Return the number of trials that continue from a rung."""
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
    for rung in range(len(schedule.rungs)):
        repeat_trials = [
            trial
            for trial in history.trials
            if trial.repeat_of is not None and trial.is_valid and not trial.final_result
        ]
        pending = [
            trial
            for trial in competitors + (repeat_trials if accepts_trials else [])
            if rung_result(trial, rung) is None
        ]
        if pending or (rung == 0 and accepts_trials):
            return [TrainTo(trial.number, rung) for trial in pending]
        if len(competitors) <= FINALISTS:
            return None
        competitors = select_survivors(competitors, rung, objective)
        if len(competitors) <= FINALISTS:
            return None
    return None


def select_survivors(trials: Sequence[Trial], rung: int, objective: Objective) -> list[Trial]:
    """Return the better half of the trials at a rung that all have reached, ordered by number."""
    best_first = objective.rank(trials, rung)
    return sorted(best_first[: num_survivors(len(best_first))], key=lambda trial: trial.number)
