"""Successive halving by freezing: which trials go on, and how far. Pure.

All trials are trained to the first rung, a share of a full run's rows. The better half goes on from where it was frozen
to twice the rows, the better half of these to twice as many again, until `KEPT` trials are left: those go to the
search's end (Jamieson and Talwalkar 2016, arXiv:1502.07943; nothing is trained twice, since a frozen trial goes on from
its own checkpoint, as in Swersky et al. 2014, arXiv:1406.3896).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tune.history import History, Trial
from tune.objective import Aim, at

REDUCTION = 2
MOST = 1 << 20
"""More trials are asked of no budget."""
KEPT = 2
"""Trials that are left for the end, trial 0 beside them."""


@dataclass(frozen=True)
class Ladder:
    """The rungs of a search: rows that its trials have been trained on when they are compared."""

    rungs: tuple[int, ...]
    full: int
    """Rows of a full run, over all of its epochs."""

    @classmethod
    def of(cls, first: float, full: int) -> "Ladder":
        """From the share `first` of a full run on, each rung at twice the rows of the last, all below a full run."""
        rungs, rows = list[int](), max(1, round(first * full))
        while rows < full or not rungs:
            rungs.append(min(rows, full))
            rows *= REDUCTION
        return cls(tuple(rungs), full)

    def cost(self, trials: int) -> int:
        """Rows that so many trials are trained on until `KEPT` are left."""
        rows, before = 0, 0
        for rung in self.rungs:
            rows, before, trials = rows + trials * (rung - before), rung, goes_on(trials)
            if trials <= KEPT:
                break
        return rows

    def affordable(self, rows: int) -> int:
        """The most trials that cost no more than `rows`; at least one."""
        most = 2
        while most < MOST and self.cost(most) <= rows:
            most *= 2
        # A trial more costs no less: by bisection, since a budget that nothing else bounds may be of any size.
        found: int = bisect_right(range(most), rows, key=lambda trials: self.cost(trials) if trials else 0) - 1
        return max(1, found)


def sizes(planned: int) -> tuple[int, ...]:
    """Numbers of trials below `planned`, from about a half of it on, of which halving leaves just `KEPT`. One trial
    more would leave three, which takes a further rung."""
    doubled = [KEPT * REDUCTION**power for power in range(max(1, planned).bit_length())]
    half = max((one for one in doubled if one <= planned / 2), default=KEPT)
    return tuple(one for one in doubled if half <= one < planned)


def goes_on(trials: int) -> int:
    """How many of so many trials go on from a rung."""
    return min(trials, max(KEPT, math.ceil(trials / REDUCTION)))


@dataclass(frozen=True)
class Go:
    """An order: train this trial to this rung; to its end where `rung` is None."""

    trial: int
    rung: int | None


def due(history: History, ladder: Ladder, aim: Aim, asking: bool) -> list[Go] | None:
    """The trials that have yet to come to their next rung; None when the halving is over.

    `asking`: further trials may be asked for, so that none is compared yet. An empty list means that whoever asks has
    to ask for another trial. Trials that failed or diverged take no part, and those that repeat another one go no
    further than the first rung.
    """
    field = [trial for trial in history.own if trial.sound]
    for rung in range(len(ladder.rungs)):
        repeats = [trial for trial in history.trials if trial.of is not None and trial.sound and not trial.finished]
        waiting = [trial for trial in field + (repeats if asking else []) if at(trial, rung) is None]
        if waiting or (rung == 0 and asking):
            return [Go(trial.number, rung) for trial in waiting]
        if len(field) <= KEPT:
            return None
        field = survivors(field, rung, aim)
        if len(field) <= KEPT:
            return None
    return None


def survivors(trials: Sequence[Trial], rung: int, aim: Aim) -> list[Trial]:
    """The better half of the trials at a rung to which all of them have come, in the order of their numbers."""
    ranked = aim.ranked(trials, rung)
    return sorted(ranked[: goes_on(len(ranked))], key=lambda trial: trial.number)
