"""Columns of all rows of a token store, for its commit. They stay in Arrow and numpy, since a Python string costs 60
bytes more per row."""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rtrain.core.ragged import RaggedArray

Mask = npt.NDArray[np.bool_]
BLOCK = 8192
"""Labels that are turned into Python strings at a time."""


class LabelCounts(Mapping[str, int]):
    """How often each label of a column occurs; labels come in the order of their first occurrence."""

    def __init__(self, labels: pa.ChunkedArray):
        counted = labels.cast(pa.large_string()).value_counts()  # large: all labels together may be over 2 GB
        self._labels, self._counts = counted.field("values"), counted.field("counts").to_numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[str]:
        for begin in range(0, len(self), BLOCK):
            yield from self._labels.slice(begin, BLOCK).to_pylist()

    def __getitem__(self, label: str) -> int:
        index = self._labels.index(label).as_py()
        if index < 0:
            raise KeyError(label)
        return int(self._counts[index])

    def items(self) -> ItemsView[str, int]:
        return _Items(self)

    def iter_items(self) -> Iterator[tuple[str, int]]:
        return zip(self, map(int, self._counts), strict=True)


class _Items(ItemsView[str, int]):
    """Items in the order of the labels. The default would search each label, at a cost of the square of their
    number."""

    _mapping: LabelCounts

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return self._mapping.iter_items()


def filter_column(column: pa.ChunkedArray, rows: Mask) -> pa.ChunkedArray:
    """The column's values at the marked rows. It filters chunk by chunk, since `take` would join all chunks into one,
    which can hold at most 2 GB."""
    return column.filter(pa.array(rows))


def to_ragged(column: pa.ChunkedArray) -> RaggedArray:
    """A shard's column of lists."""
    array = column.combine_chunks()
    ends = array.offsets.to_numpy()
    return RaggedArray(array.values.to_numpy(), np.diff(ends))


def concat_ragged(parts: Sequence[RaggedArray]) -> RaggedArray:
    """The rows of all parts, one after another; values are float32."""
    values = [np.empty(0, dtype=np.float32), *(part.values for part in parts)]
    return RaggedArray(
        np.concatenate(values), np.concatenate([np.empty(0, dtype=np.int32), *(part.counts for part in parts)])
    )


def encode_names(names: Sequence[str], numbers: npt.NDArray[np.integer[Any]]) -> pa.DictionaryArray:
    """The column of `names[number]` for each number; its dictionary holds the names that occur, each once."""
    unique_names = list(dict.fromkeys(names))
    number_by_name = {name: number for number, name in enumerate(unique_names)}
    used_numbers, codes = np.unique(
        np.array([number_by_name[name] for name in names], dtype=np.int32)[numbers], return_inverse=True
    )
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32)), pa.array([unique_names[number] for number in used_numbers], pa.string())
    )


ID_STEP = np.uint64(0x9E3779B97F4A7C15)
"""Between the ids of two equal rows. It is odd, so that the map of occurrence numbers is one to one; the content hash
is already uniform."""


def assign_row_ids(content: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """64-bit row ids from content hashes. Equal rows get distinct ids by their occurrence number, in source order."""
    order = np.argsort(content, kind="stable")
    ordered = content[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.concatenate([starts, [len(ordered)]]))
    occurrence = np.empty(len(content), dtype=np.uint64)
    occurrence[order] = np.arange(len(ordered), dtype=np.uint64) - np.repeat(starts, counts).astype(np.uint64)
    return content + occurrence * ID_STEP


def find_first_occurrences(row_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """For each of these rows, the id of the first row with the same texts and label: undoes the count of
    `assign_row_ids`.

    If an occurrence in between is in another split, as with a split column, later occurrences count as other rows.
    """
    ids = np.sort(row_ids)
    previous_ids = ids - ID_STEP
    positions = np.minimum(np.searchsorted(ids, previous_ids), max(0, len(ids) - 1))
    first = np.where(ids[positions] == previous_ids, positions, np.arange(len(ids)))
    while not np.array_equal(first[first], first):  # each round doubles the distance: a thousand equal rows take ten
        first = first[first]
    first_ids: npt.NDArray[np.uint64] = ids[first][np.searchsorted(ids, row_ids)]
    return first_ids
