"""Parts of files: a data task reads a whole file, or a stretch of a large file between two rows.

Bytes are hashed as they are read, since a file may be changed between its digest and the reading of its rows.

Only the quotes before a line of csv tell whether the line begins a row. So a large file is surveyed once from first
byte to last, by an expression that reads csv as Python's module does, at some 150 MB a second with all hashes.
"""

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import fsspec.compression

from rtrain.data.sources import paths

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BUFFER = 1 << 20
ANYWHERE = ("parquet", "datasets")
"""Formats that readers do not read in order from the first byte to the last."""
SPLITS = ("csv", "tsv", "jsonl", "parquet")
"""Formats of which a part can be read."""
PART_BYTES = 32 << 20
"""Least size of a part (but the last); smaller files are read whole. A task takes some seconds for so many bytes."""
FIELD_BYTES = 1 << 30
"""Limit of a field that `readers` sets for Python's csv module, which refuses longer fields. Behind such a field the
file is not cut any more."""
END = 1 << 62
"""A byte position behind the end of any file."""


class Part(NamedTuple):
    """A stretch of a file's bytes."""

    start: int = 0
    """First byte."""
    stop: int = END
    """Byte behind the last."""
    before: int = 0
    """Lines of the file before the part; rows for parquet."""


WHOLE = Part()


@lru_cache(8)
def _expressions(delimiter: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Expressions for any number of csv rows, and for the rest of a row from inside a quoted field."""
    sign, blanks = re.escape(delimiter.encode()), b" " if delimiter == "\t" else rb" \t"
    rest_of_quoted = rb'[^"]*+(?:""[^"]*+)*+"(?:[^"%b\r\n][^%b\r\n]*+)?+' % (sign, sign)
    field = rb'[%b]*+(?:"%b|[^"%b\r\n][^%b\r\n]*+)?+' % (blanks, rest_of_quoted, sign, sign)
    # The rest of a line behind a bare carriage return belongs to no row (`readers.csv_rows` refuses the line).
    rest = rb"(?:%b%b)*+(?:\r[^\n]*+)?+\n" % (sign, field)
    return re.compile(rb"(?:%b%b)*+" % (field, rest)), re.compile(rest_of_quoted + rest)


class Hashed(io.RawIOBase):
    """The next `most` bytes of a file, hashed as they are read."""

    def __init__(self, file: Any, total: "hashlib._Hash | None", most: int = END):
        self._file = file
        self._total = total
        self._left = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        into = memoryview(buffer).cast("B")
        data = self._file.read(min(len(into), self._left))
        into[: len(data)] = data
        self._left -= len(data)
        if self._total is not None:
            self._total.update(data)
        return len(data)


@contextmanager
def opened(uri: str, format: str, part: Part = WHOLE, total: "hashlib._Hash | None" = None) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a part; the whole file for formats that are not read in order (`ANYWHERE`).

    When the `with` block has ended without an error, `total` has hashed all stored bytes of the part.
    """
    described = paths.opened(uri)
    unpack: Any = fsspec.compression.compr[described.compression]
    with described.fs.open(described.path, "rb") as file:
        hashed = Hashed(file, total, part.stop - part.start)
        if format in ANYWHERE:
            yield unpack(file, mode="rb")
            file.seek(part.start)
        else:
            if part.start:
                file.seek(part.start)
            yield unpack(io.BufferedReader(hashed, BUFFER), mode="rb")
        while total is not None and hashed.read(BUFFER):
            pass


def sha256(uri: str, format: str, part: Part) -> str:
    """SHA-256 of a part's stored bytes, in hex."""
    total = hashlib.sha256()
    with opened(uri, format, part, total):
        pass
    return total.hexdigest()


# --------------------------------------------------------------------------------------------------------- the cuts


def is_large(uri: str, format: str) -> bool:
    """Whether a file is large enough to be read in parts, and can be."""
    described = paths.opened(uri)
    if format not in SPLITS or described.compression is not None or "http" in described.fs.protocol:
        return False
    return (described.fs.size(described.path) or 0) > PART_BYTES


def survey(uri: str, format: str, sha256: str, delimiter: str = ",") -> list[tuple[Part, str]]:
    """The parts of a file and the SHA-256 of each. `delimiter` stands between the columns of a csv file.

    If the file no longer has the digest `sha256`, it is given as one part with that digest: the task that reads it will
    then find the change and refuse it.
    """
    total = hashlib.sha256()
    with opened(uri, "", WHOLE, total) as file:
        cuts = _row_groups(uri) if format == "parquet" else None
        found = list(_parts(file, format, cuts, delimiter))
    return found if total.hexdigest() == sha256 else [(WHOLE, sha256)]


def _parts(
    file: IO[bytes], format: str, cuts: list[tuple[int, int]] | None, delimiter: str
) -> Iterator[tuple[Part, str]]:
    """Parts of at least `PART_BYTES`. `cuts` are the allowed borders as (byte, rows before); None if the lines tell."""
    own, start, before = hashlib.sha256(), 0, 0
    for chunk, cut in _fixed(file, cuts) if cuts is not None else _between_rows(file, format, delimiter):
        own.update(chunk)
        if cut is not None and cut[0] - start >= PART_BYTES:
            yield Part(start, cut[0], before), own.hexdigest()
            own, (start, before) = hashlib.sha256(), cut
    yield Part(start, END, before), own.hexdigest()


def _fixed(file: IO[bytes], cuts: list[tuple[int, int]]) -> Iterator[tuple[bytes, tuple[int, int] | None]]:
    place = 0
    for cut in cuts:
        while place < cut[0]:
            chunk = file.read(min(BUFFER, cut[0] - place))
            place += len(chunk)
            yield chunk, cut if place == cut[0] else None
            if not chunk:
                return
    while chunk := file.read(BUFFER):
        yield chunk, None


def _between_rows(file: IO[bytes], format: str, delimiter: str) -> Iterator[tuple[bytes, tuple[int, int] | None]]:
    """Consecutive bytes of a file of lines; each with (byte, lines before) if a row begins right behind it."""
    place = lines = last = 0
    quoted = False
    while chunk := file.read(BUFFER) + file.readline():
        first = 3 if place == 0 and chunk.startswith(b"\xef\xbb\xbf") else 0
        end = len(chunk) if format != "csv" else _last_row(chunk, first, quoted, delimiter)
        quoted = end < len(chunk)
        if place + len(chunk) - last > FIELD_BYTES:
            yield chunk, None
            yield from ((rest, None) for rest in iter(lambda: file.read(BUFFER), b""))
            return
        if end > first:
            last = place + end
            yield chunk[:end], (last, lines + chunk.count(b"\n", 0, end))
        yield chunk[end if end > first else 0 :], None
        place += len(chunk)
        lines += chunk.count(b"\n")


def _last_row(chunk: bytes, first: int, quoted: bool, delimiter: str) -> int:
    """The last place between two rows in some whole lines of csv; `first` or less if there is none.

    `quoted`: the lines begin inside a quoted field. Between lines, csv is always between two rows or in such a field.
    """
    rows_expression, quoted_expression = _expressions(delimiter)
    if quoted:
        rest = quoted_expression.match(chunk, first)
        if rest is None:
            return 0
        first = rest.end()
    rows = rows_expression.match(chunk, first)
    return first if rows is None else rows.end()


def _row_groups(uri: str) -> list[tuple[int, int]]:
    """(first byte, rows before) of each row group but the first; empty if the groups are not in order in the file."""
    import pyarrow.parquet

    with opened(uri, "parquet") as file:
        firsts, rows = row_groups(pyarrow.parquet.ParquetFile(file).metadata)
    return list(zip(firsts, rows, strict=True))[1:] if firsts == sorted(firsts) else []


def row_groups(metadata: Any) -> tuple[list[int], list[int]]:
    """The first byte of each row group of a parquet file, and the number of rows before each."""
    firsts: list[int] = []
    rows = [0]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        pages = [page for one in columns for page in (one.dictionary_page_offset, one.data_page_offset) if page]
        firsts.append(min(pages, default=firsts[-1] if firsts else 0))  # a group without rows may have no pages
        rows.append(rows[-1] + group.num_rows)
    return firsts, rows[:-1]
