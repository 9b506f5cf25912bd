"""Statistics for the report's charts: pure functions of arrays."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_POINTS = 400
"""Points of one curve."""


def thin_curve(
    xs: Sequence[float], ys: Sequence[float], max_points: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Thin a curve to the lowest and highest point of each stretch, so that single spikes stay visible."""
    if len(xs) <= max_points:
        return list(xs), list(ys)
    values, keep = np.asarray(ys, dtype=np.float64), set()
    for part in np.array_split(np.arange(len(xs)), max_points // 2):
        keep |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    keep |= {0, len(xs) - 1}
    indices = sorted(keep)
    return [xs[place] for place in indices], [ys[place] for place in indices]


def sample_rows(rows: int, max_rows: int) -> Ints:
    """Sample at most `max_rows` positions without replacement and with a fixed seed, ascending."""
    if rows <= max_rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).choice(rows, max_rows, replace=False))


MAX_BINS = 30
"""Most bins of a histogram."""


def bin_edges(values: Floats) -> Floats:
    """Compute bin edges over all values. Integer values get integer widths, so that no bin is empty by rounding."""
    low, high = float(values.min()), float(values.max())
    if np.array_equal(values, np.round(values)):
        width = max(1, int(np.ceil((high - low + 1) / MAX_BINS)))
        return np.arange(low - 0.5, high + 0.5 + width, width)
    return np.linspace(low, high, MAX_BINS + 1)


def pearson_correlation(xs: Floats, ys: Floats) -> float | None:
    """Pearson correlation; None if one of the two is constant."""
    if len(xs) < 2 or xs.std() == 0 or ys.std() == 0:
        return None
    return float(np.corrcoef(xs, ys)[0, 1])


def wilson_interval(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927, "Probable inference"); it stays inside [0, 1] also for few rows."""
    share, square = successes / trials, z * z
    center = (share + square / (2 * trials)) / (1 + square / trials)
    half_width = z / (1 + square / trials) * np.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    return max(0.0, float(center - half_width)), min(1.0, float(center + half_width))


def holm_correction(values: Sequence[float]) -> list[float]:
    """Correct p values by Holm's step-down method (1979), which bounds the family-wise error rate."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    p_values, running_max = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        running_max = max(running_max, min(1.0, values[place] * (len(values) - rank)))
        p_values[place] = running_max
    return p_values


def confusion_order(counts: Ints) -> Ints:
    """Order classes so that confused classes are neighbors.

    `counts` is [true, predicted]. The class with the most mistakes comes first. Each class is followed by the class
    that it is most confused with, or by the remaining class with the most mistakes.
    """
    confusion = (counts + counts.T).astype(np.float64)
    np.fill_diagonal(confusion, 0.0)
    mistakes, remaining = confusion.sum(axis=1), set(range(len(confusion)))
    order: list[int] = []
    while remaining:
        candidates = sorted(remaining)
        row_confusion = confusion[order[-1]][candidates] if order else mistakes[candidates]
        best = (
            candidates[int(row_confusion.argmax())]
            if row_confusion.max() > 0
            else candidates[int(mistakes[candidates].argmax())]
        )
        order.append(best)
        remaining.discard(best)
    return np.array(order, dtype=np.int64)
