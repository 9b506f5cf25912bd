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
class Additive:
    """What each row adds, and the scores as a function of the sums."""

    rows: Any
    """(rows, k) float64: an array, or a scipy sparse array where most of it is zero."""
    score: Callable[[Floats], dict[str, Floats]]
    """Sums (..., k) -> scores by name, each (...): the leading axes are resamples."""

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def scores(self) -> dict[str, float]:
        """The scores of all rows."""
        return self._floats(self.rows.sum(axis=0))

    def of(self, positions: Positions) -> dict[str, float]:
        """The scores of these rows."""
        return self._floats(self.rows[np.asarray(positions, dtype=np.int64)].sum(axis=0))

    def _floats(self, sums: Any) -> dict[str, float]:
        return {name: float(value) for name, value in self.score(np.asarray(sums, dtype=np.float64)).items()}


def joined(*parts: Additive) -> Additive:
    """The scores of all parts over the same rows; sparse where one of them is."""
    widths = np.cumsum([part.rows.shape[1] for part in parts])[:-1]
    if all(isinstance(part.rows, np.ndarray) for part in parts):
        rows: Any = np.concatenate([part.rows for part in parts], axis=1)
    else:
        from scipy.sparse import hstack

        rows = hstack([part.rows for part in parts], format="csr")

    def score(sums: Floats) -> dict[str, Floats]:
        found: dict[str, Floats] = {}
        for part, own in zip(parts, np.split(sums, widths, axis=-1), strict=True):
            found |= part.score(own)
        return found

    return Additive(rows, score)


def ratio(part: npt.ArrayLike, whole: npt.ArrayLike) -> Floats:
    """`part / whole`, 0 where `whole` is 0: every score stays a finite number, which JSON can hold."""
    top, bottom = np.broadcast_arrays(np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64))
    found: Floats = np.divide(top, bottom, out=np.zeros(top.shape), where=bottom != 0)
    return found


def means(columns: dict[str, npt.ArrayLike]) -> Additive:
    """Scores that are plain means of per-row values (rows,)."""
    names = tuple(columns)
    values = [np.asarray(columns[name], dtype=np.float64) for name in names]
    rows = np.stack([*values, np.ones_like(values[0])], axis=1)
    return Additive(
        rows, lambda sums: {name: ratio(sums[..., column], sums[..., -1]) for column, name in enumerate(names)}
    )
