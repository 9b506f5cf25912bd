"""Scores per value of a column: where a model is weak, worst first."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.errors import UserError
from rtrain.metrics.additive import Ints

LEAST = 20


class Slice(NamedTuple):
    """The rows of one value of a column; `merged` lists the values of a slice of small ones, and is empty otherwise."""

    value: str
    rows: int
    scores: Mapping[str, float]
    merged: tuple[str, ...] = ()


def by_column(
    values: Sequence[Hashable],
    scores: Callable[[Ints], Mapping[str, float]],
    headline: str,
    larger_is_better: bool = True,
    least: int = LEAST,
) -> list[Slice]:
    """One slice per value, the worst `headline` first; of equals the larger slice, then the name in order.

    `scores` gets the positions of a slice's rows (`Additive.of` does). Values that fewer than `least` rows have are
    too few to be judged one by one: they are merged into one slice, however small that is. None is a value of its
    own, `(none)`.
    """
    names = ["(none)" if value is None else str(value) for value in values]
    counts = Counter(names)
    small = sorted(name for name, count in counts.items() if count < least)
    # A single small value is no merger: it stays under its own name, with its count beside it.
    merged = f"({len(small)} values with fewer than {least} rows)" if len(small) > 1 else None
    where: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        where.setdefault(merged if merged and counts[name] < least else name, []).append(position)
    found = []
    for name, positions in where.items():
        slice_scores = scores(np.array(positions, dtype=np.int64))
        if headline not in slice_scores:
            raise UserError(f"no score {headline!r}; there are {', '.join(slice_scores)}")
        found.append(Slice(name, len(positions), slice_scores, tuple(small) if name == merged else ()))
    sign = 1 if larger_is_better else -1
    return sorted(found, key=lambda item: (sign * item.scores[headline], -item.rows, item.value))


def quantiles(values: npt.ArrayLike, parts: int = 4) -> list[str]:
    """Numbers (lengths, scores) to the names of about equally large ranges, `10 to 24`, for `by_column`.

    Equal values stay together, so that there may be fewer ranges than `parts`; a range names its lowest and highest
    value.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size:
        return []
    inner = np.unique(np.quantile(numbers, np.arange(1, parts) / parts, method="inverted_cdf"))
    part = np.searchsorted(inner, numbers, side="left")
    ends = {int(number): (numbers[part == number].min(), numbers[part == number].max()) for number in np.unique(part)}
    labels = {number: f"{low:g}" if low == high else f"{low:g} to {high:g}" for number, (low, high) in ends.items()}
    return [labels[int(number)] for number in part]
