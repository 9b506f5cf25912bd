"""Confidence intervals by resampling rows (Efron 1979), and the comparison of two systems on the same rows.

A resample draws as many rows as there are, with replacement. The same seed gives the same resamples, whatever the
scores, so intervals are reproduced, and the resamples of two systems are the same rows. Rows must be independent:
where several come from one document, resample documents (give one row of sums per document).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rtrain.metrics.sums import Floats, Ints, SumMetric

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
