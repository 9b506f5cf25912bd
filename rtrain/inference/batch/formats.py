"""Rows with their answers, as bytes of a file: csv, JSON lines or Parquet. A file is joined from portions' bytes."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet

from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.inference.batch.chunks import Chunk
from rtrain.inference.batch.columns import Layout, array, as_json, text

Format = Literal["csv", "jsonl", "parquet"]
FORMATS: Mapping[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
GROUP_ROWS = 1 << 16
GROUP_BYTES = 64 << 20
"""Rows, or bytes in memory, of a row group of a Parquet file: whichever is reached first."""

Added = Sequence[Sequence[Any]]
"""The values of each column of `Layout.added`, in its order."""


def format_of(out: Path) -> Format:
    """The format that a file's name says. Raises `ConfigError` for another name."""
    found = FORMATS.get(out.suffix)
    if found is None:
        fix = "end the name by .csv, .jsonl or .parquet"
        raise ConfigError([Problem("--out", str(out), "its name does not tell its format", fix, code="unknown_format")])
    return found


# ----------------------------------------------------------------------------------------------------------- a portion


def encode(format: Format, layout: Layout, chunk: Chunk, added: Added) -> bytes:
    """The rows of a portion, without a header. The same rows and answers are always the same bytes."""
    if format == "csv":
        return _csv(_cells(layout, chunk, added))
    if format == "jsonl":
        return _jsonl(layout, chunk, added)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(_table(layout, chunk, added), buffer)
    return buffer.getvalue()


def _csv(rows: Iterable[Sequence[str]]) -> bytes:
    buffer = io.StringIO(newline="")
    plain = csv.writer(buffer, lineterminator="\n")
    # Python's writer quotes the line ends that it writes itself, and no carriage return without a newline.
    quoted = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        (quoted if any("\r" in cell for cell in row) else plain).writerow(row)
    return buffer.getvalue().encode("utf-8", "replace")


def _cells(layout: Layout, chunk: Chunk, added: Added) -> Iterable[list[str]]:
    if isinstance(chunk.columns, pa.Table):
        given = [_texts(chunk.columns, name) for name in layout.given]
        for row in zip(*given, *added, strict=True):
            yield [text(value) for value in row]
        return
    for columns, answer in zip(chunk.columns, zip(*added, strict=True), strict=True):
        yield [text(value) for value in (*(columns.get(name) for name in layout.given), *answer)]


def _jsonl(layout: Layout, chunk: Chunk, added: Added) -> bytes:
    """A row has the columns that it has in the input, which need not be those of all rows."""
    rows: Iterable[Mapping[str, Any]]
    if isinstance(chunk.columns, pa.Table):
        names = chunk.columns.column_names
        values = zip(*(_texts(chunk.columns, name) for name in names), strict=True)
        rows = (dict(zip(names, row, strict=True)) for row in values)
    else:
        rows = chunk.columns
    lines = []
    for row, answer in zip(rows, zip(*added, strict=True), strict=True):
        lines.append(as_json({**row, **dict(zip(layout.added, answer, strict=True))}) + "\n")
    return "".join(lines).encode("utf-8", "replace")


def _texts(table: pa.Table, name: str) -> list[Any]:
    """A column's values; as texts where Python has no such thing, such as times to a nanosecond."""
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
                f"column {name!r} has lists or objects with a value that Python cannot hold, such as a text that is no "
                "UTF-8; write the column as texts, or leave it out",
                code="unreadable",
            ) from None
        return column.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]


def _table(layout: Layout, chunk: Chunk, added: Added) -> pa.Table:
    given = [_column(chunk.columns, name, kind) for name, kind in layout.given.items()]
    answers = [array(values, kind) for values, kind in zip(added, layout.added.values(), strict=True)]
    return pa.Table.from_arrays([*given, *answers], schema=layout.schema)


def _column(columns: Any, name: str, kind: pa.DataType) -> Any:
    if not isinstance(columns, pa.Table):
        return array([row.get(name) for row in columns], kind)
    if name not in columns.column_names:
        return pa.nulls(columns.num_rows, kind)
    own = columns[name]
    # Files of one address may have a column in several types: then it is one of texts.
    return own if own.type == kind else array(_texts(columns, name), kind)


# ------------------------------------------------------------------------------------------------------------ the file


def join(format: Format, layout: Layout, portions: Iterable[Path], file: IO[bytes]) -> None:
    """Write the whole file from the files of its portions, in order."""
    if format == "parquet":
        _join_tables(layout, portions, file)
        return
    if format == "csv":
        file.write(_csv([[*layout.given, *layout.added]]))
    for path in portions:
        file.write(path.read_bytes())


def _join_tables(layout: Layout, portions: Iterable[Path], file: IO[bytes]) -> None:
    group: list[pa.Table] = []
    with pyarrow.parquet.ParquetWriter(file, layout.schema) as writer:
        for path in portions:
            group.append(pyarrow.parquet.ParquetFile(path).read())
            full = sum(table.num_rows for table in group) >= GROUP_ROWS
            if full or sum(table.nbytes for table in group) >= GROUP_BYTES:
                writer.write_table(pa.concat_tables(group))
                group = []
        if group:
            writer.write_table(pa.concat_tables(group))
