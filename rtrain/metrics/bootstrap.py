"""Scores that are functions of sums over rows, and their confidence intervals by resampling rows (Efron 1979).

One definition of a score holds for a split, its slices and its resamples. A resample draws as many rows as there are,
with replacement. The same seed gives the same resamples, whatever the scores, so intervals are reproduced, and the
resamples of two systems are the same rows. Rows must be independent: where several come from one document, resample
documents (give one row of sums per document).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SumMetric:
    """The summands of each row, and the scores as a function of the sums."""

    rows: Any
    """(rows, k) float64: an array, or a scipy sparse array where most of it is zero."""
    score: Callable[[Floats], dict[str, Floats]]
    """Sums (..., k) -> scores by name, each (...): the leading axes are resamples."""

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def scores(self) -> dict[str, float]:
        """The scores of all rows."""
        sums = np.asarray(self.rows.sum(axis=0), dtype=np.float64)
        return {name: float(value) for name, value in self.score(sums).items()}

    def take(self, rows: Ints) -> "SumMetric":
        return SumMetric(self.rows[rows], self.score)


def combine_metrics(*parts: SumMetric) -> SumMetric:
    """The scores of all parts over the same rows; sparse where one of them is."""
    widths = np.cumsum([part.rows.shape[1] for part in parts])[:-1]
    if all(isinstance(part.rows, np.ndarray) for part in parts):
        rows: Any = np.concatenate([part.rows for part in parts], axis=1)
    else:
        from scipy.sparse import hstack

        rows = hstack([part.rows for part in parts], format="csr")

    def score(sums: Floats) -> dict[str, Floats]:
        scores: dict[str, Floats] = {}
        for part, part_sums in zip(parts, np.split(sums, widths, axis=-1), strict=True):
            scores |= part.score(part_sums)
        return scores

    return SumMetric(rows, score)


def ratio(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> Floats:
    """The quotient, 0 where `denominator` is 0: every score stays a finite number, which JSON can hold."""
    sides = (np.asarray(side, dtype=np.float64) for side in (numerator, denominator))
    above, below = np.broadcast_arrays(*sides)
    quotient: Floats = np.divide(above, below, out=np.zeros(above.shape), where=below != 0)
    return quotient


def make_mean_metric(columns: dict[str, npt.ArrayLike]) -> SumMetric:
    """Scores that are plain means of per-row values (rows,)."""
    names = tuple(columns)
    values = [np.asarray(columns[name], dtype=np.float64) for name in names]
    rows = np.stack([*values, np.ones_like(values[0])], axis=1)
    return SumMetric(
        rows, lambda sums: {name: ratio(sums[..., column], sums[..., -1]) for column, name in enumerate(names)}
    )


REPLICATES = 1000
_BLOCK = 1 << 22
"""Draws held at a time: 32 MB."""


class Interval(NamedTuple):
    """A score of all rows, and the percentiles of its resamples that leave (1 - confidence) / 2 on either side."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """Score of a minus score of b. `p` is two-sided: the probability of such a difference if neither is better."""

    difference: float
    low: float
    high: float
    p: float


def compute_intervals(
    sum_metric: SumMetric, seed: int = 0, replicates: int = REPLICATES, confidence: float = 0.95
) -> dict[str, Interval]:
    """The interval of each score of `sum_metric`, all resamples at once: a product of counts and rows."""
    samples = _resample_scores(sum_metric, seed, replicates)
    return {
        name: Interval(value, *_compute_percentiles(samples[name], confidence))
        for name, value in sum_metric.scores().items()
    }


def compare(
    a: SumMetric, b: SumMetric, seed: int = 0, replicates: int = REPLICATES, confidence: float = 0.95
) -> dict[str, Comparison]:
    """Paired bootstrap (Koehn 2004) of two systems on the same rows, for each score that both have.

    `p` = twice the smaller share of the resamples in which the difference is at most, or at least, 0, with one more
    resample counted on either side (an estimate is never 0), and at most 1.
    """
    if len(a) != len(b):
        raise ValueError(f"two systems on {len(a)} and {len(b)} rows cannot be compared in pairs")
    value_a, value_b = a.scores(), b.scores()
    sample_a, sample_b = (_resample_scores(side, seed, replicates) for side in (a, b))
    comparisons = {}
    for name in value_a.keys() & value_b.keys():
        difference = sample_a[name] - sample_b[name]
        tail = min(int((difference <= 0).sum()), int((difference >= 0).sum()))
        p = min(1.0, 2 * (tail + 1) / (replicates + 1))
        comparisons[name] = Comparison(value_a[name] - value_b[name], *_compute_percentiles(difference, confidence), p)
    return {name: comparisons[name] for name in value_a if name in comparisons}


def _resample_scores(sum_metric: SumMetric, seed: int, replicates: int) -> dict[str, Floats]:
    """Each score of each resample, (replicates,)."""
    rows = len(sum_metric)
    blocks = []
    for positions in _draw_positions(rows, seed, replicates):
        offsets = np.arange(len(positions), dtype=np.int64)[:, None] * rows
        counts = np.bincount((positions + offsets).ravel(), minlength=len(positions) * rows)
        sums = counts.reshape(len(positions), rows).astype(np.float64) @ sum_metric.rows
        blocks.append(sum_metric.score(np.asarray(sums)))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _draw_positions(rows: int, seed: int, replicates: int) -> Iterator[Ints]:
    """Row positions of the resamples, (up to replicates, rows) at a time; the stream does not depend on the blocks."""
    generator = np.random.Generator(np.random.PCG64(seed))
    block = max(1, _BLOCK // rows)
    for start in range(0, replicates, block):
        yield generator.integers(0, rows, size=(min(block, replicates - start), rows), dtype=np.int64)


def _compute_percentiles(samples: Floats, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)
