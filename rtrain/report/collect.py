"""The data of a run for all sections of the report, read once from its folder.

Predictions come from the files of `rtrain.runs.predictions`; their texts are read on demand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import UserError, redact, suggest_path
from rtrain.core.ragged import Ints
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact
from rtrain.metrics import scores
from rtrain.report import baselines as report_baselines, summary
from rtrain.report.svg import truncate
from rtrain.tasks import base
from rtrain.tasks.encode import WindowSpec, resolve_window_spec

Event = dict[str, Any]
COLUMNS = ("position", "row_id", "source", "line", "tokens", "text", "target", "prediction", "score", "loss")
ID_COLUMN = "id"
"""The optional column of `data.id`."""
SPLITS = ("test", "valid")
"""Splits of a report, the preferred one first."""
ValueKind = Literal["classes", "numbers", "lists"]


@dataclass(frozen=True, eq=False)
class AnswerRows:
    """Predictions of one split. `target` and `prediction` are strings, float64 or lists, by `kind`."""

    path: Path
    split: str
    kind: ValueKind
    target: npt.NDArray[Any]
    prediction: npt.NDArray[Any]
    score: npt.NDArray[np.float64]
    """Confidence of the prediction for classes; else NaN."""
    loss: npt.NDArray[np.float64]
    tokens: Ints
    source: Sequence[str]
    line: Ints
    ids: Sequence[str]
    """Value of `data.id` of each row; empty without that setting."""
    slices: dict[str, list[str]]
    """Values by column name, for every further string column."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def is_correct(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows whose prediction equals the target."""
        pairs = zip(self.target, self.prediction, strict=True)
        return np.fromiter((bool(a == b) for a, b in pairs), dtype=np.bool_, count=len(self))

    def format_location(self, row: int) -> str:
        id_text = f" ({truncate(self.ids[row], 40)})" if self.ids and self.ids[row] else ""
        return f"{self.source[row]}:{self.line[row]}{id_text}"

    def hardest_rows(self, count: int) -> Ints:
        """Positions of the rows with the largest loss, the largest first."""
        loss = np.where(np.isfinite(self.loss), self.loss, -np.inf)
        return np.argsort(-loss, kind="stable")[:count]

    def read_texts(self, rows: Sequence[int]) -> list[str]:
        """Read the texts of some rows; only their row groups are read."""
        texts: dict[int, str] = {}
        first_row, requested_rows = 0, set(rows)
        with pyarrow.parquet.ParquetFile(self.path) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                group_rows = sorted(row for row in requested_rows if first_row <= row < first_row + count)
                if group_rows:
                    column = file.read_row_group(group, columns=["text"])["text"]
                    texts |= {row: column[row - first_row].as_py() or "" for row in group_rows}
                first_row += count
        return [texts[row] for row in rows]


@dataclass(frozen=True)
class RunData:
    """Data of a run. Missing files are None or empty."""

    run: Run
    config: Config
    events: list[Event]
    summary: dict[str, Any]
    store: Store | None
    artifact: dict[str, Any] | None
    """artifact.json of a finished run."""
    answers: AnswerRows | None
    scores: dict[str, Any] | None
    """scores-<split>.json of the rows of `answers` (`rtrain.metrics.scores`)."""
    validation_scores: dict[str, Any] | None
    """scores-valid.json, if present."""
    baselines: dict[str, Any] | None
    """baselines.json (`rtrain.report.baselines`)."""

    @property
    def folder(self) -> Path:
        return self.run.folder

    def events_of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def created_event(self) -> Event:
        return next(iter(self.events_of_kind("created")), {})

    @property
    def attempts(self) -> list[Event]:
        return self.events_of_kind("started")

    @property
    def output(self) -> str:
        return base.get_task(self.config.recipe.task).output

    @property
    def reading(self) -> WindowSpec:
        return resolve_window_spec(base.get_task(self.config.recipe.task), self.config.recipe.data)

    def class_codes(self) -> Ints | None:
        """Label number of each training row [rows]; None unless texts have a single label."""
        if self.store is None or self.output != "classes":
            return None
        return self.store.targets("train").values.astype(np.int64)

    def steps_per_epoch(self) -> int | None:
        if self.store is None:
            return None
        return max(1, -(-self.store.num_rows("train") // self.config.recipe.global_batch_size))


def read_run_data(run: Run) -> RunData:
    """Read a run's folder. Raises `UserError` for a folder without a run."""
    if not run.exists:
        fix = suggest_path(run.folder) or "name the folder that --out named"
        raise UserError(f"{run} holds no run (no {run.config.name}); {fix}", code="not_a_run")
    config = configuration.load_config(str(run.config))
    answers = read_report_answers(run)
    return RunData(
        run=run,
        config=config,
        events=run.events(),
        summary=summary.summarize(run),
        store=None if run.token_store is None else Store(run.token_store),
        artifact=artifact.read_artifact_json(run.artifact) if run.is_finished else None,
        answers=answers,
        scores=scores.read_scores(run.scores(answers.split)) if answers is not None else None,
        validation_scores=scores.read_scores(run.scores("valid")),
        baselines=report_baselines.read_baselines(run),
    )


def read_report_answers(run: Run) -> AnswerRows | None:
    """Read the predictions for the report: the test rows, else the validation rows; None without a file."""
    split = next((split for split in SPLITS if run.predictions(split).is_file()), None)
    return None if split is None else read_answers(run, split)


def read_answers(run: Run, split: str) -> AnswerRows | None:
    """Read the predictions of `split`; None for a file without rows. Raises `UserError` for an invalid file."""
    path = run.predictions(split)
    try:
        schema = pyarrow.parquet.read_schema(path)
        missing_columns = [name for name in COLUMNS if name not in schema.names]
        if missing_columns:
            text = f"{path} lacks the columns {', '.join(missing_columns)}; remove it, or evaluate the run again"
            raise UserError(text, code="missing_columns")
        table = pyarrow.parquet.read_table(path, columns=[name for name in schema.names if name != "text"])
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); remove it, or evaluate the run again",
            code="unreadable",
        ) from None
    if not table.num_rows:
        return None
    kind = _value_kind(schema.field("target").type)
    return AnswerRows(
        path=path,
        split=split,
        kind=kind,
        target=_to_values(table["target"], kind),
        prediction=_to_values(table["prediction"], kind),
        score=_to_floats(table["score"]),
        loss=_to_floats(table["loss"]),
        tokens=table["tokens"].to_numpy().astype(np.int64),
        source=[redact(source) for source in table["source"].to_pylist()],
        line=table["line"].to_numpy(),
        ids=table[ID_COLUMN].to_pylist() if ID_COLUMN in schema.names else (),
        slices={
            name: ["" if value is None else value for value in table[name].to_pylist()]
            for name in schema.names
            if name not in (*COLUMNS, ID_COLUMN) and _is_text(schema.field(name).type)
        },
    )


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def _value_kind(kind: Any) -> ValueKind:
    if _is_text(kind):
        return "classes"
    return "numbers" if pa.types.is_floating(kind) or pa.types.is_integer(kind) else "lists"


def _to_values(column: Any, kind: ValueKind) -> npt.NDArray[Any]:
    if kind == "numbers":
        return _to_floats(column)
    values = np.empty(len(column), dtype=object)
    values[:] = [("" if kind == "classes" else []) if value is None else value for value in column.to_pylist()]
    return values


def _to_floats(column: Any) -> npt.NDArray[np.float64]:
    """Convert to float64; null becomes NaN."""
    floats: npt.NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return floats
