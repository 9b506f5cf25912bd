"""Scores that are functions of sums over rows: one definition for a split, its slices and its bootstrap resamples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Positions = Ints | Sequence[int]
"""Row numbers of a split, from 0; a row may occur several times."""


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
        return self._to_floats(self.rows.sum(axis=0))

    def scores_at(self, positions: Positions) -> dict[str, float]:
        """The scores of these rows."""
        return self._to_floats(self.rows[np.asarray(positions, dtype=np.int64)].sum(axis=0))

    def _to_floats(self, sums: Any) -> dict[str, float]:
        return {name: float(value) for name, value in self.score(np.asarray(sums, dtype=np.float64)).items()}


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
    """`part / whole`, 0 where `denominator` is 0: every score stays a finite number, which JSON can hold."""
    broadcast_numerator, broadcast_denominator = np.broadcast_arrays(
        np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    )
    quotient: Floats = np.divide(
        broadcast_numerator,
        broadcast_denominator,
        out=np.zeros(broadcast_numerator.shape),
        where=broadcast_denominator != 0,
    )
    return quotient


def make_mean_metric(columns: dict[str, npt.ArrayLike]) -> SumMetric:
    """Scores that are plain means of per-row values (rows,)."""
    names = tuple(columns)
    values = [np.asarray(columns[name], dtype=np.float64) for name in names]
    rows = np.stack([*values, np.ones_like(values[0])], axis=1)
    return SumMetric(
        rows, lambda sums: {name: ratio(sums[..., column], sums[..., -1]) for column, name in enumerate(names)}
    )
