"""Rows that cannot be used: where each comes from, why it is bad, and whether they are too many."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from rtrain.config import Recipe
from rtrain.core.errors import UserError, quote_value
from rtrain.data import row_reader

FILE_NAME = "quarantine.parquet"
MAX_REASONS = 3
UNKNOWN_LABEL_REASON = "its label occurs in no training row; add rows of it"
MAX_NAMED_LABELS = 5
"""Most labels named in one message."""
RowLocator = Callable[[int], str]
"""Maps the number of a row in an unfinished store to its location, as file:line."""


class QuarantinedRows(NamedTuple):
    """Bad rows of an unfinished store: their numbers, ascending, and the reason of each."""

    rows: npt.NDArray[np.int64]
    reasons: pa.Array

    def merge(self, other: "QuarantinedRows") -> "QuarantinedRows":
        """These rows and the other's, ascending."""
        rows = np.concatenate([self.rows, other.rows])
        order = np.argsort(rows, kind="stable")
        return QuarantinedRows(rows[order], pa.concat_arrays([self.reasons, other.reasons]).take(pa.array(order)))


def check_bad_row_share(recipe: Recipe, bad: QuarantinedRows, total_rows: int, locate_row: RowLocator) -> None:
    """Raise `UserError` if more than the share `data.max_bad_rows` of `total_rows` rows is bad, naming the first
    five."""
    first = zip(bad.rows[:5], bad.reasons[:5].to_pylist(), strict=True)
    examples = [f"{locate_row(row)}: {reason}" for row, reason in first]
    row_reader.check_bad_row_share(len(bad.rows), total_rows, examples, recipe.data)


def quarantine_unknown_labels(
    rows: npt.NDArray[np.int64],
    from_eval_file: npt.NDArray[np.bool_],
    labels: pa.ChunkedArray,
    locate_row: RowLocator,
    training_labels: Sequence[str],
) -> QuarantinedRows:
    """Quarantine the rows whose label is not in `training_labels`.

    `from_eval_file` marks every row of the store that comes from a validation or test file. Such a label in these files
    is the user's mistake and raises `UserError`. Elsewhere the hash split has moved all rows of a rare label out of
    training.
    """
    eval_rows = rows[from_eval_file[rows]]
    if len(eval_rows):
        listed = "\n  ".join(
            f"{locate_row(row)}: label {quote_value(labels[int(row)].as_py())}" for row in eval_rows[:5]
        )
        raise UserError(
            f"data.label: {len(eval_rows)} rows have a label that no training row has:\n  {listed}\n"
            f"Training rows have {format_labels(training_labels)}. Add training rows of it, or correct these labels.",
            code="unknown_labels",
        )
    return QuarantinedRows(rows, pa.array([UNKNOWN_LABEL_REASON] * len(rows), pa.string()))


def format_labels(labels: Sequence[str]) -> str:
    """The first labels, for a message."""
    return ", ".join(map(quote_value, labels[:MAX_NAMED_LABELS])) + (", ..." if labels[MAX_NAMED_LABELS:] else "")


def make_row_locator(
    source: row_reader.DataSource, shards: list[str], shard_numbers: npt.NDArray[np.uint32], lines: Any
) -> RowLocator:
    """Build the locator from the names of the shards, and the shard number and the line of each row."""
    file_names = [source.files[int(name.split("-")[0])].uri.removeprefix("file://") for name in shards]
    return lambda row: f"{file_names[shard_numbers[row]]}:{lines[row]}"


def write_quarantine(folder: Path, bad: QuarantinedRows, locate_row: RowLocator) -> None:
    """Write `quarantine.parquet` of a store's folder: source, line and reason of each bad row."""
    locations = [locate_row(row).rsplit(":", 1) for row in bad.rows]
    table = pa.table(
        {
            "source": pa.array([source for source, _ in locations], pa.string()),
            "line": pa.array([int(line) for _, line in locations], pa.int64()),
            "reason": bad.reasons,
        }
    )
    pyarrow.parquet.write_table(table, folder / FILE_NAME)


def summarize_reasons(folder: Path) -> list[dict[str, Any]]:
    """The most frequent reasons of a store's bad rows: `reason`, `rows`, and the first row's `location` (file:line)."""
    if not (folder / FILE_NAME).is_file():
        return []
    table = pyarrow.parquet.read_table(folder / FILE_NAME)
    counts = sorted(table["reason"].value_counts().to_pylist(), key=lambda count: -count["counts"])
    summaries = []
    for reason, rows in (count.values() for count in counts[:MAX_REASONS]):
        first = table.slice(table["reason"].index(reason).as_py(), 1).to_pylist()[0]
        summaries.append({"reason": reason, "rows": rows, "location": f"{first['source']}:{first['line']}"})
    return summaries
