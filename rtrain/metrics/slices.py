"""Groups of rows by the values of a column, to score each group."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.metrics.sums import Ints

MIN_ROWS = 20


class SliceRows(NamedTuple):
    """Positions of the rows with one value of a column."""

    value: str
    rows: Ints
    merged_values: tuple[str, ...] = ()
    """The values of a merged group."""


def group_rows(values: Sequence[Hashable], min_rows: int = MIN_ROWS, max_groups: int | None = None) -> list[SliceRows]:
    """The rows of each value, in the order of their first rows; None is the value `(none)`.

    Values with fewer than `min_rows` rows are merged into one group of any size. So are all but the `max_groups` most
    frequent values.
    """
    names = ["(none)" if value is None else str(value) for value in values]
    counts = Counter(names)
    frequent_names = sorted(counts, key=lambda name: (-counts[name], name))[:max_groups]
    small_names = sorted(counts.keys() - {name for name in frequent_names if counts[name] >= min_rows})
    are_all_small = all(counts[name] < min_rows for name in small_names)
    title = (
        f"({len(small_names)} values with fewer than {min_rows} rows)"
        if are_all_small
        else f"(the {len(small_names)} rarest values)"
    )
    # A single small value is not merged: it keeps its name.
    inside = {name: title for name in small_names} if len(small_names) > 1 else {}
    positions_by_name: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions_by_name.setdefault(inside.get(name, name), []).append(position)
    return [
        SliceRows(name, np.array(positions, dtype=np.int64), tuple(small_names) if inside and name == title else ())
        for name, positions in positions_by_name.items()
    ]


def bin_by_quantile(values: npt.ArrayLike, parts: int = 4) -> list[str]:
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
