"""Whether the difference of two trials is more than chance, over rows and seeds at once.

A trial's score depends on the rows that it is judged on and on the seed that it was trained with; another choice of
either gives another score, and an interval over the rows alone takes one lucky seed for a better setting (Bouthillier
et al. 2021, arXiv:2103.03098). Here both count. The difference of row i with seed s is taken as

    difference + row[i] + seed[s] + rest[i, s]

each part with a mean of 0, so the mean over all has the variance  rows / n + (seeds + rest / n) / S  (the two-way
layout of Searle, Casella & McCulloch 1992, section 4.3). Rows and rest come from the rows. The seeds' part is what the
scores of all trials that have them vary by, less the means of trial and seed, beyond the rest. It is known with few
degrees of freedom and the other parts with many, so the interval is Student's, with the mean of both quantiles,
weighted by their parts of the variance (Cochran & Cox 1950): seeds that differ by more than their rows tell make it
wide. By simulation trials of equal worth are told better, where it should be in 2.5 % of searches, in 1 to 3 % with
three seeds of three trials, in up to 5 % with three of two or two of three, and in up to 7 % with two of two: the most
where seeds differ by far more than their rows tell.

A score that is no mean over rows, e.g. F1, is taken row by row by its jackknife pseudo-values (Tukey 1958).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rtrain.evaluation import pairing
from rtrain.evaluation.significance import ALPHA
from rtrain.metrics.sums import Additive, Floats

_BLOCK = 1 << 20
"""Sums that are held at a time while rows are left out, one after the other."""


@dataclass(frozen=True, eq=False)
class Held:
    """What the answers of one finished run are worth, on the rows by which the end decides."""

    name: str
    """The score by which trials are compared; larger is better."""
    ids: npt.NDArray[np.uint64]
    """Ids of the rows, (rows,)."""
    worth: Additive
    """`name` is one of its scores; an entry per row, in the order of `ids`."""

    @property
    def score(self) -> float:
        return self.worth.scores()[self.name]


Table = Mapping[int, Sequence[Held]]
"""For each trial what each seed came to; all trials have the same seeds, in one order."""


@dataclass(frozen=True)
class Gap:
    """The score of another trial less that of the first one, in the mean over the seeds."""

    name: str
    first: float
    other: float
    difference: float
    low: float
    high: float
    """Interval of the difference, over rows and seeds; of a single seed over the rows alone."""
    rows: int
    """Different rows that both were judged on, over all seeds."""
    seeds: int


def aligned(table: Table, nested: bool) -> dict[int, list[Held]]:
    """The same rows in the same order for all trials; for all seeds too, unless each has rows of its own (`nested`)."""
    seeds = range(len(next(iter(table.values()))))
    groups = [[(trial, seed) for trial in table] for seed in seeds]
    if not nested:
        groups = [[place for group in groups for place in group]]
    found = {place: table[place[0]][place[1]] for group in groups for place in group}
    for group in groups:
        ids = [found[place].ids for place in group]
        if all(np.array_equal(one, ids[0]) for one in ids):
            continue
        for place, at in zip(group, pairing.common(ids), strict=True):
            one = found[place]
            found[place] = replace(one, ids=one.ids[at], worth=Additive(one.worth.rows[at], one.worth.score))
    return {trial: [found[trial, seed] for seed in seeds] for trial in table}


def gap(table: Table, first: int, other: int, *, nested: bool = False, alpha: float = ALPHA) -> Gap:
    """Trial `other` beside trial `first`, of an `aligned` table; the interval leaves out `alpha`.

    `nested`: each seed has rows of its own. Then the seeds' differences are taken as independent; that they share most
    of their training rows makes them a little too much alike (Bengio & Grandvalet 2004).
    """
    pairs = list(zip(table[first], table[other], strict=True))
    seeds, name = len(pairs), pairs[0][0].name
    by_row = [pseudo_values(b) - pseudo_values(a) for a, b in pairs]
    rows = sum(map(len, by_row)) if nested else len(by_row[0])
    before, after = (float(np.mean([one.score for one in table[trial]])) for trial in (first, other))
    difference = after - before
    noise = _noise(table, first, other, by_row, nested)
    of_a_seed = rows // seeds if nested else rows
    half = noise.half(of_a_seed, seeds, alpha)
    return Gap(name, before, after, difference, difference - half, difference + half, rows, seeds)


@dataclass(frozen=True)
class _Noise:
    """What makes the difference of two trials vary: the variances of the parts in this module's first lines."""

    row: float
    seed: float
    rest: float
    free: int
    """Degrees of freedom of the seeds' part that each seed after the first one brings."""

    def half(self, rows: int, seeds: int, alpha: float) -> float:
        """Half the width of the interval with so many seeds, on so many rows each."""
        from scipy.special import stdtrit

        def quantile(degrees: int) -> float:
            return float(stdtrit(max(1, degrees), 1 - alpha / 2))

        few, many = self.seed / seeds, (self.row + self.rest / seeds) / rows
        both = few * quantile(self.free * (seeds - 1)) + many * quantile(rows - 1)
        return both / math.sqrt(few + many) if both else 0.0


def _noise(table: Table, first: int, other: int, by_row: Sequence[Floats], nested: bool) -> _Noise:
    """`by_row`: for each seed the difference of each row."""
    seeds, rows = len(by_row), float(np.mean([len(one) for one in by_row]))
    each = float(np.mean([_variance(one) for one in by_row]))
    if seeds == 1:
        return _Noise(each * rows, 0.0, 0.0, 0)
    # All trials tell it with fewer seeds; the two alone count where they differ more than others do.
    every = np.array([[one.score for one in seen] for seen in table.values()])
    two = np.array([[one.score for one in table[trial]] for trial in (first, other)])
    free = len(table) - 1
    scores = max(2 * _rest(every) / (free * (seeds - 1)), 2 * _rest(two) / (seeds - 1))
    # The rows tell how much the seeds differ at the least: two may be alike by chance.
    if nested:
        return _Noise(0.0, max(0.0, scores - each), each * rows, free)
    together = _variance(np.mean(by_row, axis=0))
    rest = max(0.0, (each - together) * seeds / (seeds - 1))
    return _Noise(max(0.0, together - rest / seeds) * rows, max(0.0, scores - rest), rest * rows, free)


def luck(one: Held, other: Held) -> float:
    """Standard deviation of a score by its rows, told by two trainings of one setting, on the same rows in the same
    order: half of the variance of their difference. Where both answer alike there is none, whatever the score."""
    return math.sqrt(_variance(pseudo_values(other) - pseudo_values(one)) / 2)


def pseudo_values(held: Held) -> Floats:
    """What each row adds to the score, (rows,): n times the score of all n rows, less n - 1 times that without it. For
    a mean these are the rows' own values."""
    rows, count = held.worth.rows, len(held.worth)
    if count < 2:
        return np.full(count, held.score)
    total = np.asarray(rows.sum(axis=0), dtype=np.float64).reshape(-1)
    step = max(1, _BLOCK // max(1, len(total)))
    parts = []
    for start in range(0, count, step):
        own = rows[start : start + step]
        own = own if isinstance(own, np.ndarray) else own.toarray()
        parts.append(held.worth.score(total - own)[held.name])
    found: Floats = count * held.score - (count - 1) * np.concatenate(parts)
    return found


def _variance(values: Floats) -> float:
    """Variance of the mean of these rows."""
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else 0.0


def _rest(scores: Floats) -> float:
    """Sum of squares of (trials, seeds), less the means of trial and seed."""
    rest = scores - scores.mean(axis=1, keepdims=True) - scores.mean(axis=0, keepdims=True) + scores.mean()
    return float((rest**2).sum())
