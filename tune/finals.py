"""The end of a search: what is trained next, and when it is told which settings are best. Pure.

Trial 0, the recipe as it stands, and the two best others are trained to their ends; then again and again with one more
seed each, a round, until the interval of a difference decides or the budget is spent. All of it is told from the
search's history and from what its finished runs have answered to the held-back rows: whoever asks again is told the
same.

The winner is the trial of the highest mean over the seeds on the held-back rows, whatever the interval says: so it is
never below trial 0 there. Where the two cannot be told apart, the leader is taken all the same. One of the two has to
be, both cost the same to use, and of two means on rows that chose neither the higher one is the better bet, however
near they are; the verdict says that it is a bet.

It is looked at after every round, so the 5 % that an interval leaves out are shared out (Bonferroni): each look has its
part of what earlier ones have left, over itself and the rounds that the rest of the budget may pay for. So about one
search in forty takes one given setting for better that is not, and one in twenty any of the two (`chance` tells how
nearly).
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
from rtrain.metrics.slices import LEAST
from tune import difference_ci
from tune.difference_ci import Gap, Held
from tune.history import Finished, History, Trial, numbered
from tune.objective import Aim, spread_at_end

SCORE = Aim()
OTHERS = 2
"""Candidates beside trial 0."""
PART = "data.valid_part"
SECONDS = "neg_seconds"
"""The score of the objective `time`: less is better."""


@dataclass(frozen=True)
class Run:
    """A training of the end."""

    of: int
    """The trial whose settings it has."""
    seed: int | None = None
    """Its `train.seed`; None for the trial itself, with the recipe's own."""


Judged = Mapping[Run, Held]
"""What finished runs have answered to the rows by which the end decides."""


@dataclass(frozen=True)
class Verdict:
    """What the end has come to."""

    kind: Literal["better", "default", "unclear", "alone"]
    """better: the winner is better than trial 0. default: trial 0 is the winner, as no other trial has a higher mean
    or, where it is `faster`, as the cheapest of those within the spread. unclear: the winner has a higher mean, which
    may be chance. alone: trial 0 did not come to its end."""
    best: int
    """The winner."""
    against: int | None = None
    """The trial beside trial 0 in the figures: the winner, or the next best where trial 0 has won; None where there is
    none to compare."""
    name: str | None = None
    """The score that is compared; larger is better."""
    first: float | None = None
    """Trial 0's, mean over the seeds; None where it is not finite."""
    other: float | None = None
    """The same of `against`."""
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    """Interval of the difference, over rows and seeds; with one seed over the rows alone, and of seconds the least and
    the most of the seeds."""
    rows: int = 0
    seeds: int = 0
    parts: int = 1
    """Parts of the rows of which each seed had another one to be judged on; 1: all seeds had the same rows, 0: they
    would have had others, but the validation rows are named."""
    steered: bool = False
    """Whether the rows have steered the rungs too, since none were held back."""
    faster: bool = False
    """With the objective `front`: whether the winner was taken for its cost, among those within the spread."""
    cost: str = "training"
    """`tune.cost`."""
    first_reached: int | None = None
    other_reached: int | None = None
    """With the objective `time`: how many of the seeds of trial 0, and of `against`, have come to the target."""

    def to_document(self) -> dict[str, Any]:
        return asdict(self)


# ------------------------------------------------------------------------------------------------------ the candidates


def candidates(history: History, aim: Aim) -> tuple[int, ...]:
    """The trials of the end: trial 0 and the two best others, of those that are sound. Who came to a later rung is
    better than who did not."""
    first = [trial.number for trial in history.own if trial.number == 0 and trial.sound]
    by_rung: dict[int, list[Trial]] = {}
    for trial in history.own:
        if trial.number and trial.sound and trial.reached:
            by_rung.setdefault(trial.reached[-1].rung, []).append(trial)
    others = [trial.number for rung in sorted(by_rung, reverse=True) for trial in aim.ranked(by_rung[rung], rung)]
    return (*first, *others[:OTHERS])


# ----------------------------------------------------------------------------------------------------------- what next


def next_runs(
    history: History,
    full_rows: int,
    budget_rows: int,
    judged: Judged,
    *,
    seed: int = 0,
    parts: int = 1,
    aim: Aim = SCORE,
    steered: bool = False,
    further: bool = True,
) -> list[Run] | Verdict:
    """The runs that the end still waits for, or what it has come to.

    `full_rows`: of a whole run. `budget_rows`: of the end, over all of its runs; the candidates are trained to their
    ends whatever it is. `seed`: the recipe's own; round 1 has the next one, and so on. `parts`: `judged.parts`.
    `steered`: nothing was held back. `further`: a round that has not begun may begin. A run that has ended and is not
    in `judged` counts as failed. Raises `UserError` where no trial came to a score.
    """
    chosen = candidates(history, aim)
    if not chosen:
        raise UserError(f"no trial of the search came to a score; {failures(history)}", code="no_score")
    if unfinished := [Run(number) for number in chosen if numbered(history.trials, number).finished is None]:
        return unfinished
    alive = tuple(number for number in chosen if Run(number) in judged)
    if not alive:
        raise UserError("no answers of the search's last runs can be judged; evaluate them again", code="no_answers")
    made = {Run(of, trial.seed): trial for of, trial in repeats(history, parts)}
    left = budget_rows - sum(_rest(numbered(history.trials, number)) for number in chosen)
    seeds: list[int | None] = [None]
    alpha = ALPHA
    whole: _Seen | None = None
    for number in itertools.count(1):  # until the budget is spent, if not before
        more = max(0, min(left // (2 * full_rows), parts - number if parts > 1 else math.inf))
        leaves_out = alpha / (1 + more)
        common = [one for one in seeds if all(Run(trial, one) in judged for trial in alive)]
        seen = _Seen.of(history, judged, alive, common, aim.objective, parts, leaves_out)
        alive = seen.in_question
        asked = _affordable(alive, seen.leader, left, full_rows)
        if seen.decided or len(asked) < 2 or 1 < parts <= number:
            break
        round_ = [Run(trial, seed + number) for trial in asked]
        if not further and not any(run in made for run in round_):
            break
        if waiting := [run for run in round_ if run not in made or made[run].status in ("asked", "frozen")]:
            return waiting
        whole = seen if len(asked) < len(alive) else whole
        alpha -= leaves_out if number > 1 else 0.0  # of one seed nothing is decided
        left -= full_rows * len(round_)
        seeds.append(seed + number)
        alive = asked
    if whole is not None and whole.winner not in seen.means:  # the cheapest of those as good, by the seeds that it has
        seen = whole
    return replace(seen.verdict(parts, steered), cost=aim.cost)


def overrides(run: Run, *, seed: int = 0, parts: int = 1) -> dict[str, Any]:
    """What a run sets beside its trial's settings: its seed and, where each seed is judged on rows of its own, the part
    of the rows that validates."""
    if run.seed is None:
        return {}
    return {"train.seed": run.seed, **({PART: run.seed - seed} if parts > 1 else {})}


def repeats(history: History, parts: int) -> list[tuple[int, Trial]]:
    """(whose settings it has, a trial that repeats another one with a seed as the end does). Where each seed of the end
    has rows of its own, one that a look has repeated has not: with it, no row would be common to all."""
    every = [(trial.of, trial) for trial in history.trials if trial.of is not None]
    return [(of, trial) for of, trial in every if parts <= 1 or PART in trial.settings]


def _rest(trial: Trial) -> int:
    """Rows that a trial was trained on after its last rung."""
    assert trial.finished is not None  # `next_runs` waits for it
    return max(0, trial.finished.rows - (trial.reached[-1].rows if trial.reached else 0))


def _affordable(alive: Sequence[int], leader: int, left: int, full_rows: int) -> tuple[int, ...]:
    """Those trials in question that get one more seed: all, else trial 0 and the one before or behind it, else none.
    `alive` has the best first."""
    if left >= full_rows * len(alive):
        return tuple(alive)
    two = (0, next((number for number in alive if number), 0)) if leader == 0 else (0, leader)
    return two if left >= 2 * full_rows and set(two) <= set(alive) else ()


def failures(history: History) -> str:
    """What became of the trials that are not sound, in one line; empty if all are."""
    failed = [f"trial {one.number}: {one.error or one.diverged}" for one in history.own if not one.sound]
    return f"{len(failed)} of {len(history.own)} trials failed: {'; '.join(failed)}" if failed else ""


# ------------------------------------------------------------------------------------------------------ after a round


@dataclass(frozen=True)
class _Seen:
    """What is known after a round, of trials that have all of its seeds."""

    means: Mapping[int, float]
    gaps: Callable[[int, int], tuple[Gap, bool]]
    """(first, other) -> their gap, and whether it is more than chance that the other one is better."""
    costs: Mapping[int, float]
    """By `tune.cost`; seconds of training are a mean over the seeds."""
    near: float = 0.0
    """Scores that are apart by no more than this count as equal; 0 unless the objective is `front`."""
    reached: Mapping[int, int] = field(default_factory=dict)
    """With the objective `time`: by trial, how many of its seeds have come to the target."""

    @staticmethod
    def of(
        history: History,
        judged: Judged,
        alive: Sequence[int],
        seeds: Sequence[int | None],
        objective: str,
        parts: int,
        alpha: float,
    ) -> "_Seen":
        runs: dict[tuple[int, int | None], Trial] = {(of, one.seed): one for of, one in repeats(history, parts)}
        runs |= {(one.number, None): one for one in history.own}
        ends = {number: [runs[number, one].finished for one in seeds] for number in alive}
        costs = {
            number: runs[number, None].price(float(np.mean([end.seconds for end in found if end])))
            for number, found in ends.items()
        }
        if objective == "time":
            return _by_time({number: [end for end in found if end] for number, found in ends.items()}, costs, alpha)
        nested = parts > 1
        table = difference_ci.aligned({number: [judged[Run(number, one)] for one in seeds] for number in alive}, nested)
        means = {number: float(np.mean([one.score for one in found])) for number, found in table.items()}

        @cache
        def gaps(first: int, other: int) -> tuple[Gap, bool]:
            found = difference_ci.gap(table, first, other, nested=nested, alpha=alpha)
            # One seed does not tell what another would change, and few rows tell nothing.
            return found, found.low > 0 and found.seeds > 1 and found.rows >= LEAST

        return _Seen(means, gaps, costs, (spread_at_end(history) or 0.0) if objective == "front" else 0.0)

    @property
    def leader(self) -> int:
        """The highest mean; of equal ones trial 0, else the lowest number."""
        return max(self.means, key=lambda number: (self.means[number], -number))

    @property
    def in_question(self) -> tuple[int, ...]:
        """Trial 0 and those that are not clearly behind the leader, the best first."""
        first = sorted(self.means, key=lambda number: (-self.means[number], number))
        return tuple(one for one in first if one in (0, self.leader) or not self.gaps(one, self.leader)[1])

    @property
    def decided(self) -> bool:
        if 0 not in self.means or self.leader == 0:
            return 0 not in self.means or self.in_question == (0,)
        return self.gaps(0, self.leader)[1]

    @property
    def winner(self) -> int:
        """The leader; of those that are as good, no worse than trial 0 and not clearly behind, the cheapest."""
        if not self.near:
            return self.leader
        least = max(self.means[self.leader] - self.near, self.means.get(0, -math.inf))
        behind = {one for one in self.means if one != self.leader and self.gaps(one, self.leader)[1]}
        near = [one for one, mean in self.means.items() if mean >= least and one not in behind]
        return min(near, key=lambda one: (self.costs[one], one))

    def verdict(self, parts: int, steered: bool) -> Verdict:
        best = self.winner
        blank = Verdict("alone", best, parts=parts, steered=steered, faster=best != self.leader)
        if 0 not in self.means:
            return blank
        others = [number for number in self.means if number]
        against = best or max(others, key=lambda number: (self.means[number], -number), default=None)
        if against is None:
            return replace(blank, kind="default")
        found, better = self.gaps(0, against)
        return replace(
            blank,
            kind="default" if best == 0 else "better" if better else "unclear",
            against=against,
            first_reached=self.reached.get(0),
            other_reached=self.reached.get(against),
            **{name: _finite(value) for name, value in asdict(found).items()},
        )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_time(ends: Mapping[int, Sequence[Finished]], costs: Mapping[int, float], alpha: float) -> _Seen:
    """The verdict by seconds to the target. A trial is worth the expected seconds until one of its trainings comes to
    it, each begun when the last has ended without (Hansen et al. 2009, INRIA RR-6828, section 5): the mean where all
    seeds have come to it, endless where none has. So one that does half of the time is before one that never does.

    The seconds are few, and an evaluation may be slow for reasons of the machine: so the range is told, and one trial
    is faster than another where all of its seeds are faster than all of the other's. With S seeds each that happens
    once in (2 S over S) times where both are as fast (the exact rank test of Wilcoxon 1945), which has to be no more
    than alpha / 2: four seeds for 2.5 %."""
    targets = {number: np.array([_endless(end.to_target) for end in found]) for number, found in ends.items()}
    reached = {number: int(np.isfinite(found).sum()) for number, found in targets.items()}

    def expected(number: int) -> float:
        spent = sum(end.seconds if end.to_target is None else end.to_target for end in ends[number])
        return spent / reached[number] if reached[number] else math.inf

    means = {number: -expected(number) for number in ends}

    def gaps(first: int, other: int) -> tuple[Gap, bool]:
        before, after = targets[first], targets[other]
        with np.errstate(invalid="ignore"):  # neither has reached the target
            apart = before - after
            difference = means[other] - means[first]
        count = len(before)
        rare = 1 / math.comb(2 * count, count) <= alpha / 2
        span = float(apart.min()), float(apart.max())
        found = Gap(SECONDS, means[first], means[other], difference, *span, 0, count)
        return found, rare and bool(after.max() < before.min())

    return _Seen(means, gaps, costs, reached=reached)


def _endless(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
