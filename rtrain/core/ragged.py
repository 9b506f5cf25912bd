"""Batches of rows as ragged arrays: tokens in windows, targets, outputs. Plain numpy; no torch, no Ray.

A row is one or more windows. Values of variable number per row lie flat, with a count for each row. So windows add no
cost to rows of one window, and nothing is padded before the model.
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

IGNORE_INDEX = -100
"""A target that no loss and no metric counts; it equals PyTorch's default `ignore_index`."""

OUT_OF_SCOPE = -2
"""A target: the row belongs to none of the classes, and is never trained on. (-1 is a class that the head lacks.)"""


@dataclass(frozen=True)
class Head:
    """The meaning of a model's outputs. It is made from the training rows, and kept in the token store and artifact."""

    labels: tuple[str, ...] = ()
    """Names of the outputs, in their order."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further values of the task, as JSON: the mean of the targets, the pooling of windows, and so on."""


class TokenWindow(NamedTuple):
    """A part of a row's tokens that the model reads at once."""

    num_tokens: int
    pair_start: int
    """Position where the second text begins; equal to `num_tokens` if there is no second text."""


class EncodedRow(NamedTuple):
    """One row as tokens, window after window."""

    ids: list[int]
    windows: list[TokenWindow]
    is_truncated: bool
    """Whether tokens at the end of the text were left out."""
    spans: list[tuple[int, int]]
    """The characters [start, end) of each token in its text; (0, 0) for special tokens."""


@dataclass(frozen=True, eq=False)
class RaggedArray:
    """Rows of different lengths: row `r` has `counts[r]` values, and `values` holds one row after another."""

    values: npt.NDArray[Any]
    counts: Int32s

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: Any) -> "RaggedArray":
        """The rows given as sequences or arrays; each is flattened."""
        arrays = [np.asarray(row, dtype=dtype).ravel() for row in rows]
        counts = np.fromiter((len(row) for row in arrays), dtype=np.int32, count=len(arrays))
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), counts)

    @classmethod
    def from_matrix(cls, matrix: npt.NDArray[Any]) -> "RaggedArray":
        """The rows of a matrix; a vector has one value for each row."""
        width = 1 if matrix.ndim == 1 else matrix.shape[1]
        return cls(matrix.reshape(-1), np.full(len(matrix), width, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        ends = np.cumsum(self.counts, dtype=np.int64)
        return (self.values[end - count : end] for end, count in zip(ends, self.counts, strict=True))

    def to_matrix(self, width: int) -> npt.NDArray[Any]:
        """Return the values as [rows, width], if every row has `width` values."""
        return self.values.reshape(len(self), width)

    def take(self, rows: Ints) -> "RaggedArray":
        """Some of the rows, in the order given."""
        return RaggedArray(self.values[flat_indices(self.counts, rows)], self.counts[rows])


def flat_indices(counts: Int32s, rows: Ints) -> Ints:
    """Return the indices of the values of `rows` in flat values, where row `r` has `counts[r]`."""
    return expand_ranges((np.cumsum(counts, dtype=np.int64) - counts)[rows], counts[rows])


def expand_ranges(starts: Ints, counts: Int32s) -> Ints:
    """Concatenate the ranges of `counts[n]` indices from `starts[n]` on."""
    ends = np.cumsum(counts, dtype=np.int64)
    indices: Ints = np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum(dtype=np.int64))
    return indices


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Rows without padding. `ids` holds the tokens of all windows, one window after another."""

    ids: Int32s
    window_lengths: Int32s
    """Tokens of each window."""
    pair_start: Int32s
    """Position in each window where its second text begins (`TokenWindow.pair_start`)."""
    windows_per_row: Int32s
    """Windows of each row."""
    targets: Floats
    """All rows' targets, one after another. Whole numbers are exact up to 2^24, which is beyond any vocabulary."""
    targets_per_row: Int32s
    """Targets of each row."""
    row_ids: npt.NDArray[np.uint64]
    teacher_logits: Floats
    """A teacher's outputs, [rows or tokens, outputs]; with no columns if there is no teacher."""
    is_unlabeled: npt.NDArray[np.bool_] | None = None
    """Rows with a teacher's answers alone: their targets are placeholders and not learned. None: no such rows."""
    row_weights: npt.NDArray[np.float64] | None = None
    """Weight of each row in the loss (`data.weight_column`). None: all rows weigh 1."""

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def row_lengths(self) -> Int32s:
        """Tokens of each row, over all of its windows."""
        if len(self.window_lengths) == len(self):
            return self.window_lengths
        return np.add.reduceat(self.window_lengths, self.first_window_indices).astype(np.int32)

    @property
    def first_window_indices(self) -> Ints:
        """The place of each row's first window among all windows."""
        first_indices: Ints = np.cumsum(self.windows_per_row, dtype=np.int64) - self.windows_per_row
        return first_indices

    @property
    def row_targets(self) -> RaggedArray:
        """The targets by row."""
        return RaggedArray(self.targets, self.targets_per_row)

    def take(self, rows: Sequence[int] | Ints) -> "TokenBatch":
        """Some of the rows, in the order given."""
        indices = np.asarray(rows, dtype=np.int64)
        window_indices = flat_indices(self.windows_per_row, indices)
        token_indices = flat_indices(self.window_lengths, window_indices)
        is_token_level = len(self.teacher_logits) != len(self)
        return TokenBatch(
            ids=self.ids[token_indices],
            window_lengths=self.window_lengths[window_indices],
            pair_start=self.pair_start[window_indices],
            windows_per_row=self.windows_per_row[indices],
            targets=self.targets[flat_indices(self.targets_per_row, indices)],
            targets_per_row=self.targets_per_row[indices],
            row_ids=self.row_ids[indices],
            teacher_logits=self.teacher_logits[token_indices] if is_token_level else self.teacher_logits[indices],
            is_unlabeled=None if self.is_unlabeled is None else self.is_unlabeled[indices],
            row_weights=None if self.row_weights is None else self.row_weights[indices],
        )


def single_window_batch(
    ids: Int32s,
    window_lengths: Int32s,
    pair_start: Int32s,
    targets: npt.NDArray[Any],
    row_ids: npt.NDArray[np.uint64],
    teacher_logits: Floats | None = None,
) -> TokenBatch:
    """Rows with one window and one target each. `teacher_logits`: [rows, outputs], None without a teacher."""
    one_per_row = np.ones(len(window_lengths), dtype=np.int32)
    no_logits = np.empty((len(window_lengths), 0), dtype=np.float32)
    logits = no_logits if teacher_logits is None else teacher_logits
    return TokenBatch(
        ids, window_lengths, pair_start, one_per_row, targets.astype(np.float32), one_per_row, row_ids, logits
    )


def collate(encoded: Sequence[EncodedRow]) -> TokenBatch:
    """Encoded rows as a batch without targets; the row ids are 0, 1, 2 and so on."""
    windows = [window for row in encoded for window in row.windows]
    num_tokens = sum(len(row.ids) for row in encoded)
    return TokenBatch(
        ids=np.fromiter((token for row in encoded for token in row.ids), dtype=np.int32, count=num_tokens),
        window_lengths=np.fromiter((window.num_tokens for window in windows), dtype=np.int32, count=len(windows)),
        pair_start=np.fromiter((window.pair_start for window in windows), dtype=np.int32, count=len(windows)),
        windows_per_row=np.fromiter((len(row.windows) for row in encoded), dtype=np.int32, count=len(encoded)),
        targets=np.empty(0, dtype=np.float32),
        targets_per_row=np.zeros(len(encoded), dtype=np.int32),
        row_ids=np.arange(len(encoded), dtype=np.uint64),
        teacher_logits=np.empty((len(encoded), 0), dtype=np.float32),
    )


def pad_batch(tokens: TokenBatch, pad_id: int, min_width: int = 1, min_rows: int = 0) -> dict[str, npt.NDArray[Any]]:
    """The model's inputs input_ids, attention_mask and token_type_ids, each int64 of [windows, longest window], or of
    `min_width` columns and `min_rows` rows where these are more. Added rows repeat the last window: attention over no
    token at all is NaN in some graphs."""
    windows, width = len(tokens.window_lengths), int(tokens.window_lengths.max(initial=min_width))
    column_indices = np.arange(width)
    attention_mask = column_indices[None, :] < tokens.window_lengths[:, None]
    ids = np.full((windows, width), pad_id, dtype=np.int64)
    ids[attention_mask] = tokens.ids
    token_type_mask = (column_indices[None, :] >= tokens.pair_start[:, None]) & attention_mask
    inputs = {
        "input_ids": ids,
        "attention_mask": attention_mask.astype(np.int64),
        "token_type_ids": token_type_mask.astype(np.int64),
    }
    if min_rows <= windows:
        return inputs
    return {name: np.pad(value, ((0, min_rows - windows), (0, 0)), mode="edge") for name, value in inputs.items()}


def round_up(count: int, bits: int) -> int:
    """The next number, `count` included, with at most `bits` significant bits: of two, 1, 2, 3, 4, 6, 8, 12, 16."""
    step = 1 << max(0, count.bit_length() - bits)
    return -(-count // step) * step


def iter_batches(lengths: Int32s, order: Ints, max_rows: int, max_tokens: int) -> Iterable[Ints]:
    """Cut `order` into batches of at most `max_rows` rows and `max_tokens` tokens; a longer row is alone in its batch.

    Args:
        lengths: tokens of every row.
        order: indices of the rows to batch.
    """
    start, num_tokens = 0, 0
    for position, row in enumerate(order):
        num_tokens += int(lengths[row])
        if position > start and (position - start == max_rows or num_tokens > max_tokens):
            yield order[start:position]
            start, num_tokens = position, int(lengths[row])
    if start < len(order):
        yield order[start:]
