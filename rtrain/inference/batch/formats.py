"""Output formats: csv, JSON lines and Parquet. Chunks are encoded, then joined to a file.

The columns are the input columns unchanged, the prediction columns, and `reason`. A prediction column with the name of
an input column is called `NAME (answer)`. The Arrow types of Arrow and Parquet files are kept, csv columns are strings,
and a column of JSON lines has the common type of its values. Values of several types, and objects, are strings in
Parquet; csv has lists as JSON too.
"""

import csv
import functools
import io
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.parquet

from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import Head
from rtrain.data import row_reader
from rtrain.data.readers import tabular
from rtrain.data.readers.tabular import replace_surrogates, to_string
from rtrain.data.sources import SourceFile
from rtrain.metrics.classes import iter_heads
from rtrain.tasks.base import AnswerColumn, Task

Format = Literal["csv", "jsonl", "parquet"]
FORMATS: Mapping[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
GROUP_ROWS = 1 << 16
GROUP_BYTES = 64 << 20
"""Rows, or bytes in memory, of a Parquet row group, whichever is reached first."""
InputColumns: TypeAlias = Sequence[Mapping[str, Any]] | pa.Table
"""Columns by row, empty for an unreadable row; or an Arrow table with the types of an Arrow or Parquet file."""
AnswerValues = Sequence[Sequence[Any]]
"""The values of each column of `OutputSchema.answer_types`, in order."""
REASON_COLUMN = AnswerColumn("reason", str, lambda reason: reason)
"""Why a row has no prediction; empty for predicted rows. The column always exists."""
_SCALAR_TYPES = {str: pa.string(), float: pa.float64(), int: pa.int64(), bool: pa.bool_(), object: pa.string()}
_STRING_LIST = pa.list_(pa.string())
_LIST_COLUMNS = {
    "tokens": _STRING_LIST,
    "tags": _STRING_LIST,
    "answers": pa.list_(pa.struct([("text", pa.string()), ("start", pa.int64())])),
}
"""Columns of CoNLL and SQuAD files with other types than string."""
MAX_EXACT_INTEGER = 2**53
"""Floats hold every integer up to this."""
MAX_DEPTH = 8
_LARGE_INTEGER = pa.dictionary(pa.int64(), pa.int64())
"""Marks JSON integers beyond `MAX_EXACT_INTEGER`, e.g. ids: with floats they become strings, otherwise int64."""


@dataclass(frozen=True)
class OutputSchema:
    """The output columns in order: Arrow type by name."""

    input_types: dict[str, pa.DataType]
    """Columns of the input."""
    answer_types: dict[str, pa.DataType]
    """Columns of the predictions, then the reason."""
    renamed_columns: dict[str, str]
    """New names of prediction columns whose names the input uses."""

    @property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema(list(zip(self.names, (*self.input_types.values(), *self.answer_types.values()), strict=True)))

    @property
    def names(self) -> list[str]:
        """Names of the columns, valid in Arrow and unique."""
        unique_names: list[str] = []
        for name in (*self.input_types, *self.answer_types):
            printable_name, number = replace_surrogates(name), 1
            while (unique_name := printable_name if number == 1 else f"{printable_name} ({number})") in unique_names:
                number += 1
            unique_names.append(unique_name)
        return unique_names


def build_output_schema(input_types: Mapping[str, pa.DataType], answer_columns: Sequence[AnswerColumn]) -> OutputSchema:
    """Return the input columns, followed by `answer_columns` and the reason."""
    used_names, answer_types, renamed_columns = set(input_types), {}, {}
    for column in (*answer_columns, REASON_COLUMN):
        name, number = column.name, 1
        while name in used_names:
            name = f"{column.name} (answer{f' {number}' if number > 1 else ''})"
            number += 1
        if name != column.name:
            renamed_columns[column.name] = name
        used_names.add(name)
        answer_types[name] = arrow_type(column.kind)
    return OutputSchema(dict(input_types), answer_types, renamed_columns)


def make_score_columns(task: Task, head: Head) -> list[AnswerColumn]:
    """Return a column for the score of each label; `scores_by_column` gives the values. Raises `ConfigError` for a task
    without label scores."""
    if task.output not in ("classes", "labels", "heads"):
        reason = f"predictions of the task {task.name} have no score per label"
        problem = Problem("--scores", None, reason, "leave it out: each prediction has a score", code="no_label_scores")
        raise ConfigError([problem])
    head_labels = (
        [(name, label) for name, value, _ in iter_heads(head) for label in value] if task.output == "heads" else []
    )
    names = [_score_column_name(name, label) for name, label in head_labels or (("", label) for label in head.labels)]
    return [AnswerColumn(name, float, operator.itemgetter(name)) for name in names]


def scores_by_column(answer: Any) -> dict[str, float]:
    """Return the values of `make_score_columns` from a prediction with all labels."""
    entries_by_head = answer.items() if isinstance(answer, dict) else (("", answer),)
    return {
        _score_column_name(head, entry["label"]): entry["score"]
        for head, entries in entries_by_head
        for entry in entries
    }


def _score_column_name(head: str, label: str) -> str:
    return f"{head} score {label}".strip()


def detect_format(out: Path) -> Format:
    """Return the format by the file's suffix. Raises `ConfigError` for an unknown suffix."""
    detected = FORMATS.get(out.suffix)
    if detected is None:
        fix = "end the name by .csv, .jsonl or .parquet"
        raise ConfigError([Problem("--out", str(out), "its suffix is not a known format", fix, code="unknown_format")])
    return detected


# ----------------------------------------------------------------------------------------------------------- a chunk


def encode_chunk(
    format: Format, output_schema: OutputSchema, columns: InputColumns, answer_values: AnswerValues
) -> bytes:
    """Encode the rows of a chunk without a header. Equal rows and answers give equal bytes."""
    if format == "csv":
        return _encode_csv(_iter_cells(output_schema, columns, answer_values))
    if format == "jsonl":
        return _encode_jsonl(output_schema, columns, answer_values)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(_make_table(output_schema, columns, answer_values), buffer)
    return buffer.getvalue()


def _encode_csv(rows: Iterable[Sequence[str]]) -> bytes:
    buffer = io.StringIO(newline="")
    default_writer = csv.writer(buffer, lineterminator="\n")
    # Python's writer does not quote a carriage return without a newline.
    quoting_writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        (quoting_writer if any("\r" in cell for cell in row) else default_writer).writerow(row)
    return buffer.getvalue().encode("utf-8", "replace")


def _iter_cells(output_schema: OutputSchema, columns: InputColumns, answer_values: AnswerValues) -> Iterable[list[str]]:
    if isinstance(columns, pa.Table):
        input_values = [_column_values(columns, name) for name in output_schema.input_types]
        for row in zip(*input_values, *answer_values, strict=True):
            yield [to_text(value) for value in row]
        return
    for row_columns, answer in zip(columns, zip(*answer_values, strict=True), strict=True):
        yield [to_text(value) for value in (*(row_columns.get(name) for name in output_schema.input_types), *answer)]


def _encode_jsonl(output_schema: OutputSchema, columns: InputColumns, answer_values: AnswerValues) -> bytes:
    """Encode each row with its own input columns, which may differ between rows."""
    rows: Iterable[Mapping[str, Any]]
    if isinstance(columns, pa.Table):
        names = columns.column_names
        values = zip(*(_column_values(columns, name) for name in names), strict=True)
        rows = (dict(zip(names, row, strict=True)) for row in values)
    else:
        rows = columns
    lines = []
    for row, answer in zip(rows, zip(*answer_values, strict=True), strict=True):
        lines.append(to_json({**row, **dict(zip(output_schema.answer_types, answer, strict=True))}) + "\n")
    return "".join(lines).encode("utf-8", "replace")


def _column_values(table: pa.Table, name: str) -> list[Any]:
    """Return a column's values; as strings if Python has no such type, e.g. nanosecond times."""
    if name not in table.column_names:
        return [None] * table.num_rows
    column = table[name]
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            raw = column.cast(pa.large_binary()).to_pylist()
            return [None if value is None else value.decode("utf-8", "replace") for value in raw]
        if pa.types.is_nested(column.type):
            raise UserError(
                f"column {name!r} has lists or objects with a value that Python cannot hold, e.g. invalid UTF-8; write "
                "the column as strings, or leave it out",
                code="unreadable",
            ) from None
        return column.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]


def _make_table(output_schema: OutputSchema, columns: InputColumns, answer_values: AnswerValues) -> pa.Table:
    input_arrays = [_to_array(columns, name, kind) for name, kind in output_schema.input_types.items()]
    answers = [
        to_arrow(values, kind) for values, kind in zip(answer_values, output_schema.answer_types.values(), strict=True)
    ]
    return pa.Table.from_arrays([*input_arrays, *answers], schema=output_schema.arrow_schema)


def _to_array(columns: Any, name: str, kind: pa.DataType) -> Any:
    if not isinstance(columns, pa.Table):
        return to_arrow([row.get(name) for row in columns], kind)
    if name not in columns.column_names:
        return pa.nulls(columns.num_rows, kind)
    values = columns[name]
    # Files may have a column in several types: then it is a string column.
    return values if values.type == kind else to_arrow(_column_values(columns, name), kind)


# ------------------------------------------------------------------------------------------------------------ the file


def join_chunks(format: Format, output_schema: OutputSchema, chunk_paths: Iterable[Path], file: IO[bytes]) -> None:
    """Write the output file from its chunk files, in order."""
    if format == "parquet":
        _join_tables(output_schema, chunk_paths, file)
        return
    if format == "csv":
        file.write(_encode_csv([[*output_schema.input_types, *output_schema.answer_types]]))
    for path in chunk_paths:
        file.write(path.read_bytes())


def _join_tables(output_schema: OutputSchema, chunk_paths: Iterable[Path], file: IO[bytes]) -> None:
    group: list[pa.Table] = []
    with pyarrow.parquet.ParquetWriter(file, output_schema.arrow_schema) as writer:
        for path in chunk_paths:
            group.append(pyarrow.parquet.ParquetFile(path).read())
            is_full = sum(table.num_rows for table in group) >= GROUP_ROWS
            if is_full or sum(table.nbytes for table in group) >= GROUP_BYTES:
                writer.write_table(pa.concat_tables(group))
                group = []
        if group:
            writer.write_table(pa.concat_tables(group))


def arrow_type(kind: Any) -> pa.DataType:
    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, arrow_type(inner)) for name, inner in kind.items()])
    return _SCALAR_TYPES[kind]


# -------------------------------------------------------------------------------------------------- types of the input


def file_column_types(source_file: SourceFile) -> dict[str, pa.DataType]:
    format_columns = tabular.FIXED_COLUMNS.get(source_file.format, ())
    return {name: _LIST_COLUMNS.get(name, pa.string()) for name in format_columns} or dict.fromkeys(
        row_reader.read_columns(source_file), pa.string()
    )


def json_type(value: Any, depth: int = 0) -> pa.DataType:
    """Return the type of a JSON value; lists nested deeper than `MAX_DEPTH` are strings."""
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if abs(value) > MAX_EXACT_INTEGER:
            return _LARGE_INTEGER if -(2**63) <= value < 2**63 else pa.string()
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, list) and depth < MAX_DEPTH:
        return pa.list_(functools.reduce(common_type, (json_type(inner, depth + 1) for inner in value), pa.null()))
    return pa.null() if value is None else pa.string()


def common_type(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """Return the type that holds the values of both; string if no other does."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(common_type(first.value_type, second.value_type))
    if {first, second} == {pa.int64(), _LARGE_INTEGER}:
        return _LARGE_INTEGER
    if pa.types.is_integer(first) and pa.types.is_integer(second) and pa.uint64() not in (first, second):
        return pa.int64()
    if pa.types.is_floating(first) and pa.types.is_floating(second):
        return pa.float64()
    return pa.float64() if {first, second} == {pa.int64(), pa.float64()} else pa.string()


def concrete_type(column_type: pa.DataType) -> pa.DataType:
    """Replace the null type by string, and the marker of large integers by int64."""
    if column_type == _LARGE_INTEGER:
        return pa.int64()
    if pa.types.is_list(column_type):
        return pa.list_(concrete_type(column_type.value_type))
    return pa.string() if pa.types.is_null(column_type) else column_type


# -------------------------------------------------------------------------------------------------------------- values


def to_text(value: Any) -> str:
    """Format a value for csv or a string column: empty for null, JSON for lists and objects."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return to_json(value) if isinstance(value, list | dict) else to_string(value)


def to_json(value: Any) -> str:
    """Format JSON with null for NaN and infinity at any depth: JSON has neither. Arrow files often use NaN for a
    missing value; Python's parser accepts both, and 1e999."""
    dump = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False, default=to_string)
    try:
        return dump(value)
    except ValueError:
        return dump(_replace_non_finite(value))


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):  # an Arrow map is a list of pairs
        return [_replace_non_finite(inner) for inner in value]
    return {name: _replace_non_finite(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def to_arrow(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array. Characters that are invalid in Unicode become question marks."""
    values = [_to_column_value(kind, value) for value in values]
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_replace_invalid_unicode(value) for value in values], kind)


def _to_column_value(kind: pa.DataType, value: Any) -> Any:
    """Convert a value to text if the column is a string column."""
    if pa.types.is_string(kind):
        return value if value is None or isinstance(value, str) else to_text(value)
    if pa.types.is_list(kind) and value is not None:
        return [_to_column_value(kind.value_type, inner) for inner in value]
    return value


def _replace_invalid_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_replace_invalid_unicode(inner) for inner in value]
    return (
        {name: _replace_invalid_unicode(inner) for name, inner in value.items()} if isinstance(value, dict) else value
    )
