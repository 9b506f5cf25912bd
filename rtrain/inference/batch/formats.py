"""Output formats: csv, JSON lines and Parquet. Chunks are encoded, then joined to a file."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet

from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.inference.batch.chunks import ChunkRows
from rtrain.inference.batch.columns import OutputSchema, to_arrow, to_json, to_text

Format = Literal["csv", "jsonl", "parquet"]
FORMATS: Mapping[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
GROUP_ROWS = 1 << 16
GROUP_BYTES = 64 << 20
"""Rows, or bytes in memory, of a Parquet row group, whichever is reached first."""

AnswerValues = Sequence[Sequence[Any]]
"""The values of each column of `OutputSchema.answer_types`, in order."""


def detect_format(out: Path) -> Format:
    """Return the format by the file's suffix. Raises `ConfigError` for an unknown suffix."""
    detected = FORMATS.get(out.suffix)
    if detected is None:
        fix = "end the name by .csv, .jsonl or .parquet"
        raise ConfigError([Problem("--out", str(out), "its suffix is not a known format", fix, code="unknown_format")])
    return detected


# ----------------------------------------------------------------------------------------------------------- a chunk


def encode_chunk(
    format: Format, output_schema: OutputSchema, chunk_rows: ChunkRows, answer_values: AnswerValues
) -> bytes:
    """The rows of a chunk
    , without a header. The same rows and answers are always the same bytes."""
    if format == "csv":
        return _encode_csv(_iter_cells(output_schema, chunk_rows, answer_values))
    if format == "jsonl":
        return _encode_jsonl(output_schema, chunk_rows, answer_values)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(_make_table(output_schema, chunk_rows, answer_values), buffer)
    return buffer.getvalue()


def _encode_csv(rows: Iterable[Sequence[str]]) -> bytes:
    buffer = io.StringIO(newline="")
    default_writer = csv.writer(buffer, lineterminator="\n")
    # Python's writer does not quote a carriage return without a newline.
    quoting_writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        (quoting_writer if any("\r" in cell for cell in row) else default_writer).writerow(row)
    return buffer.getvalue().encode("utf-8", "replace")


def _iter_cells(output_schema: OutputSchema, chunk_rows: ChunkRows, answer_values: AnswerValues) -> Iterable[list[str]]:
    if isinstance(chunk_rows.columns, pa.Table):
        input_values = [_column_values(chunk_rows.columns, name) for name in output_schema.input_types]
        for row in zip(*input_values, *answer_values, strict=True):
            yield [to_text(value) for value in row]
        return
    for columns, answer in zip(chunk_rows.columns, zip(*answer_values, strict=True), strict=True):
        yield [to_text(value) for value in (*(columns.get(name) for name in output_schema.input_types), *answer)]


def _encode_jsonl(output_schema: OutputSchema, chunk_rows: ChunkRows, answer_values: AnswerValues) -> bytes:
    """Encode each row with its own input columns, which may differ between rows."""
    rows: Iterable[Mapping[str, Any]]
    if isinstance(chunk_rows.columns, pa.Table):
        names = chunk_rows.columns.column_names
        values = zip(*(_column_values(chunk_rows.columns, name) for name in names), strict=True)
        rows = (dict(zip(names, row, strict=True)) for row in values)
    else:
        rows = chunk_rows.columns
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
                f"column {name!r} has lists or objects with a value that Python cannot hold, e.g. invalid "
                "UTF-8; "
                "write the column as strings, or leave it out",
                code="unreadable",
            ) from None
        return column.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]


def _make_table(output_schema: OutputSchema, chunk_rows: ChunkRows, answer_values: AnswerValues) -> pa.Table:
    input_arrays = [_to_array(chunk_rows.columns, name, kind) for name, kind in output_schema.input_types.items()]
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
