"""Figures behind the report's charts: pure functions of arrays, no files."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_POINTS = 400
"""Points of one curve."""


def thin(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """A long curve by the lowest and the highest point of each stretch, so that a spike of one update stays visible."""
    if len(xs) <= most:
        return list(xs), list(ys)
    values, keep = np.asarray(ys, dtype=np.float64), set()
    for part in np.array_split(np.arange(len(xs)), most // 2):
        keep |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    keep |= {0, len(xs) - 1}
    chosen = sorted(keep)
    return [xs[place] for place in chosen], [ys[place] for place in chosen]


def sample(rows: int, most: int) -> Ints:
    """Positions of all rows, or of `most` of them, ascending: drawn without replacement, always the same ones."""
    if rows <= most:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False))


BINS = 30
"""Most bins of a histogram."""


def edges(values: Floats) -> Floats:
    """Bin edges over all values. Bins of whole numbers have whole widths, so that none is empty by rounding."""
    low, high = float(values.min()), float(values.max())
    if np.array_equal(values, np.round(values)):
        width = max(1, int(np.ceil((high - low + 1) / BINS)))
        return np.arange(low - 0.5, high + 0.5 + width, width)
    return np.linspace(low, high, BINS + 1)


def pearson(xs: Floats, ys: Floats) -> float | None:
    """Correlation, or None where one of the two does not vary."""
    if len(xs) < 2 or xs.std() == 0 or ys.std() == 0:
        return None
    return float(np.corrcoef(xs, ys)[0, 1])


def wilson(right: float, rows: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927, "Probable inference"); it stays inside [0, 1] also for few rows."""
    share, square = right / rows, z * z
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = z / (1 + square / rows) * np.sqrt(share * (1 - share) / rows + square / (4 * rows * rows))
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): with it, the chance that any of the p falls below 0.05 without a difference
    is at most 0.05, however many there are."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    found, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, values[place] * (len(values) - rank)))
        found[place] = highest
    return found


def chain(counts: Ints) -> Ints:
    """An order of the classes in which those that are confused with each other are neighbours.

    `counts` is [true, predicted]. The class with the most mistakes comes first; behind each class stands the one that
    it is confused with most, or, where it is confused with none of the rest, the one of these with the most mistakes.
    """
    both = (counts + counts.T).astype(np.float64)
    np.fill_diagonal(both, 0.0)
    mistakes, left = both.sum(axis=1), set(range(len(both)))
    order: list[int] = []
    while left:
        rest = sorted(left)
        near = both[order[-1]][rest] if order else mistakes[rest]
        best = rest[int(near.argmax())] if near.max() > 0 else rest[int(mistakes[rest].argmax())]
        order.append(best)
        left.discard(best)
    return np.array(order, dtype=np.int64)
