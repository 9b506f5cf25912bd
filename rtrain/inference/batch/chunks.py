"""Chunks of the input rows: one pass over the files finds their bounds, then each chunk is read with all columns.

A chunk has at most `MAX_CHUNK_ROWS` rows and about `CHUNK_BYTES` of text, so memory is bounded for files of any size.
The bounds depend on the files alone. Chunks of uncompressed line files are read from a byte offset; in other files
(compressed, SQuAD, CoNLL) the rows before the chunk are skipped, which is free if chunks are read in order.

"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, NamedTuple, Protocol

import pyarrow as pa

from rtrain.config import DataConfig
from rtrain.core.errors import UserError
from rtrain.data import file_ranges, row_reader, sources
from rtrain.data.readers import annotations, tabular
from rtrain.data.row_reader import DataSource, SourceRow
from rtrain.data.sources import SourceFile
from rtrain.inference.batch import formats

MAX_CHUNK_ROWS = 4096
"""Maximum rows of a chunk. Batches group rows of similar length within a chunk, so small chunks have more padding; a
killed job repeats the current chunk."""
CHUNK_BYTES = 16 << 20
"""Approximate text bytes of a chunk: the row that exceeds it is the last."""
LINE_FORMATS = ("csv", "tsv", "jsonl")
ARROW_FORMATS = ("parquet", "datasets")
RawRow = tuple[int, dict[str, Any] | str]
"""(line, columns by name), or (line, reason) of an unreadable row."""


class Chunk(NamedTuple):
    number: int
    file_number: int
    """Number of its file in the source."""
    rows: int
    start_byte: int = 0
    """Byte offset at which reading begins."""
    lines_before: int = 0
    """Lines of the file before that byte."""
    rows_to_skip: int = 0
    """Rows after that byte that belong to earlier chunks."""


@dataclass(frozen=True, eq=False)
class ChunkRows:
    """The rows of a chunk: the checked records and the columns."""

    records: list[SourceRow]
    columns: formats.InputColumns
    unit: str = "line"
    """Unit of a record's `line`, prefixed with the file name if there are several files."""
    empty: int = 0
    """Rows whose texts are blank."""


class FileSurvey(NamedTuple):
    chunks: tuple[Chunk, ...]
    column_types: dict[str, pa.DataType]
    """Arrow type by column name, in the order of the files."""

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)


class _LineCounter:
    """Iterates over the lines of a file and counts bytes and lines."""

    def __init__(self, file: IO[bytes]):
        self._file, self.position = file, (0, 0)

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self.position = (self.position[0] + len(line), self.position[1] + 1)
            yield line


# ------------------------------------------------------------------------------------------------------------- survey


def survey_files(source: DataSource, data: DataConfig) -> FileSurvey:
    """Read all files once to find chunks and columns. Raises `UserError` for a damaged file."""
    chunks: list[Chunk] = []
    column_types: dict[str, pa.DataType] = {}
    for number, source_file in enumerate(source.files):
        file_survey = (
            _survey_arrow(source_file) if source_file.format in ARROW_FORMATS else _survey_rows(source_file, data)
        )
        first_number = len(chunks)
        chunks += [
            chunk._replace(number=first_number + place, file_number=number)
            for place, chunk in enumerate(file_survey.chunks)
        ]
        for name, arrow_type in file_survey.column_types.items():
            column_types[name] = formats.common_type(column_types.get(name, pa.null()), arrow_type)
    return FileSurvey(tuple(chunks), {name: formats.concrete_type(kind) for name, kind in column_types.items()})


def _survey_rows(source_file: SourceFile, data: DataConfig) -> FileSurvey:
    chunks: list[Chunk] = []
    has_json_values = source_file.format in ("jsonl", *annotations.FORMATS)
    column_types = {} if has_json_values else formats.file_column_types(source_file)
    rows, text_bytes, current_chunk = 0, 0, Chunk(0, 0, 0)
    for (start_byte, lines_before, rows_to_skip), (_, row) in _rows_with_position(source_file, data):
        if rows == MAX_CHUNK_ROWS or text_bytes > CHUNK_BYTES:
            chunks.append(current_chunk._replace(rows=rows))
            rows, text_bytes, current_chunk = 0, 0, Chunk(0, 0, 0, start_byte, lines_before, rows_to_skip)
        rows += 1
        if isinstance(row, str):
            continue
        text_bytes += sum(len(value) for value in row.values() if isinstance(value, str))
        if has_json_values:
            for name, value in row.items():
                column_types[name] = formats.common_type(column_types.get(name, pa.null()), formats.json_type(value))
    if rows:
        chunks.append(current_chunk._replace(rows=rows))
    return FileSurvey(tuple(chunks), column_types)


def _rows_with_position(source_file: SourceFile, data: DataConfig) -> Iterator[tuple[tuple[int, int, int], RawRow]]:
    """Yield each row with (byte offset to read from, lines before it, rows to skip after it)."""
    with (
        row_reader.reject_damaged_file(source_file),
        file_ranges.open_part(source_file.uri, source_file.format) as file,
    ):
        line_counter: Any = _LineCounter(file) if _is_seekable(source_file) else None
        rows = row_reader.iter_raw_rows(
            line_counter or file, source_file, data, keep_blank_lines=not data.label_columns
        )
        position, rows_to_skip = (0, 0), -1
        while True:
            previous = line_counter.position if line_counter else position
            row = next(rows, None)
            if row is None:
                return
            # Lines after an unclosed quote are several rows, all read from the offset of the first.
            has_advanced = line_counter is not None and line_counter.position != previous
            position, rows_to_skip = (previous, 0) if has_advanced else (position, rows_to_skip + 1)
            yield (*position, rows_to_skip), row


def _is_seekable(source_file: SourceFile) -> bool:
    """Return whether reading may begin at any row."""
    opened_address = sources.open_file(source_file.uri)
    return (
        source_file.format in LINE_FORMATS
        and opened_address.compression is None
        and "http" not in opened_address.fs.protocol
    )


def _survey_arrow(source_file: SourceFile) -> FileSurvey:
    with (
        row_reader.reject_damaged_file(source_file),
        file_ranges.open_part(source_file.uri, source_file.format) as file,
    ):
        schema, rows, size = tabular.measure_arrow_file(file, source_file.format)
    chunk_rows = max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES * rows // max(1, size)))
    chunks = [Chunk(0, 0, min(chunk_rows, rows - first), rows_to_skip=first) for first in range(0, rows, chunk_rows)]
    return FileSurvey(tuple(chunks), dict(zip(schema.names, schema.types, strict=True)))


# ------------------------------------------------------------------------------------------------------------- reading


class _RowReader(Protocol):
    def skip_rows(self, rows: int) -> None: ...

    def take_rows(self, rows: int) -> ChunkRows: ...


class _LineRowReader:
    def __init__(self, rows: Iterator[RawRow], data: DataConfig, unit: str):
        self._rows, self._data, self._unit = rows, data, unit

    def skip_rows(self, rows: int) -> None:
        for _ in islice(self._rows, rows):
            pass

    def take_rows(self, rows: int) -> ChunkRows:
        raw_rows = list(islice(self._rows, rows))
        return check_rows(
            raw_rows, [row if isinstance(row, dict) else {} for _, row in raw_rows], self._data, self._unit
        )


class _ArrowRowReader:
    def __init__(self, batches: Iterator[pa.RecordBatch], first_row: int, data: DataConfig, unit: str):
        self._batches, self._row, self._data, self._unit = batches, first_row, data, unit
        self._remaining_batch: pa.RecordBatch | None = None

    def _next_batch(self, rows: int) -> pa.RecordBatch:
        """Return at most so many rows of the current batch."""
        batch = self._remaining_batch if self._remaining_batch is not None else next(self._batches, None)
        if batch is None:
            raise UserError(
                "a file of rows was changed while it was read; start again when nothing writes to it",
                code="rows_changed",
            )
        self._remaining_batch = batch.slice(rows) if batch.num_rows > rows else None
        taken_rows = batch.slice(0, rows)
        self._row += taken_rows.num_rows
        return taken_rows

    def skip_rows(self, rows: int) -> None:
        while rows:
            rows -= self._next_batch(rows).num_rows

    def take_rows(self, rows: int) -> ChunkRows:
        first_row, batches = self._row, []
        while rows:
            batches.append(self._next_batch(rows))
            rows -= batches[-1].num_rows
        table = pa.Table.from_batches(batches)
        data = self._data
        texts = [*data.text_columns, *([data.text_pair] if data.text_pair else []), *data.features]
        return check_rows(
            enumerate(tabular.iter_table_rows(table, texts), first_row + 1), table, self._data, self._unit
        )


def check_rows(
    rows: Iterable[RawRow], columns: Sequence[Mapping[str, Any]] | pa.Table, data: DataConfig, unit: str
) -> ChunkRows:
    checked_records, empty_rows = [], 0
    for line, row in rows:
        record = row_reader.parse_row(line, row, data)
        empty_rows += not isinstance(row, str) and not (record.text.strip() or (record.pair or "").strip())
        checked_records.append(record)
    return ChunkRows(checked_records, columns, unit, empty_rows)


class ChunkReader:
    """Reads chunks in any order. Not thread-safe."""

    def __init__(self, source: DataSource, data: DataConfig):
        self._source, self._data = source, data
        self._row_reader: _RowReader | None = None
        self._files = ExitStack()
        self._last_chunk: Chunk | None = None
        """The chunk of the last read."""

    def read(self, chunk: Chunk) -> ChunkRows:
        source_file = self._source.files[chunk.file_number]
        with row_reader.reject_damaged_file(source_file):
            source_reader = self._continue_reader(chunk) or self._open_file(source_file, chunk)
            chunk_rows = source_reader.take_rows(chunk.rows)
        self._row_reader, self._last_chunk = source_reader, chunk
        return chunk_rows

    def close(self) -> None:
        self._files.close()
        self._row_reader = self._last_chunk = None

    def _continue_reader(self, chunk: Chunk) -> _RowReader | None:
        """Return the open reader, moved to the chunk, if the chunk is after the last one; otherwise None."""
        source_reader, last_chunk = self._row_reader, self._last_chunk
        if source_reader is None or last_chunk is None or last_chunk.file_number != chunk.file_number:
            return None
        if last_chunk.number + 1 == chunk.number:
            return source_reader
        if (
            last_chunk.start_byte == chunk.start_byte
            and last_chunk.rows_to_skip + last_chunk.rows <= chunk.rows_to_skip
        ):
            source_reader.skip_rows(chunk.rows_to_skip - last_chunk.rows_to_skip - last_chunk.rows)
            return source_reader
        return None

    def _open_file(self, source_file: SourceFile, chunk: Chunk) -> _RowReader:
        self.close()
        byte_range = file_ranges.FilePart(chunk.start_byte, file_ranges.MAX_OFFSET, chunk.lines_before)
        file = self._files.enter_context(file_ranges.open_part(source_file.uri, source_file.format, byte_range))
        unit = "line" if source_file.format in (*LINE_FORMATS, "conll") else "row"
        if len(self._source.files) > 1:
            unit = f"{sources.strip_query(source_file.uri).rpartition('/')[2]} {unit}"
        if source_file.format in ARROW_FORMATS:
            batches = tabular.iter_arrow_batches(file, source_file.format, chunk.rows_to_skip)
            return _ArrowRowReader(batches, chunk.rows_to_skip, self._data, unit)
        every_line = not self._data.label_columns
        source_reader = _LineRowReader(
            row_reader.iter_raw_rows(file, source_file, self._data, byte_range, keep_blank_lines=every_line),
            self._data,
            unit,
        )
        source_reader.skip_rows(chunk.rows_to_skip)
        return source_reader
