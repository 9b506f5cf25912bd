"""Rows that cannot be used: where they come from, why, and whether they are too many."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from rtrain.config import Recipe
from rtrain.data import records
from rtrain.errors import UserError, quoted

Where = Callable[[int], str]
"""Row of the store in the making -> file:line."""


class Bad(NamedTuple):
    """Rows of the store in the making, ascending, and why each cannot be used."""

    rows: npt.NDArray[np.int64]
    reasons: pa.Array

    def plus(self, other: "Bad") -> "Bad":
        rows = np.concatenate([self.rows, other.rows])
        order = np.argsort(rows, kind="stable")
        return Bad(rows[order], pa.concat_arrays([self.reasons, other.reasons]).take(pa.array(order)))


def refuse_if_too_bad(recipe: Recipe, bad: Bad, total: int, where: Where) -> None:
    first = zip(bad.rows[:5], bad.reasons[:5].to_pylist(), strict=True)
    records.refuse_if_too_bad(len(bad.rows), total, [f"{where(row)}: {reason}" for row, reason in first], recipe.data)


def unseen(rows: npt.NDArray[np.int64], given: npt.NDArray[np.bool_], labels: pa.ChunkedArray, where: Where) -> Bad:
    """The rows with a label that training lacks. In a validation or test file (`given`, of every row of the store) that
    is the user's mistake; in our own split of a rare label it is not."""
    wrong = rows[given[rows]]
    if len(wrong):
        listed = "\n  ".join(f"{where(row)}: label {quoted(labels[int(row)].as_py())}" for row in wrong[:5])
        raise UserError(
            f"data.label: {len(wrong)} rows have a label that no training row has:\n  {listed}\n"
            "Add training rows of it, or correct these labels."
        )
    why = (f"label {quoted(labels[int(row)].as_py())} occurs in no training row; add rows of it" for row in rows)
    return Bad(rows, pa.array(why, pa.string(), size=len(rows)))


def locator(source: records.Source, shards: list[str], shard: npt.NDArray[np.uint32], lines: Any) -> Where:
    pieces = [source.pieces[int(name.split("-")[0])].uri.removeprefix("file://") for name in shards]
    return lambda row: f"{pieces[shard[row]]}:{lines[row]}"


def write(folder: Path, bad: Bad, where: Where) -> None:
    places = [where(row).rsplit(":", 1) for row in bad.rows]
    table = pa.table(
        {
            "source": pa.array([place for place, _ in places], pa.string()),
            "line": pa.array([int(line) for _, line in places], pa.int64()),
            "reason": bad.reasons,
        }
    )
    pyarrow.parquet.write_table(table, folder / "quarantine.parquet")
