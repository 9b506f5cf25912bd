"""The rows of a split with their answers, as `rtrain.runs.predictions` left them; their texts are read on demand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from rtrain.core.errors import UserError, hide
from rtrain.core.run_folder import Run
from rtrain.report.drawing.svg import short

COLUMNS = ("position", "row_id", "source", "line", "tokens", "text", "target", "prediction", "score", "loss")
ID = "id"
"""The column of `data.id`, which a run need not have."""
SPLITS = ("test", "valid")
"""The split that a report prefers comes first."""
Kind = Literal["classes", "numbers", "lists"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AnswerRows:
    """The answers on one split. `target` and `prediction` are strings, float64 or lists, by `kind`."""

    path: Path
    split: str
    kind: Kind
    target: npt.NDArray[Any]
    prediction: npt.NDArray[Any]
    score: Floats
    """Confidence of the answer for classes; NaN where there is none."""
    loss: Floats
    tokens: Ints
    source: Sequence[str]
    line: Ints
    id: Sequence[str]
    """Value of `data.id` of each row; empty where no such column was named."""
    slices: dict[str, list[str]]
    """Value of each row by the name of its column, for every further column of strings."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Rows whose answer is the target itself."""
        pairs = zip(self.target, self.prediction, strict=True)
        return np.fromiter((bool(a == b) for a, b in pairs), dtype=np.bool_, count=len(self))

    def place(self, row: int) -> str:
        """Where a row came from: file, line, and how people call it."""
        called = f" ({short(self.id[row], 40)})" if self.id and self.id[row] else ""
        return f"{self.source[row]}:{self.line[row]}{called}"

    def hardest(self, most: int) -> Ints:
        """Positions of the rows with the largest loss, the largest first."""
        loss = np.where(np.isfinite(self.loss), self.loss, -np.inf)
        return np.argsort(-loss, kind="stable")[:most]

    def texts(self, rows: Sequence[int]) -> list[str]:
        """The texts of some rows; only the parts of the file that hold them are read."""
        found: dict[int, str] = {}
        first, asked = 0, set(rows)
        with pyarrow.parquet.ParquetFile(self.path) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                inside = sorted(row for row in asked if first <= row < first + count)
                if inside:
                    column = file.read_row_group(group, columns=["text"])["text"]
                    found |= {row: column[row - first].as_py() or "" for row in inside}
                first += count
        return [found[row] for row in rows]


def newest(run: Run) -> AnswerRows | None:
    """The answers that a report is about: of the test rows, else of the validation rows; None where there are none."""
    split = next((split for split in SPLITS if run.predictions(split).is_file()), None)
    return None if split is None else read(run, split)


def read(run: Run, split: str) -> AnswerRows | None:
    """The answers on `split`, or None for a file without rows. Raises `UserError` where the file is another thing."""
    path = run.predictions(split)
    try:
        schema = pyarrow.parquet.read_schema(path)
        lacking = [name for name in COLUMNS if name not in schema.names]
        if lacking:
            text = f"{path} lacks the columns {', '.join(lacking)}; remove it, or evaluate the run again"
            raise UserError(text, code="missing_columns")
        table = pyarrow.parquet.read_table(path, columns=[name for name in schema.names if name != "text"])
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); remove it, or evaluate the run again",
            code="unreadable",
        ) from None
    if not table.num_rows:
        return None
    kind = _kind(schema.field("target").type)
    return AnswerRows(
        path=path,
        split=split,
        kind=kind,
        target=_values(table["target"], kind),
        prediction=_values(table["prediction"], kind),
        score=_floats(table["score"]),
        loss=_floats(table["loss"]),
        tokens=table["tokens"].to_numpy().astype(np.int64),
        source=[hide(source) for source in table["source"].to_pylist()],
        line=table["line"].to_numpy(),
        id=table[ID].to_pylist() if ID in schema.names else (),
        slices={
            name: ["" if value is None else value for value in table[name].to_pylist()]
            for name in schema.names
            if name not in (*COLUMNS, ID) and _is_text(schema.field(name).type)
        },
    )


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def _kind(kind: Any) -> Kind:
    if _is_text(kind):
        return "classes"
    return "numbers" if pa.types.is_floating(kind) or pa.types.is_integer(kind) else "lists"


def _values(column: Any, kind: Kind) -> npt.NDArray[Any]:
    if kind == "numbers":
        return _floats(column)
    found = np.empty(len(column), dtype=object)
    found[:] = [("" if kind == "classes" else []) if value is None else value for value in column.to_pylist()]
    return found


def _floats(column: Any) -> Floats:
    """As float64; null is NaN."""
    found: Floats = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return found
