"""Rows that cannot be used: where each comes from, why it is bad, and whether they are too many."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from rtrain.config import Recipe
from rtrain.core.errors import UserError, quoted
from rtrain.data import row_reader

NAME = "quarantine.parquet"
MOST_REASONS = 3
UNSEEN = "its label occurs in no training row; add rows of it"
MOST_LABELS = 5
"""Most such labels that are named together."""
Where = Callable[[int], str]
"""Maps the number of a row of the store in the making to its place, as file:line."""


class Bad(NamedTuple):
    """Bad rows of the store in the making: their numbers, ascending, and the reason of each."""

    rows: npt.NDArray[np.int64]
    reasons: pa.Array

    def plus(self, other: "Bad") -> "Bad":
        """These rows and the other's, ascending."""
        rows = np.concatenate([self.rows, other.rows])
        order = np.argsort(rows, kind="stable")
        return Bad(rows[order], pa.concat_arrays([self.reasons, other.reasons]).take(pa.array(order)))


def refuse_if_too_bad(recipe: Recipe, bad: Bad, total: int, where: Where) -> None:
    """Raise `UserError` if more than the share `data.max_bad_rows` of `total` rows is bad, naming the first five."""
    first = zip(bad.rows[:5], bad.reasons[:5].to_pylist(), strict=True)
    examples = [f"{where(row)}: {reason}" for row, reason in first]
    row_reader.refuse_if_too_bad(len(bad.rows), total, examples, recipe.data)


def unseen(
    rows: npt.NDArray[np.int64],
    from_own_file: npt.NDArray[np.bool_],
    labels: pa.ChunkedArray,
    where: Where,
    training_labels: Sequence[str],
) -> Bad:
    """The rows with a label that training lacks, as bad rows. `training_labels` are the labels that it has.

    `from_own_file` says of every row of the store whether it comes from a validation or test file. There such a label
    is the user's mistake, and raises `UserError`. Elsewhere our own split has put all rows of a rare label aside.
    """
    wrong = rows[from_own_file[rows]]
    if len(wrong):
        listed = "\n  ".join(f"{where(row)}: label {quoted(labels[int(row)].as_py())}" for row in wrong[:5])
        raise UserError(
            f"data.label: {len(wrong)} rows have a label that no training row has:\n  {listed}\n"
            f"Training rows have {list_labels(training_labels)}. Add training rows of it, or correct these labels.",
            code="unknown_labels",
        )
    return Bad(rows, pa.array([UNSEEN] * len(rows), pa.string()))


def list_labels(labels: Sequence[str]) -> str:
    """The first labels, for a person."""
    return ", ".join(map(quoted, labels[:MOST_LABELS])) + (", ..." if labels[MOST_LABELS:] else "")


def locator(source: row_reader.Source, shards: list[str], shard: npt.NDArray[np.uint32], lines: Any) -> Where:
    """The places of rows, from the names of the shards, and the shard number and the line of each row."""
    pieces = [source.pieces[int(name.split("-")[0])].uri.removeprefix("file://") for name in shards]
    return lambda row: f"{pieces[shard[row]]}:{lines[row]}"


def write(folder: Path, bad: Bad, where: Where) -> None:
    """Write `quarantine.parquet` of a store's folder: source, line and reason of each bad row."""
    places = [where(row).rsplit(":", 1) for row in bad.rows]
    table = pa.table(
        {
            "source": pa.array([place for place, _ in places], pa.string()),
            "line": pa.array([int(line) for _, line in places], pa.int64()),
            "reason": bad.reasons,
        }
    )
    pyarrow.parquet.write_table(table, folder / NAME)


def commonest(folder: Path) -> list[dict[str, Any]]:
    """The most frequent reasons of a store's bad rows: `reason`, `rows`, and the `place` of the first, as file:line."""
    if not (folder / NAME).is_file():
        return []
    table = pyarrow.parquet.read_table(folder / NAME)
    counts = sorted(table["reason"].value_counts().to_pylist(), key=lambda one: -one["counts"])
    found = []
    for reason, rows in (one.values() for one in counts[:MOST_REASONS]):
        first = table.slice(table["reason"].index(reason).as_py(), 1).to_pylist()[0]
        found.append({"reason": reason, "rows": rows, "place": f"{first['source']}:{first['line']}"})
    return found
