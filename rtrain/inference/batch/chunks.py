"""The rows of the files to answer: cut into portions by one reading, then read portion by portion with every column.

A portion has at most `ROWS` rows and about `BYTES` of text, so that memory is bounded whatever the size of the files.
Where a portion begins depends on the files alone. Portions of plain files of lines are read from their first byte on;
those of other files (compressed, SQuAD, CoNLL) by reading the rows before them, which costs nothing where portions are
read in their order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, NamedTuple, Protocol

import pyarrow as pa

from rtrain.config import Data
from rtrain.core.errors import UserError
from rtrain.data import row_reader
from rtrain.data.readers import tabular
from rtrain.data.row_reader import Record, Source
from rtrain.data.sources import file_ranges, paths
from rtrain.data.sources.find import Piece
from rtrain.inference.batch import columns

ROWS = 4096
"""Most rows of a portion. Rows of like length share the engine's batches within a portion, so that few rows would mean
much padding; what a killed job repeats is the portion that it was at."""
BYTES = 16 << 20
"""Text of a portion, about; the row that passes it is its last."""
LINES = ("csv", "tsv", "jsonl")
ARROW = ("parquet", "datasets")

Raw = tuple[int, dict[str, Any] | str]
"""(line, columns by name), or (line, reason) of a row that cannot be read."""


class Portion(NamedTuple):
    number: int
    piece: int
    """Number of its file in the source."""
    rows: int
    start: int = 0
    """Byte of the file at which reading begins."""
    before: int = 0
    """Lines of the file before that byte."""
    skip: int = 0
    """Rows behind that byte that belong to the portions before."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The rows of a portion: what is asked of each, and its columns."""

    records: list[Record]
    columns: Sequence[Mapping[str, Any]] | pa.Table
    """By row; a row that cannot be read has none. A table where the file is one of Arrow or Parquet: types are kept."""
    unit: str = "line"
    """What a record's `line` counts, with the file's name before it where there are several."""
    empty: int = 0
    """Rows whose texts are blank."""


class Survey(NamedTuple):
    """What one reading of all files has found."""

    portions: tuple[Portion, ...]
    kinds: dict[str, pa.DataType]
    """Arrow type by the name of the column, in the order in which the files have them."""

    @property
    def rows(self) -> int:
        return sum(portion.rows for portion in self.portions)


class _Counted:
    """A file read by lines, which counts them."""

    def __init__(self, file: IO[bytes]):
        self._file, self.place = file, (0, 0)

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self.place = (self.place[0] + len(line), self.place[1] + 1)
            yield line


# ------------------------------------------------------------------------------------------------------------- survey


def survey(source: Source, data: Data) -> Survey:
    """Read all files once, to count their rows and learn their columns. Raises `UserError` where one is damaged."""
    portions: list[Portion] = []
    kinds: dict[str, pa.DataType] = {}
    for number, piece in enumerate(source.pieces):
        found = _arrow_survey(piece) if piece.format in ARROW else _rows_survey(piece, data)
        first = len(portions)
        portions += [one._replace(number=first + place, piece=number) for place, one in enumerate(found.portions)]
        for name, kind in found.kinds.items():
            kinds[name] = columns.common(kinds.get(name, pa.null()), kind)
    return Survey(tuple(portions), {name: columns.settled(kind) for name, kind in kinds.items()})


def _rows_survey(piece: Piece, data: Data) -> Survey:
    found: list[Portion] = []
    kinds = {} if piece.format == "jsonl" else columns.of_file(piece)
    rows, size, taken = 0, 0, Portion(0, 0, 0)
    for (start, before, skip), (_, row) in _placed(piece, data):
        if rows == ROWS or size > BYTES:
            found.append(taken._replace(rows=rows))
            rows, size, taken = 0, 0, Portion(0, 0, 0, start, before, skip)
        rows += 1
        if isinstance(row, str):
            continue
        size += sum(len(value) for value in row.values() if isinstance(value, str))
        if piece.format == "jsonl":
            for name, value in row.items():
                kinds[name] = columns.common(kinds.get(name, pa.null()), columns.kind_of(value))
    if rows:
        found.append(taken._replace(rows=rows))
    return Survey(tuple(found), kinds)


def _placed(piece: Piece, data: Data) -> Iterator[tuple[tuple[int, int, int], Raw]]:
    """Each row, with the byte at which reading it may begin, the lines before that, and the rows to skip there."""
    with row_reader.whole(piece), file_ranges.opened(piece.uri, piece.format) as file:
        counted: Any = _Counted(file) if _has_places(piece) else None
        rows = row_reader.raw(counted or file, piece, data, every_line=not data.labels)
        begin, skip = (0, 0), -1
        while True:
            before = counted.place if counted else begin
            row = next(rows, None)
            if row is None:
                return
            # Lines behind a quote that is never closed are several rows, all read from where the first one begins.
            read = counted is not None and counted.place != before
            begin, skip = (before, 0) if read else (begin, skip + 1)
            yield (*begin, skip), row


def _has_places(piece: Piece) -> bool:
    """Whether reading may begin anywhere between two rows."""
    described = paths.opened(piece.uri)
    return piece.format in LINES and described.compression is None and "http" not in described.fs.protocol


def _arrow_survey(piece: Piece) -> Survey:
    with row_reader.whole(piece), file_ranges.opened(piece.uri, piece.format) as file:
        schema, rows, size = tabular.arrow_size(file, piece.format)
    most = max(1, min(ROWS, BYTES * rows // max(1, size)))
    portions = [Portion(0, 0, min(most, rows - first), skip=first) for first in range(0, rows, most)]
    return Survey(tuple(portions), dict(zip(schema.names, schema.types, strict=True)))


# ------------------------------------------------------------------------------------------------------------- reading


class _Opened(Protocol):
    def skip(self, rows: int) -> None: ...

    def take(self, rows: int) -> Chunk: ...


class _Rows:
    def __init__(self, rows: Iterator[Raw], data: Data, unit: str):
        self._rows, self._data, self._unit = rows, data, unit

    def skip(self, rows: int) -> None:
        for _ in islice(self._rows, rows):
            pass

    def take(self, rows: int) -> Chunk:
        taken = list(islice(self._rows, rows))
        return chunk_of(taken, [row if isinstance(row, dict) else {} for _, row in taken], self._data, self._unit)


class _Batches:
    def __init__(self, batches: Iterator[pa.RecordBatch], first: int, data: Data, unit: str):
        self._batches, self._row, self._data, self._unit = batches, first, data, unit
        self._rest: pa.RecordBatch | None = None

    def _next(self, rows: int) -> pa.RecordBatch:
        """At most so many rows of the batch that is at hand."""
        batch = self._rest if self._rest is not None else next(self._batches, None)
        if batch is None:
            raise UserError(
                "a file of rows was changed while it was read; begin anew once nothing writes to it",
                code="rows_changed",
            )
        self._rest = batch.slice(rows) if batch.num_rows > rows else None
        taken = batch.slice(0, rows)
        self._row += taken.num_rows
        return taken

    def skip(self, rows: int) -> None:
        while rows:
            rows -= self._next(rows).num_rows

    def take(self, rows: int) -> Chunk:
        first, batches = self._row, []
        while rows:
            batches.append(self._next(rows))
            rows -= batches[-1].num_rows
        table = pa.Table.from_batches(batches)
        texts = [name for name in (self._data.text, self._data.text_pair) if name]
        return chunk_of(enumerate(tabular.table_rows(table, texts), first + 1), table, self._data, self._unit)


def chunk_of(rows: Iterable[Raw], columns: Sequence[Mapping[str, Any]] | pa.Table, data: Data, unit: str) -> Chunk:
    """The rows, checked."""
    found, empty = [], 0
    for line, row in rows:
        record = row_reader.checked(line, row, data)
        empty += not isinstance(row, str) and not (record.text.strip() or (record.pair or "").strip())
        found.append(record)
    return Chunk(found, columns, unit, empty)


class Reader:
    """Reads portions, in any order. For one thread."""

    def __init__(self, source: Source, data: Data):
        self._source, self._data = source, data
        self._open: _Opened | None = None
        self._files = ExitStack()
        self._read: Portion | None = None
        """The portion that was read last."""

    def read(self, portion: Portion) -> Chunk:
        piece = self._source.pieces[portion.piece]
        with row_reader.whole(piece):
            opened = self._behind(portion) or self._opened(piece, portion)
            found = opened.take(portion.rows)
        self._open, self._read = opened, portion
        return found

    def close(self) -> None:
        self._files.close()
        self._open = self._read = None

    def _behind(self, portion: Portion) -> _Opened | None:
        """The file that is open, at the portion, if the portion lies behind what was read last."""
        opened, last = self._open, self._read
        if opened is None or last is None or last.piece != portion.piece:
            return None
        if last.number + 1 == portion.number:
            return opened
        if last.start == portion.start and last.skip + last.rows <= portion.skip:
            opened.skip(portion.skip - last.skip - last.rows)
            return opened
        return None

    def _opened(self, piece: Piece, portion: Portion) -> _Opened:
        self.close()
        part = file_ranges.Part(portion.start, file_ranges.END, portion.before)
        file = self._files.enter_context(file_ranges.opened(piece.uri, piece.format, part))
        unit = "line" if piece.format in (*LINES, "conll") else "row"
        if len(self._source.pieces) > 1:
            unit = f"{paths.path_of(piece.uri).rpartition('/')[2]} {unit}"
        if piece.format in ARROW:
            batches = tabular.arrow_batches(file, piece.format, portion.skip)
            return _Batches(batches, portion.skip, self._data, unit)
        every_line = not self._data.labels
        opened = _Rows(row_reader.raw(file, piece, self._data, part, every_line=every_line), self._data, unit)
        opened.skip(portion.skip)
        return opened
