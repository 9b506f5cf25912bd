"""Groups of rows by the values of a column, to score each by itself."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.metrics.sums import Ints

LEAST = 20


class Group(NamedTuple):
    """Where the rows of one value of a column are."""

    value: str
    rows: Ints
    merged: tuple[str, ...] = ()
    """The values of a group of small ones."""


def groups(values: Sequence[Hashable], least: int = LEAST, most: int | None = None) -> list[Group]:
    """The rows of each value, in the order of their first rows; None is a value of its own, `(none)`.

    Values that fewer than `least` rows have are too few to be judged one by one: they are merged into one group,
    however small that is. So are all but the `most` most frequent values.
    """
    names = ["(none)" if value is None else str(value) for value in values]
    counts = Counter(names)
    often = sorted(counts, key=lambda name: (-counts[name], name))[:most]
    small = sorted(counts.keys() - {name for name in often if counts[name] >= least})
    rare = all(counts[name] < least for name in small)
    title = f"({len(small)} values with fewer than {least} rows)" if rare else f"(the {len(small)} rarest values)"
    # A single small value is no merger: it stays under its own name, with its count beside it.
    inside = {name: title for name in small} if len(small) > 1 else {}
    where: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        where.setdefault(inside.get(name, name), []).append(position)
    return [
        Group(name, np.array(positions, dtype=np.int64), tuple(small) if inside and name == title else ())
        for name, positions in where.items()
    ]


def quantiles(values: npt.ArrayLike, parts: int = 4) -> list[str]:
    """Numbers (lengths, scores) to the names of about equally large ranges, `10 to 24`,.

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
