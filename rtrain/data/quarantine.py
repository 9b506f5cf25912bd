"""Rows that cannot be used: where they come from, why, and whether they are too many."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from rtrain.config import Recipe
from rtrain.data import records
from rtrain.errors import UserError, quoted

Where = Callable[[int], str]
"""Row of the store in the making -> file:line."""


def refuse_if_too_bad(recipe: Recipe, reasons: dict[int, str], total: int, where: Where) -> None:
    examples = [f"{where(row)}: {reason}" for row, reason in sorted(reasons.items())[:5]]
    records.refuse_if_too_bad(len(reasons), total, examples, recipe.data)


def unseen(
    rows: npt.NDArray[np.int64], given: npt.NDArray[np.bool_], labels: list[str], where: Where
) -> dict[int, str]:
    """Reasons of the rows with a label that training lacks. In a validation or test file (`given`, of every row of the
    store) that is the user's mistake; in our own split of a rare label it is not."""
    wrong = rows[given[rows]]
    if len(wrong):
        listed = "\n  ".join(f"{where(row)}: label {quoted(labels[row])}" for row in wrong[:5])
        raise UserError(
            f"data.label: {len(wrong)} rows have a label that no training row has:\n  {listed}\n"
            "Add training rows of it, or correct these labels."
        )
    return {int(row): f"label {quoted(labels[row])} occurs in no training row; add rows of it" for row in rows}


def locator(source: records.Source, shards: list[str], shard: npt.NDArray[np.uint32], lines: Any) -> Where:
    pieces = [source.pieces[int(name.split("-")[0])].uri.removeprefix("file://") for name in shards]
    return lambda row: f"{pieces[shard[row]]}:{lines[row]}"


def write(folder: Path, reasons: dict[int, str], where: Where) -> None:
    rows = sorted(reasons)
    places = [where(row).rsplit(":", 1) for row in rows]
    table = pa.table(
        {
            "source": pa.array([place for place, _ in places], pa.string()),
            "line": pa.array([int(line) for _, line in places], pa.int64()),
            "reason": pa.array([reasons[row] for row in rows], pa.string()),
        }
    )
    pyarrow.parquet.write_table(table, folder / "quarantine.parquet")
