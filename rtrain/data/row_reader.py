"""Files of any supported format -> checked rows. A bad row keeps its line and the reason, and is never lost in silence.

`inspect` runs before anything starts, without Ray. `read` runs inside the token job, one piece (a file) at a time.
"""

import codecs
import difflib
import hashlib
import json
import lzma
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow

from rtrain.config import Data
from rtrain.core.errors import ConfigError, Problem, UserError, quoted, visible
from rtrain.data.readers import squad, tabular
from rtrain.data.readers.values import halved, is_list, name_of, not_words, printable, string, text_of
from rtrain.data.sources import digests, file_ranges, find, paths
from rtrain.data.sources.find import ROLES, Piece
from rtrain.data.sources.paths import opened, path_of, refused


class Record(NamedTuple):
    """One row of a source. `reason` says why it cannot be used; then `text` and the rest may be empty."""

    line: int
    text: str
    pair: str | None
    label: str
    """The label as it stands in the file. A list is written as JSON, several columns as a JSON object by column."""
    reason: str | None
    slices: tuple[str, ...] = ()
    """Values of the columns `data.slices`, as `values.printable` has them: no row is bad for these."""
    group: str | None = None
    """Value of the column `data.split_by`; None where none is named."""
    split: str | None = None
    """`train`, `valid` or `test` by the column `data.split`; None where no such column is named."""
    id: str = ""
    """Value of the column `data.id`; empty where none is named."""


UNNAMED = "(unnamed)"
"""Stands for a column without a name, as that of a table's index, where columns are listed."""
HEAD_ROWS = 100
"""Rows of JSON lines whose keys are the file's columns, since a row need not have all of them."""
NAMED = 8
"""Most keys of a JSON line that are named where the text's is not among them."""
DELIMITERS = ",;\t|"
"""Signs that are looked for between the columns of a csv file, the first before the others."""
SEPARATED = {
    "csv": "quote a text that holds the separator",
    "tsv": "replace the tabs of a text by blanks, or write csv",
}
"""What to do about a text that holds the sign between two columns."""
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException, squad.Unreadable)
"""What readers raise on damaged or cut-off files: snappy an OSError, gzip an EOFError, and so on."""


@dataclass(frozen=True)
class Source:
    """All the files of `data.path`, `data.valid` and `data.test`, in a fixed order, and the columns of the first."""

    pieces: tuple[Piece, ...]
    columns: tuple[str, ...]
    known: digests.Known | None = None
    """Digests that earlier starts have left; None until `beside` has looked for them."""

    @property
    def has_valid(self) -> bool:
        return any(piece.role == "valid" for piece in self.pieces)

    @property
    def has_test(self) -> bool:
        return any(piece.role == "test" for piece in self.pieces)

    @cached_property
    def hashed(self) -> list[digests.Digest]:
        """The digest of each piece, in their order.

        They are made once and kept: the files may be large, and both the store's address and its manifest need them.
        """
        return digests.of([piece.uri for piece in self.pieces], self.known or {})

    @property
    def sha256s(self) -> tuple[str, ...]:
        """The SHA-256 of each piece, in their order."""
        return tuple(digest.sha256 for digest in self.hashed)

    def beside(self, root: Path) -> "Source":
        """The same source, with the digests that earlier starts have left under `root`, beside the token stores."""
        has_digests = self.known is not None or "hashed" in vars(self)
        return self if has_digests else replace(self, known=digests.known(root))

    def digest(self) -> str:
        """SHA-256 over the role, format and bytes of each piece, whatever their names.

        Two copies of a file are therefore the same source, and an edited file is another.
        """
        total = hashlib.sha256()
        for piece, sha256 in zip(self.pieces, self.sha256s, strict=True):
            total.update(f"{piece.role} {piece.format} {sha256}\n".encode())
        return total.hexdigest()


# ------------------------------------------------------------------------------------------- before a process starts


def inspect(data: Data, root: Path | None = None) -> Source:
    """Find the files and check their columns. Raises `ConfigError` with every problem found.

    A data set of the hub is read from its copy under `root` if there is one.
    """
    if data.path is None:
        raise refused("data.path", None, "not given", "write --data FILE", "missing")
    problems: list[Problem] = []
    pieces: list[Piece] = []
    columns: tuple[str, ...] = ()
    for role, field in (("train", "path"), ("valid", "valid"), ("test", "test")):
        field, uri = f"data.{field}", getattr(data, field)
        if uri is None:
            continue
        lacking: set[tuple[str, tuple[str, ...]]] = set()  # files of one making lack the same columns
        try:
            for found in find.find(field, uri, data.format, role, root):
                piece, seen = _with_columns(field, found, data)
                pieces.append(piece)
                columns = columns or seen
                if (piece.role, seen) not in lacking:
                    lacking.add((piece.role, seen))
                    name = uri if find.is_hub_name(uri, data.format) else Path(path_of(piece.uri)).name
                    problems += _missing(data, seen, name, piece.role)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # the splits of a hub data set lack the same columns
    return Source(tuple(pieces), columns)


def _with_columns(field: str, piece: Piece, data: Data) -> tuple[Piece, tuple[str, ...]]:
    """A file with the delimiter that its header line shows, and the names of its columns."""
    if piece.format != "csv":
        return piece, _columns(field, piece, [column for _, column in _columns_named(data, piece.role)])
    piece = piece._replace(delimiter=data.delimiter or ",", escape=data.escape or "")
    columns = _columns(field, piece)
    sign = next((one for one in DELIMITERS if one in columns[0]), None)
    if len(columns) > 1 or columns[0] == data.text or sign is None:
        return piece, columns
    piece = piece._replace(delimiter=sign)
    return piece, _columns(field, piece)


def columns_of(piece: Piece) -> tuple[str, ...]:
    """Names of a file's columns, as its first line or its schema has them."""
    return _columns("data.path", piece)


def _columns(field: str, piece: Piece, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the file's columns. Raises `ConfigError` if there are none, or two of one name. Columns that the
    settings name (`named`) are looked for in all rows of JSON lines."""
    try:
        with paths.asked(field, piece.uri):
            found = list(tabular.COLUMNS.get(piece.format) or _header(field, piece, named))
    except DAMAGED as error:
        fix = "write the file again, or set data.format to what it is"
        raise refused(
            field, piece.uri, f"not readable as {piece.format} ({_first_line(error)})", fix, "unreadable"
        ) from None
    if not any(name.strip() for name in found):
        raise refused(field, piece.uri, "no header line", "name the columns in the first line", "no_header")
    if twice := sorted({visible(name) or UNNAMED for name in found if found.count(name) > 1}):
        reason, fix = f"two columns are called {', '.join(twice)}", "give each column a name of its own, or remove it"
        raise refused(field, piece.uri, reason, fix, "duplicate_columns")
    return tuple(found)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _header(field: str, piece: Piece, named: Sequence[str] = ()) -> list[str]:
    """The names in the file's first line or schema, as they stand there."""
    with opened(piece.uri) as file:
        if piece.format in ("csv", "tsv", "jsonl"):
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                fix = "convert it, e.g. iconv -f utf-16 -t utf-8"
                raise refused(field, piece.uri, "the file is UTF-16, not UTF-8", fix, "not_utf8")
            file.seek(0)
        if piece.format in ("csv", "tsv"):
            line, header = next(tabular.csv_rows(file, piece.format, 0, piece.delimiter), (1, []))
            if isinstance(header, str):
                reason, _, fix = header.partition("; ")
                raise refused(field, piece.uri, f"line {line}: {reason}", fix, "unreadable")
            return [name.strip() for name in header]
        if piece.format == "jsonl":
            following = tabular.json_rows(file)
            line, document = next(following, (1, None))
            if not isinstance(document, dict):
                fix = 'write one JSON object a line, e.g. {"text": "...", "label": "..."}'
                raise refused(field, piece.uri, f"line {line} is not a JSON object", fix, "unreadable")
            rows = [document, *(row for _, row in islice(following, HEAD_ROWS - 1) if isinstance(row, dict))]
            names = dict.fromkeys(name for row in rows for name in row)
            while any(name not in names for name in named) and (later := next(following, None)):
                names |= dict.fromkeys(name for name in named if isinstance(later[1], dict) and name in later[1])
            return list(names)
        return list(tabular.arrow_schema(file, piece.format).names)


def _missing(data: Data, columns: tuple[str, ...], name: str, role: str) -> list[Problem]:
    problems = []
    for field, column in _columns_named(data, role):
        if column not in columns:
            meant = _meant(column, columns)
            fix = f"did you mean {visible(meant)}?" if meant else f"write --set data.{field}=COLUMN"
            if len(columns) == 1 and (sign := next((one for one in DELIMITERS if one in columns[0]), None)):
                fix = f"its columns look parted by {sign!r}: write --set data.format=csv"
            there = ", ".join(visible(one) if one.strip() else UNNAMED for one in columns)
            problems.append(
                Problem(f"data.{field}", column, "no such column", f"{name} has {there}; {fix}", code="unknown_column")
            )
    return problems


def _meant(name: str, columns: tuple[str, ...]) -> str | None:
    """The column that a wrong name most likely stands for: the same but for case and blanks, else a close one."""
    folded = {column.strip().casefold(): column for column in reversed(columns) if column.strip()}
    near = difflib.get_close_matches(name.strip().casefold(), list(folded), n=1, cutoff=0.7)
    return folded[near[0]] if near else None


def _columns_named(data: Data, role: str) -> list[tuple[str, str]]:
    """(setting, column) for every column that the settings name; `role` is that of the file. Rows of a validation or
    test file are not split."""
    found = [("text", data.text), *([("text_pair", data.text_pair)] if data.text_pair else [])]
    found += [("split_by", data.split_by)] if data.split_by and role == "train" else []
    found += [("split", data.split)] if data.split else []
    found += [("id", data.id)] if data.id else []
    return found + [("label", name) for name in data.labels] + [("slices", name) for name in data.slices]


# ------------------------------------------------------------------------------------------------- inside the job


def read(
    piece: Piece, data: Data, part: file_ranges.Part = file_ranges.WHOLE, total: "hashlib._Hash | None" = None
) -> Iterator[Record]:
    """The rows of one file, or of a part of it, in order.

    A record's `line` is its line in the file (csv, tsv, jsonl, conll), or else its row number from 1. After the last
    row, `total` has hashed all bytes of the part. Raises `UserError` where the file is damaged or cut off.
    """
    with whole(piece), file_ranges.opened(piece.uri, piece.format, part, total) as file:
        for line, row in raw(file, piece, data, part):
            yield checked(line, row, data)


@contextmanager
def whole(piece: Piece) -> Iterator[None]:
    """Around the reading of a file: damage in it becomes a `UserError`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, DAMAGED) and not paths.is_of_storage(error):
            raise
        # Damage is not one bad row: nobody knows how many rows are lost behind it.
        raise UserError(
            f"{piece.uri} cannot be read to its end ({paths.said(error)}); copy or write it again",
            code="damaged_file",
        ) from None


def raw(
    file: IO[bytes], piece: Piece, data: Data, part: file_ranges.Part = file_ranges.WHOLE, *, every_line: bool = False
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line, columns by name), or (line, reason) where the line cannot be read.

    A blank line is no row. With `every_line` it is one where the file has a single column, and the row has no text.
    """
    if piece.format in ("csv", "tsv"):
        rows = tabular.csv_rows(file, piece.format, part.before, piece.delimiter, piece.escape)
        first = next(rows, (1, []))[1] if part.start == 0 else _header("data.path", piece)
        header = [name.strip() for name in first]
        for line, values in rows:
            if isinstance(values, str):
                yield line, values
            elif len(values) == len(header):
                yield line, dict(zip(header, values, strict=True))
            elif not values and every_line and len(header) == 1:
                yield line, {header[0]: ""}
            elif values:
                is_escaped = piece.format == "csv" and any(value.endswith("\\") for value in values)
                widths = f"{len(values)} columns instead of {len(header)}; {SEPARATED[piece.format]}"
                yield line, tabular.BACKSLASH if is_escaped and not piece.escape else widths
    elif piece.format == "jsonl":
        for line, document in tabular.json_rows(file, part.before):
            yield line, document if isinstance(document, dict) else "not a JSON object; write one object a line"
    elif piece.format == "conll":
        yield from tabular.conll_rows(file, bool(data.labels))
    elif piece.format == "squad":
        yield from tabular.squad_rows(file, bool(data.labels))
    else:
        named = list(dict.fromkeys(column for _, column in _columns_named(data, piece.role)))
        yield from enumerate(tabular.arrow_rows(file, piece.format, named, part), start=part.before + 1)


def checked(line: int, row: Mapping[str, Any] | str, data: Data) -> Record:
    """The record of a row's columns by name; a row that could not be read keeps its reason."""
    if isinstance(row, str):
        return Record(line, "", None, "", row)
    try:
        return _record(line, row, data)
    except RecursionError:
        return Record(line, "", None, "", "brackets inside brackets, too deep to be written as text; make it flat")


def _record(line: int, row: Mapping[str, Any], data: Data) -> Record:
    # Most editors do not show a blank beside a label. It must not make a second class, so labels are stripped; nor a
    # second document beside the name of one.
    text, label = text_of(row.get(data.text)), _label(row, data)
    pair = None if data.text_pair is None else text_of(row.get(data.text_pair))
    slices = tuple(printable(name_of(row.get(name))) for name in data.slices)
    group = None if data.split_by is None else name_of(row.get(data.split_by))
    split = None if data.split is None else string(row.get(data.split)).strip()
    reason = not_words(data, row) or _absent(data, row) or _reason(data, text, pair, label)
    if split is not None and split.lower() not in ROLES:
        reason = reason or f"column {data.split!r} names no split ({quoted(split)}); write train, valid or test"
    row_id = "" if data.id is None else printable(name_of(row.get(data.id)))
    return Record(line, text, pair, label, reason, slices, group, ROLES.get((split or "").lower()), row_id)


def _label(row: Mapping[str, Any], data: Data) -> str:
    """The label as text. Several columns become a JSON object, or an empty text if none of them is filled."""
    found = {name: name_of(row.get(name)) for name in data.labels}
    if isinstance(data.label, tuple):
        return json.dumps(found, ensure_ascii=False) if any(found.values()) else ""
    label = next(iter(found.values()), "")
    if data.separator is None or is_list(label):
        return label
    parts = [part.strip() for part in label.split(data.separator)]
    return json.dumps([part for part in parts if part], ensure_ascii=False)


def _absent(data: Data, row: Mapping[str, Any]) -> str | None:
    """Why a row without the column of the text cannot be used: each JSON line has its own."""
    if data.text in row:
        return None
    if not row:
        return f"no column {data.text!r}, nor any other; write a text or remove the row"
    has = f"it has {', '.join(map(quoted, islice(row, NAMED)))}{', ...' if len(row) > NAMED else ''}"
    return f"no column {data.text!r}; {has}; name one of these by --set data.text=NAME, or remove the row"


def _reason(data: Data, text: str, pair: str | None, label: str) -> str | None:
    """Why a row cannot be used, and what to do; None if it can."""
    named = " and ".join(data.labels)
    for column, value in ((data.text, text), (data.text_pair, pair), (named, label)):
        try:
            size = len((value or "").encode())
        except UnicodeEncodeError as error:
            return f"column {column!r} {halved(error)}"
        if size > data.max_row_bytes:
            return f"column {column!r} has {size:,} bytes; split it, or raise data.max_row_bytes={data.max_row_bytes:,}"
    if not text.strip() and not (pair or "").strip():
        return f"column {data.text!r} is empty; write a text or remove the row"
    if data.labels and not label.strip():
        return f"column {named!r} is empty; write a label or remove the row"
    return None


def refuse_if_too_bad(bad: int, total: int, examples: list[str], data: Data) -> None:
    """Raise `UserError` if more than the share `data.max_bad_rows` of `total` rows is bad.

    The message lists the first five of `examples`, the bad lines with their reasons.
    """
    if total and bad > data.max_bad_rows * total:
        listed = "\n  ".join(examples[:5])
        enough = min(1.0, math.floor(1000 * bad / total + 1) / 1000)  # never below the share, however it is rounded
        raise UserError(
            f"{bad} of {total} rows cannot be used (data.max_bad_rows={data.max_bad_rows:g}):\n  {listed}\n"
            + (
                f"Mend these lines, or set them aside by --set data.max_bad_rows={enough:g}"
                if bad < total
                else "Without these lines no row is left: mend them, or name other columns by data.text or data.label"
            ),
            code="too_many_bad_rows",
        )
