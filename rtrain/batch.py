"""Rows on their way through a model: as tokens in windows, as targets, as answers. Plain numpy; no torch, no Ray.

A row is one or more windows. Whatever has a varying number of values per row is flat, with a count per row: a batch of
single-window classification rows costs what it would cost without windows, and nothing is padded before the model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Outputs = Sequence[Floats] | Floats
"""A model's output for each row: [outputs], or [tokens, outputs] where each token is answered."""

IGNORED = -100
"""A target that no loss and no metric counts; PyTorch's own `ignore_index`."""

OUTSIDE = -2
"""A target: the row belongs to none of the classes. Never trained on. (-1 is a class that the head has not.)"""


@dataclass(frozen=True)
class Head:
    """What a model's outputs mean; made from the training rows, kept in the token store and in the artefact."""

    labels: tuple[str, ...] = ()
    """Names of the outputs, in their order."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the task needs to know, as JSON: the mean of the targets, how windows are pooled, ..."""


class Window(NamedTuple):
    """A stretch of a row's tokens that the model reads at once."""

    tokens: int
    second: int
    """Positions from here on belong to the second text (`tokens` where there is none)."""


class Encoded(NamedTuple):
    """Tokens of one row, window after window."""

    ids: list[int]
    windows: list[Window]
    truncated: bool
    """Whether tokens at the end were left out."""
    spans: list[tuple[int, int]]
    """Characters [start, end) of each token in the text that it is of; (0, 0) for special tokens."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """`counts[row]` values of each row, one row after another."""

    values: npt.NDArray[Any]
    counts: Int32s

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: Any) -> "Ragged":
        arrays = [np.asarray(row, dtype=dtype).ravel() for row in rows]
        counts = np.fromiter((len(row) for row in arrays), dtype=np.int32, count=len(arrays))
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), counts)

    @classmethod
    def even(cls, matrix: npt.NDArray[Any]) -> "Ragged":
        """Of rows with equally many values; a vector has one for each row."""
        width = 1 if matrix.ndim == 1 else matrix.shape[1]
        return cls(matrix.reshape(-1), np.full(len(matrix), width, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        ends = np.cumsum(self.counts, dtype=np.int64)
        return (self.values[end - count : end] for end, count in zip(ends, self.counts, strict=True))

    def matrix(self, width: int) -> npt.NDArray[Any]:
        """[rows, width]; every row has `width` values."""
        return self.values.reshape(len(self), width)

    def take(self, rows: Ints) -> "Ragged":
        return Ragged(self.values[spread(self.counts, rows)], self.counts[rows])


def spread(counts: Int32s, rows: Ints) -> Ints:
    """Places of the values of `rows`, row after row, where all rows lie flat with `counts` values each."""
    return ranges((np.cumsum(counts, dtype=np.int64) - counts)[rows], counts[rows])


def ranges(starts: Ints, counts: Int32s) -> Ints:
    """`counts[n]` places from `starts[n]` on, one range after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    places: Ints = np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum(dtype=np.int64))
    return places


@dataclass(frozen=True, eq=False)
class Tokens:
    """Rows without padding: `ids` are all windows' tokens one after another, `lengths` says where each ends."""

    ids: Int32s
    lengths: Int32s
    """Tokens of each window."""
    second: Int32s
    """Of each window, where its second text begins."""
    windows: Int32s
    """Windows of each row."""
    targets: Floats
    """All rows' targets, one after another: whole numbers are exact up to 2^24, beyond any vocabulary."""
    counts: Int32s
    """Targets of each row."""
    row_ids: npt.NDArray[np.uint64]
    teacher: Floats
    """A teacher's answers, [rows or tokens, outputs]; no columns where there is no teacher."""

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def lengths_of_rows(self) -> Int32s:
        """Tokens of each row, over all of its windows."""
        if len(self.lengths) == len(self):
            return self.lengths
        return np.add.reduceat(self.lengths, self.first_windows).astype(np.int32)

    @property
    def first_windows(self) -> Ints:
        """Place of each row's first window."""
        first: Ints = np.cumsum(self.windows, dtype=np.int64) - self.windows
        return first

    @property
    def labelled(self) -> Ragged:
        return Ragged(self.targets, self.counts)

    def pick(self, rows: Sequence[int] | Ints) -> "Tokens":
        """Some of the rows, in the order given."""
        chosen = np.asarray(rows, dtype=np.int64)
        windows = spread(self.windows, chosen)
        tokens = spread(self.lengths, windows)
        by_token = len(self.teacher) != len(self)
        return Tokens(
            ids=self.ids[tokens],
            lengths=self.lengths[windows],
            second=self.second[windows],
            windows=self.windows[chosen],
            targets=self.targets[spread(self.counts, chosen)],
            counts=self.counts[chosen],
            row_ids=self.row_ids[chosen],
            teacher=self.teacher[tokens] if by_token else self.teacher[chosen],
        )


def single(
    ids: Int32s,
    lengths: Int32s,
    second: Int32s,
    targets: npt.NDArray[Any],
    row_ids: npt.NDArray[np.uint64],
    teacher: Floats | None = None,
) -> Tokens:
    """Rows of one window and one target each."""
    ones = np.ones(len(lengths), dtype=np.int32)
    nothing = np.empty((len(lengths), 0), dtype=np.float32)
    answers = nothing if teacher is None else teacher
    return Tokens(ids, lengths, second, ones, targets.astype(np.float32), ones, row_ids, answers)


def pack(encoded: Sequence[Encoded]) -> Tokens:
    """Encoded rows as a batch without targets; the row ids are 0, 1, 2, ..."""
    windows = [window for row in encoded for window in row.windows]
    total = sum(len(row.ids) for row in encoded)
    return Tokens(
        ids=np.fromiter((token for row in encoded for token in row.ids), dtype=np.int32, count=total),
        lengths=np.fromiter((window.tokens for window in windows), dtype=np.int32, count=len(windows)),
        second=np.fromiter((window.second for window in windows), dtype=np.int32, count=len(windows)),
        windows=np.fromiter((len(row.windows) for row in encoded), dtype=np.int32, count=len(encoded)),
        targets=np.empty(0, dtype=np.float32),
        counts=np.zeros(len(encoded), dtype=np.int32),
        row_ids=np.arange(len(encoded), dtype=np.uint64),
        teacher=np.empty((len(encoded), 0), dtype=np.float32),
    )


def padded(tokens: Tokens, pad_id: int) -> dict[str, npt.NDArray[Any]]:
    """The model's inputs, [windows, longest window]: input_ids, attention_mask, token_type_ids; all int64."""
    rows, width = len(tokens.lengths), int(tokens.lengths.max(initial=1))
    columns = np.arange(width)
    mask = columns[None, :] < tokens.lengths[:, None]
    ids = np.full((rows, width), pad_id, dtype=np.int64)
    ids[mask] = tokens.ids
    types = (columns[None, :] >= tokens.second[:, None]) & mask
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": types.astype(np.int64)}


def batches(lengths: Int32s, order: Ints, most_rows: int, most_tokens: int) -> Iterable[Ints]:
    """Cut `order` into batches of at most `most_rows` rows and `most_tokens` tokens; a longer row is alone."""
    start, tokens = 0, 0
    for place, row in enumerate(order):
        tokens += int(lengths[row])
        if place > start and (place - start == most_rows or tokens > most_tokens):
            yield order[start:place]
            start, tokens = place, int(lengths[row])
    if start < len(order):
        yield order[start:]
