"""Rows on their way through a model: as tokens in windows, as targets, as answers. Plain numpy; no torch, no Ray.

A row is one or more windows. Values of which rows have different numbers lie flat, with a count for each row. So a
batch of rows with one window costs what it would cost without windows, and nothing is padded before the model.
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
"""A model's output for each row: [outputs], or [tokens, outputs] if each token is answered."""

IGNORED = -100
"""A target that no loss and no metric counts; it equals PyTorch's default `ignore_index`."""

OUTSIDE = -2
"""A target: the row belongs to none of the classes, and is never trained on. (-1 is a class that the head lacks.)"""


@dataclass(frozen=True)
class Head:
    """The meaning of a model's outputs. It is made from the training rows, and kept in the token store and artefact."""

    labels: tuple[str, ...] = ()
    """Names of the outputs, in their order."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the task needs to know, as JSON values: the mean of the targets, how windows are pooled, and so on."""


class Window(NamedTuple):
    """A stretch of a row's tokens that the model reads at once."""

    tokens: int
    second: int
    """Position where the second text begins; equal to `tokens` if there is no second text."""


class Encoded(NamedTuple):
    """One row as tokens, window after window."""

    ids: list[int]
    windows: list[Window]
    truncated: bool
    """Whether tokens at the end of the text were left out."""
    spans: list[tuple[int, int]]
    """The characters [start, end) of each token in its text; (0, 0) for special tokens."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths: row `r` has `counts[r]` values, and `values` holds one row after another."""

    values: npt.NDArray[Any]
    counts: Int32s

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: Any) -> "Ragged":
        """The rows given as sequences or arrays; each is flattened."""
        arrays = [np.asarray(row, dtype=dtype).ravel() for row in rows]
        counts = np.fromiter((len(row) for row in arrays), dtype=np.int32, count=len(arrays))
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), counts)

    @classmethod
    def even(cls, matrix: npt.NDArray[Any]) -> "Ragged":
        """The rows of a matrix; a vector has one value for each row."""
        width = 1 if matrix.ndim == 1 else matrix.shape[1]
        return cls(matrix.reshape(-1), np.full(len(matrix), width, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        ends = np.cumsum(self.counts, dtype=np.int64)
        return (self.values[end - count : end] for end, count in zip(ends, self.counts, strict=True))

    def matrix(self, width: int) -> npt.NDArray[Any]:
        """The values as [rows, width], if every row has `width` values."""
        return self.values.reshape(len(self), width)

    def take(self, rows: Ints) -> "Ragged":
        """Some of the rows, in the order given."""
        return Ragged(self.values[spread(self.counts, rows)], self.counts[rows])


def spread(counts: Int32s, rows: Ints) -> Ints:
    """Where the values of `rows` stand, row after row, if all rows lie flat and row `r` has `counts[r]` values."""
    return ranges((np.cumsum(counts, dtype=np.int64) - counts)[rows], counts[rows])


def ranges(starts: Ints, counts: Int32s) -> Ints:
    """For each n the `counts[n]` places from `starts[n]` on, one range after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    places: Ints = np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum(dtype=np.int64))
    return places


@dataclass(frozen=True, eq=False)
class Tokens:
    """Rows without padding. `ids` holds the tokens of all windows, one window after another."""

    ids: Int32s
    lengths: Int32s
    """Tokens of each window."""
    second: Int32s
    """Position in each window where its second text begins (`Window.second`)."""
    windows: Int32s
    """Windows of each row."""
    targets: Floats
    """All rows' targets, one after another. Whole numbers are exact up to 2^24, which is beyond any vocabulary."""
    counts: Int32s
    """Targets of each row."""
    row_ids: npt.NDArray[np.uint64]
    teacher: Floats
    """A teacher's outputs, [rows or tokens, outputs]; with no columns if there is no teacher."""
    unlabelled: npt.NDArray[np.bool_] | None = None
    """Rows that a teacher alone answers: their targets stand in for labels and are not learned. None: there are none.
    """

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
        """The place of each row's first window among all windows."""
        first: Ints = np.cumsum(self.windows, dtype=np.int64) - self.windows
        return first

    @property
    def labelled(self) -> Ragged:
        """The targets by row."""
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
            unlabelled=None if self.unlabelled is None else self.unlabelled[chosen],
        )


def single(
    ids: Int32s,
    lengths: Int32s,
    second: Int32s,
    targets: npt.NDArray[Any],
    row_ids: npt.NDArray[np.uint64],
    teacher: Floats | None = None,
) -> Tokens:
    """Rows with one window and one target each. `teacher`: [rows, outputs], None without a teacher."""
    ones = np.ones(len(lengths), dtype=np.int32)
    nothing = np.empty((len(lengths), 0), dtype=np.float32)
    answers = nothing if teacher is None else teacher
    return Tokens(ids, lengths, second, ones, targets.astype(np.float32), ones, row_ids, answers)


def pack(encoded: Sequence[Encoded]) -> Tokens:
    """Encoded rows as a batch without targets; the row ids are 0, 1, 2 and so on."""
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


def padded(tokens: Tokens, pad_id: int, width: int = 1, rows: int = 0) -> dict[str, npt.NDArray[Any]]:
    """The model's inputs input_ids, attention_mask and token_type_ids, each int64 of [windows, longest window], or of
    `width` columns and `rows` rows where these are more. Added rows repeat the last window: attention over no token at
    all is NaN in some graphs."""
    windows, width = len(tokens.lengths), int(tokens.lengths.max(initial=width))
    columns = np.arange(width)
    mask = columns[None, :] < tokens.lengths[:, None]
    ids = np.full((windows, width), pad_id, dtype=np.int64)
    ids[mask] = tokens.ids
    types = (columns[None, :] >= tokens.second[:, None]) & mask
    inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": types.astype(np.int64)}
    if rows <= windows:
        return inputs
    return {name: np.pad(value, ((0, rows - windows), (0, 0)), mode="edge") for name, value in inputs.items()}


def round_up(count: int, bits: int) -> int:
    """The next number, `count` included, with at most `bits` significant bits: of two, 1, 2, 3, 4, 6, 8, 12, 16."""
    step = 1 << max(0, count.bit_length() - bits)
    return -(-count // step) * step


def batches(lengths: Int32s, order: Ints, most_rows: int, most_tokens: int) -> Iterable[Ints]:
    """Cut `order` into batches of at most `most_rows` rows and `most_tokens` tokens; a longer row is alone in its
    batch.

    `lengths` has the tokens of every row, `order` the indices of the rows to batch.
    """
    start, tokens = 0, 0
    for place, row in enumerate(order):
        tokens += int(lengths[row])
        if place > start and (place - start == most_rows or tokens > most_tokens):
            yield order[start:place]
            start, tokens = place, int(lengths[row])
    if start < len(order):
        yield order[start:]
