"""Figures behind the report's charts: pure functions of arrays, no files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_POINTS = 400
"""Points of one curve."""
RESAMPLES, LARGE_RESAMPLES, LARGE = 1000, 200, 20_000
"""Bootstrap resamples; of more than `LARGE` rows fewer do, and their interval is narrow anyway."""


def thin(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """The lowest and the highest point of each stretch of a long curve: a spike of one update stays visible."""
    if len(xs) <= most:
        return list(xs), list(ys)
    values, keep = np.asarray(ys, dtype=np.float64), set()
    for part in np.array_split(np.arange(len(xs)), most // 2):
        keep |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    keep |= {0, len(xs) - 1}
    chosen = sorted(keep)
    return [xs[place] for place in chosen], [ys[place] for place in chosen]


def sample(rows: int, most: int, seed: int = 0) -> Ints:
    """Positions of all rows, or of `most` of them drawn without replacement, ascending."""
    if rows <= most:
        return np.arange(rows)
    return np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))


def edges(values: Floats, bins: int = 30) -> Floats:
    """Bin edges over all values; whole numbers get bins of whole widths, so that no bin is empty by rounding."""
    low, high = float(values.min()), float(values.max())
    if np.array_equal(values, np.round(values)):
        width = max(1, int(np.ceil((high - low + 1) / bins)))
        return np.arange(low - 0.5, high + 0.5 + width, width)
    return np.linspace(low, high, bins + 1)


@dataclass(frozen=True)
class Box:
    """5th, 25th, 50th, 75th and 95th percentile."""

    low: float
    q1: float
    median: float
    q3: float
    high: float
    rows: int


def box(values: Floats) -> Box:
    low, q1, median, q3, high = (float(value) for value in np.percentile(values, (5, 25, 50, 75, 95)))
    return Box(low, q1, median, q3, high, len(values))


def pearson(xs: Floats, ys: Floats) -> float | None:
    """Correlation, or None where one of the two does not vary."""
    if len(xs) < 2 or xs.std() == 0 or ys.std() == 0:
        return None
    return float(np.corrcoef(xs, ys)[0, 1])


def eta_squared(values: Floats, groups: Ints) -> float:
    """Share of the variance of `values` that the groups explain (0 to 1): a correlation with a label."""
    total = float(((values - values.mean()) ** 2).sum())
    if total == 0:
        return 0.0
    counts = np.bincount(groups)
    means = np.bincount(groups, weights=values) / np.maximum(1, counts)
    return float((counts * (means - values.mean()) ** 2).sum() / total)


def wilson(right: int, rows: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927); it stays inside [0, 1] also for few rows."""
    share, square = right / rows, z * z
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = z / (1 + square / rows) * np.sqrt(share * (1 - share) / rows + square / (4 * rows * rows))
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


# -------------------------------------------------------------------------------------------------------------- classes


def codes(values: Iterable[str], names: Sequence[str]) -> Ints:
    """Position of each value in `names`, which holds them all."""
    index = {name: place for place, name in enumerate(names)}
    return np.fromiter((index[value] for value in values), dtype=np.int64)


def confusion(targets: Ints, predictions: Ints, classes: int) -> Ints:
    """Counts [true, predicted]."""
    return np.bincount(targets * classes + predictions, minlength=classes * classes).reshape(classes, classes)


def class_scores(counts: Ints) -> dict[str, Floats]:
    """Precision, recall and F1 of each class; 0 where the denominator is."""
    right, true, predicted = np.diag(counts).astype(np.float64), counts.sum(axis=1), counts.sum(axis=0)
    return {
        "precision": right / np.maximum(1, predicted),
        "recall": right / np.maximum(1, true),
        "f1": 2 * right / np.maximum(1, true + predicted),
    }


def overall(counts: Ints) -> dict[str, float]:
    """Accuracy and macro F1; a class that neither occurs nor is predicted is left out of the mean."""
    present = (counts.sum(axis=0) + counts.sum(axis=1)) > 0
    return {
        "accuracy": float(np.diag(counts).sum() / max(1, counts.sum())),
        "macro_f1": float(class_scores(counts)["f1"][present].mean()),
    }


def chain(counts: Ints) -> Ints:
    """An order of the classes in which those that are confused with each other are neighbours.

    From the class with the most mistakes on, always the one that is confused most with the last; where there is none,
    the one with the most mistakes among the rest.
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


@dataclass(frozen=True)
class Calibration:
    """Bins of equal width over the confidence; only those with rows."""

    confidence: Floats
    accuracy: Floats
    rows: Ints
    error: float
    """Expected calibration error: mean distance of the two, weighted by rows (Naeini et al. 2015)."""


def calibration(score: Floats, right: npt.NDArray[np.bool_], bins: int = 10) -> Calibration:
    place = np.clip((score * bins).astype(np.int64), 0, bins - 1)
    rows = np.bincount(place, minlength=bins)
    full = rows > 0
    said = np.bincount(place, weights=score, minlength=bins)[full] / rows[full]
    true = np.bincount(place, weights=right.astype(np.float64), minlength=bins)[full] / rows[full]
    return Calibration(said, true, rows[full], float((np.abs(said - true) * rows[full]).sum() / len(score)))


# -------------------------------------------------------------------------------------------------------------- numbers


def errors(targets: Floats, predictions: Floats) -> dict[str, float]:
    """RMSE, MAE, R2 and Pearson's correlation; the last two only where the targets vary."""
    off = predictions - targets
    found = {"rmse": float(np.sqrt((off**2).mean())), "mae": float(np.abs(off).mean())}
    spread = float(((targets - targets.mean()) ** 2).mean())
    if spread > 0:
        found["r2"] = 1 - float((off**2).mean()) / spread
    if (correlation := pearson(targets, predictions)) is not None:
        found["pearson"] = correlation
    return found


# ------------------------------------------------------------------------------------------------------------ bootstrap


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


def bootstrap(rows: int, score: Callable[[Ints], Mapping[str, float]], seed: int = 0) -> dict[str, Interval]:
    """95 % percentile intervals (Efron 1979): `score` of row positions drawn with replacement, again and again."""
    draws, random = RESAMPLES if rows <= LARGE else LARGE_RESAMPLES, np.random.default_rng(seed)
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        for name, value in score(random.integers(0, rows, rows)).items():
            found.setdefault(name, []).append(value)
    middle = score(np.arange(rows))
    limits = {name: np.percentile(found[name], (2.5, 97.5)) for name in middle if name in found}
    return {name: Interval(middle[name], float(low), float(high)) for name, (low, high) in limits.items()}


# ---------------------------------------------------------------------------------------------------------------- terms


def distinctive(counts: Ints, most: int = 5) -> list[list[int]]:
    """Per group, the terms that occur in it more often than elsewhere; `counts` is [groups, terms].

    By the log-odds ratio with an informative Dirichlet prior, as a z-score (Monroe et al. 2008, "Fightin' Words"): a
    rare term needs more than one occurrence to be told.
    """
    prior = 0.01 * counts.sum(axis=0) + 1e-3
    total, found = counts.sum(axis=0), []
    for group in counts:
        inside, outside = group + prior, total - group + prior
        odds = np.log(inside / (inside.sum() - inside)) - np.log(outside / (outside.sum() - outside))
        z = odds / np.sqrt(1 / inside + 1 / outside)
        best = np.argsort(-z, kind="stable")[:most]
        found.append([int(term) for term in best if group[term] >= 2 and z[term] > 1])
    return found
