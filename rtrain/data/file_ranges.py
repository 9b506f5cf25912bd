"""Parts of files: a data task reads a whole file, or a part of a large file that is cut between two rows.

Bytes are hashed during reading, since a file may be changed between its digest and the reading of its rows.

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

from rtrain.data import sources

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


BUFFER = 1 << 20
RANDOM_ACCESS_FORMATS = ("parquet", "datasets", "xlsx")
"""Formats that readers do not read in order from the first byte to the last."""
SPLITTABLE_FORMATS = ("csv", "tsv", "jsonl", "parquet")
"""Formats that can be read in parts."""
PART_BYTES = 32 << 20
"""Least size of a part (but the last); smaller files are read whole. A task takes some seconds for so many bytes."""
MAX_FIELD_BYTES = 1 << 30
"""The field limit that `readers` sets for Python's csv module. The file is not cut after a longer field."""
MAX_OFFSET = 1 << 62
"""A byte position after the end of any file."""


class FilePart(NamedTuple):
    """A range of a file's bytes."""

    start: int = 0
    """First byte."""
    stop: int = MAX_OFFSET
    """Byte after the last."""
    lines_before: int = 0
    """Lines of the file before the part; rows for parquet."""


WHOLE_FILE = FilePart()


@lru_cache(8)
def _compile_patterns(delimiter: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Expressions for any number of csv rows, and for the rest of a row from inside a quoted field."""
    sign, blanks = re.escape(delimiter.encode()), b" " if delimiter == "\t" else rb" \t"
    rest_of_quoted = rb'[^"]*+(?:""[^"]*+)*+"(?:[^"%b\r\n][^%b\r\n]*+)?+' % (sign, sign)
    field = rb'[%b]*+(?:"%b|[^"%b\r\n][^%b\r\n]*+)?+' % (blanks, rest_of_quoted, sign, sign)
    # The rest of a line behind a bare carriage return belongs to no row (`tabular.iter_csv_rows` refuses the line).
    rest = rb"(?:%b%b)*+(?:\r[^\n]*+)?+\n" % (sign, field)
    return re.compile(rb"(?:%b%b)*+" % (field, rest)), re.compile(rest_of_quoted + rest)


class HashingReader(io.RawIOBase):
    """Reader of the next `max_bytes` bytes of a file that hashes them."""

    def __init__(self, file: Any, hasher: "hashlib._Hash | None", max_bytes: int = MAX_OFFSET):
        self._file = file
        self._hasher = hasher
        self._bytes_left = max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        into = memoryview(buffer).cast("B")
        data = self._file.read(min(len(into), self._bytes_left))
        into[: len(data)] = data
        self._bytes_left -= len(data)
        if self._hasher is not None:
            self._hasher.update(data)
        return len(data)


@contextmanager
def open_part(
    uri: str, format: str, part: FilePart = WHOLE_FILE, hasher: "hashlib._Hash | None" = None
) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a part; the whole file for formats that are not read in order
    (`RANDOM_ACCESS_FORMATS`).

    When the `with` block has ended without an error, `hasher` has hashed all stored bytes of the part.
    """
    open_file = sources.open_file(uri)
    unpack: Any = fsspec.compression.compr[open_file.compression]
    with open_file.fs.open(open_file.path, "rb") as file:
        reader = HashingReader(file, hasher, part.stop - part.start)
        if format in RANDOM_ACCESS_FORMATS:
            yield unpack(file, mode="rb")
            file.seek(part.start)
        else:
            if part.start:
                file.seek(part.start)
            yield unpack(io.BufferedReader(reader, BUFFER), mode="rb")
        while hasher is not None and reader.read(BUFFER):
            pass


def hash_part(uri: str, format: str, part: FilePart) -> str:
    """SHA-256 of a part's stored bytes, in hex."""
    hasher = hashlib.sha256()
    with open_part(uri, format, part, hasher):
        pass
    return hasher.hexdigest()


# --------------------------------------------------------------------------------------------------------- the cuts


def is_large(uri: str, format: str) -> bool:
    """Whether a file is large enough to be read in parts, and can be."""
    open_file = sources.open_file(uri)
    if format not in SPLITTABLE_FORMATS or open_file.compression is not None or "http" in open_file.fs.protocol:
        return False
    return (open_file.fs.size(open_file.path) or 0) > PART_BYTES


def split_file(uri: str, format: str, sha256: str, delimiter: str = ",") -> list[tuple[FilePart, str]]:
    """The parts of a file and the SHA-256 of each. `delimiter` stands between the columns of a csv file.

    If the file no longer has the digest `sha256`, it is one part with that digest: its data task then detects the
    change.
    """
    hasher = hashlib.sha256()
    with open_part(uri, "", WHOLE_FILE, hasher) as file:
        cuts = _list_row_group_cuts(uri) if format == "parquet" else None
        parts = list(_iter_parts(file, format, cuts, delimiter))
    return parts if hasher.hexdigest() == sha256 else [(WHOLE_FILE, sha256)]


def _iter_parts(
    file: IO[bytes], format: str, cuts: list[tuple[int, int]] | None, delimiter: str
) -> Iterator[tuple[FilePart, str]]:
    """Parts of at least `PART_BYTES`. `cuts` are the allowed borders as (byte, rows before); None to cut between
    lines."""
    part_hasher, start, lines_before = hashlib.sha256(), 0, 0
    for chunk, cut in (
        _iter_chunks_to_cuts(file, cuts) if cuts is not None else _iter_chunks_between_rows(file, format, delimiter)
    ):
        part_hasher.update(chunk)
        if cut is not None and cut[0] - start >= PART_BYTES:
            yield FilePart(start, cut[0], lines_before), part_hasher.hexdigest()
            part_hasher, (start, lines_before) = hashlib.sha256(), cut
    yield FilePart(start, MAX_OFFSET, lines_before), part_hasher.hexdigest()


def _iter_chunks_to_cuts(
    file: IO[bytes], cuts: list[tuple[int, int]]
) -> Iterator[tuple[bytes, tuple[int, int] | None]]:
    offset = 0
    for cut in cuts:
        while offset < cut[0]:
            chunk = file.read(min(BUFFER, cut[0] - offset))
            offset += len(chunk)
            yield chunk, cut if offset == cut[0] else None
            if not chunk:
                return
    while chunk := file.read(BUFFER):
        yield chunk, None


def _iter_chunks_between_rows(
    file: IO[bytes], format: str, delimiter: str
) -> Iterator[tuple[bytes, tuple[int, int] | None]]:
    """Consecutive bytes of a file of lines; each with (byte, lines before) if a row begins right after it."""
    offset = lines = last = 0
    in_quotes = False
    while chunk := file.read(BUFFER) + file.readline():
        first = 3 if offset == 0 and chunk.startswith(b"\xef\xbb\xbf") else 0
        end = len(chunk) if format != "csv" else _find_last_row_end(chunk, first, in_quotes, delimiter)
        in_quotes = end < len(chunk)
        if offset + len(chunk) - last > MAX_FIELD_BYTES:
            yield chunk, None
            yield from ((rest, None) for rest in iter(lambda: file.read(BUFFER), b""))
            return
        if end > first:
            last = offset + end
            yield chunk[:end], (last, lines + chunk.count(b"\n", 0, end))
        yield chunk[end if end > first else 0 :], None
        offset += len(chunk)
        lines += chunk.count(b"\n")


def _find_last_row_end(chunk: bytes, first: int, in_quotes: bool, delimiter: str) -> int:
    """The last position between two rows in some whole lines of csv; `first` or less if not found.

    `in_quotes`: the lines begin inside a quoted field. Between lines, csv is always between two rows or in such a
    field.
    """
    rows_expression, quoted_expression = _compile_patterns(delimiter)
    if in_quotes:
        rest = quoted_expression.match(chunk, first)
        if rest is None:
            return 0
        first = rest.end()
    rows = rows_expression.match(chunk, first)
    return first if rows is None else rows.end()


def _list_row_group_cuts(uri: str) -> list[tuple[int, int]]:
    """(first byte, rows before) of each row group but the first; empty if the groups are not in order in the file."""
    import pyarrow.parquet

    with open_part(uri, "parquet") as file:
        firsts, rows = list_row_groups(pyarrow.parquet.ParquetFile(file).metadata)
    return list(zip(firsts, rows, strict=True))[1:] if firsts == sorted(firsts) else []


def list_row_groups(metadata: Any) -> tuple[list[int], list[int]]:
    """The first byte of each row group of a parquet file, and the number of rows before each."""
    firsts: list[int] = []
    rows = [0]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        pages = [page for column in columns for page in (column.dictionary_page_offset, column.data_page_offset)]
        # A group without rows may have no pages.
        firsts.append(min(filter(None, pages), default=firsts[-1] if firsts else 0))
        rows.append(rows[-1] + group.num_rows)
    return firsts, rows[:-1]
