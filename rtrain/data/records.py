"""Files of any supported format -> checked rows. A bad row keeps its line and the reason, and is never lost in silence.

`inspect` runs without Ray before anything starts; `read` runs inside the token job, one piece (a file) at a time.
"""

import codecs
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec
import pyarrow

from rtrain import hub
from rtrain.config import Data
from rtrain.data.formats import digests, parts, readers
from rtrain.data.formats.addresses import is_glob, opened, path_of, suffix
from rtrain.data.formats.values import not_words, string, text_of
from rtrain.errors import ConfigError, Problem, UserError, quoted

SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".conll": "conll",
}
ROLES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devel", "development"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Split by what a column or a data set may call it, in any case."""


class Record(NamedTuple):
    """One row of a source. `reason` says why it cannot be used; then `text` and the rest may be empty."""

    line: int
    text: str
    pair: str | None
    label: str
    """As in the file; a list, and the labels of several columns by column, as JSON."""
    reason: str | None
    slices: tuple[str, ...] = ()
    """Values of the columns `data.slices`."""
    group: str | None = None
    """Value of the column `data.split_by`; None where none is named."""
    split: str | None = None
    """`train`, `valid` or `test` where the column `data.split` says so."""


DAMAGED = (OSError, EOFError, zlib.error, pyarrow.ArrowException)
"""What damaged or cut-off files raise: of snappy an OSError, of gzip an EOFError, ..."""


class Piece(NamedTuple):
    """A file that one task reads: `role` is `train`, `valid` or `test`, `format` how to read it."""

    uri: str
    format: str
    role: str


@dataclass(frozen=True)
class Source:
    """All the pieces of `data.path`, `data.valid` and `data.test`, in a fixed order, and the columns of the first."""

    pieces: tuple[Piece, ...]
    columns: tuple[str, ...]
    known: digests.Known | None = None
    """Digests that earlier starts have left."""

    @property
    def has_valid(self) -> bool:
        return any(piece.role == "valid" for piece in self.pieces)

    @property
    def has_test(self) -> bool:
        return any(piece.role == "test" for piece in self.pieces)

    @cached_property
    def hashed(self) -> list[digests.Digest]:
        """One per piece. Read once: the files may be large, and both the store's address and its manifest need them."""
        return digests.of([piece.uri for piece in self.pieces], self.known or {})

    @property
    def sha256s(self) -> tuple[str, ...]:
        """Of each piece."""
        return tuple(digest.sha256 for digest in self.hashed)

    def beside(self, root: Path) -> "Source":
        """The same source, with the digests that earlier starts have left in the folder of the token stores."""
        asked = self.known is not None or "hashed" in vars(self)
        return self if asked else replace(self, known=digests.known(root))

    def digest(self) -> str:
        """SHA-256 over names' roles and bytes: two copies of a file are the same source, an edited one is another."""
        total = hashlib.sha256()
        for piece, sha256 in zip(self.pieces, self.sha256s, strict=True):
            total.update(f"{piece.role} {piece.format} {sha256}\n".encode())
        return total.hexdigest()


# ------------------------------------------------------------------------------------------- before a process starts


def inspect(data: Data, root: Path | None = None) -> Source:
    """Find the files and check their columns. Raises `ConfigError` with every problem found.

    Of a hub name, the files are those of its copy under `root`, where there is one.
    """
    if data.path is None:
        raise ConfigError([Problem("data.path", None, "not given", "write --data FILE")])
    problems: list[Problem] = []
    pieces: list[Piece] = []
    columns: tuple[str, ...] = ()
    for role, field in (("train", "path"), ("valid", "valid"), ("test", "test")):
        field, uri = f"data.{field}", getattr(data, field)
        if uri is None:
            continue
        try:
            found = _pieces(field, uri, data.format, role, root)
            pieces += found
            for piece in found:
                seen = _columns(field, piece)
                columns = columns or seen
                name = uri if is_hub_name(uri, data.format) else Path(path_of(piece.uri)).name
                problems += _missing(data, seen, name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # a hub's splits lack the same columns
    return Source(tuple(pieces), columns)


def _pieces(field: str, uri: str, format: str | None, role: str, root: Path | None) -> list[Piece]:
    filesystem, path = fsspec.core.url_to_fs(uri)
    if filesystem.isdir(path) and (_is_datasets(filesystem, path) or format == "datasets"):
        return _datasets_pieces(field, filesystem, path, role)
    # Before globs: a file may be called `rows [final].csv`, and of a URL the question mark begins the query.
    if filesystem.isfile(path):
        files = [path]
    elif filesystem.isdir(path):
        files = [name for name in filesystem.find(path) if suffix(name) in SUFFIXES]
    elif is_glob(uri):
        files = [name for name in filesystem.glob(path) if filesystem.isfile(name)]
    elif is_hub_name(uri, format):
        return _hub_pieces(field, uri, role, root, _nearby(filesystem, path))
    else:
        raise ConfigError([Problem(field, uri, "no such file, folder or glob", _nearby(filesystem, path))])
    if not files:
        raise ConfigError([Problem(field, uri, "no data file in it", f"expected {', '.join(sorted(SUFFIXES))}")])
    pieces = []
    for name in sorted(files):
        found = format or SUFFIXES.get(suffix(name))
        if found is None:
            fix = "set data.format to csv, tsv, jsonl, parquet, conll or squad"
            raise ConfigError([Problem(field, name, "its name does not tell its format", fix)])
        if filesystem.size(name) == 0:
            raise ConfigError([Problem(field, name, "the file is empty", "write a header line and rows, or remove it")])
        pieces.append(Piece(filesystem.unstrip_protocol(name), found, role))
    return pieces


def tells_format(name: str) -> bool:
    """Whether a file's name says its format; `.json` may be SQuAD's or rows."""
    return suffix(name) in SUFFIXES.keys() - {".json"}


def _nearby(filesystem: Any, path: str) -> str:
    parent = str(Path(path).parent)
    names = sorted(Path(name).name for name in filesystem.ls(parent, detail=False)) if filesystem.isdir(parent) else []
    listed = ", ".join(names[:8])
    return f"{parent} holds {listed}" if names else "write the path of an existing file, or a hub name (owner/name)"


def _is_datasets(filesystem: Any, path: str) -> bool:
    return any(filesystem.isfile(f"{path}/{name}") for name in ("dataset_dict.json", "state.json"))


def _datasets_pieces(field: str, filesystem: Any, path: str, role: str) -> list[Piece]:
    """The arrow files of a `save_to_disk` folder; of one with several splits see `_roles`."""
    folders = {path: role}
    if filesystem.isfile(f"{path}/dataset_dict.json"):
        names = json.loads(filesystem.cat_file(f"{path}/dataset_dict.json"))["splits"]
        folders = {f"{path}/{name}": found for name, found in _roles(field, path, names, role).items()}
    pieces = []
    for folder, found in folders.items():
        state = json.loads(filesystem.cat_file(f"{folder}/state.json"))
        files = [f"{folder}/{entry['filename']}" for entry in state["_data_files"]]
        pieces += [Piece(filesystem.unstrip_protocol(file), "datasets", found) for file in files]
    return pieces


def _roles(field: str, source: str, names: Iterable[str], role: str) -> dict[str, str]:
    """Role by the name of a data set's split: all that are known where data.path names the set, else `role` alone."""
    found = {name: ROLES[name.lower()] for name in names if name.lower() in ROLES}
    if role not in found.values():
        fix = f"it has {', '.join(names)}; name the folder of one"
        raise ConfigError([Problem(field, source, f"no split {role!r}", fix)])
    return {name: known for name, known in found.items() if role in ("train", known)}


def is_hub_name(uri: str, format: str | None) -> bool:
    """Whether rows are asked of the hub: the form of a name, nothing here of that path, and not the ending of a file,
    which is a path with a slip in it."""
    return format in (None, "datasets") and (format or suffix(uri) not in SUFFIXES) and hub.is_name(uri)


def _hub_pieces(field: str, name: str, role: str, root: Path | None, nearby: str) -> list[Piece]:
    """The arrow files of a data set of the hub, by its splits."""
    try:
        files = hub.dataset(name, root)
    except hub.Refused as error:
        problem = Problem(field, name, f"no such file or folder here, and {error.reason}", f"{error.fix}; {nearby}")
        raise ConfigError([problem]) from None
    roles = _roles(field, name, files, role)
    return [Piece(f"file://{file}", "datasets", found) for split, found in roles.items() for file in files[split]]


def _columns(field: str, piece: Piece) -> tuple[str, ...]:
    if piece.format in readers.COLUMNS:
        return readers.COLUMNS[piece.format]
    try:
        found = _header(field, piece)
    except DAMAGED as error:
        fix = "write the file again, or set data.format to what it is"
        raise ConfigError(
            [Problem(field, piece.uri, f"not readable as {piece.format} ({_first_line(error)})", fix)]
        ) from None
    if not any(name.strip() for name in found):
        raise ConfigError([Problem(field, piece.uri, "no header line", "name the columns in the first line")])
    if twice := sorted({name for name in found if found.count(name) > 1}):
        reason = f"two columns are called {', '.join(twice)}"
        raise ConfigError([Problem(field, piece.uri, reason, "give each column a name of its own")])
    return tuple(found)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _header(field: str, piece: Piece) -> list[str]:
    """Names of the columns, as they stand in the file."""
    with opened(piece.uri) as file:
        if piece.format in ("csv", "tsv", "jsonl"):
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                fix = "convert it, e.g. iconv -f utf-16 -t utf-8"
                raise ConfigError([Problem(field, piece.uri, "the file is UTF-16, not UTF-8", fix)])
            file.seek(0)
        if piece.format in ("csv", "tsv"):
            line, header = next(readers.csv_rows(file, piece.format), (1, []))
            if isinstance(header, str):
                reason, _, fix = header.partition("; ")
                raise ConfigError([Problem(field, piece.uri, f"line {line}: {reason}", fix)])
            return header
        if piece.format == "jsonl":
            line, document = next(readers.json_rows(file), (1, None))
            if not isinstance(document, dict):
                fix = 'write one JSON object a line, e.g. {"text": "...", "label": "..."}'
                raise ConfigError([Problem(field, piece.uri, f"line {line} is not a JSON object", fix)])
            return list(document)
        return list(readers.arrow_schema(file, piece.format).names)


def _missing(data: Data, columns: tuple[str, ...], name: str) -> list[Problem]:
    problems = []
    for field, wanted in wanted_columns(data):
        if wanted not in columns:
            fix = f"{name} has {', '.join(columns)}; write --set data.{field}=COLUMN"
            problems.append(Problem(f"data.{field}", wanted, "no such column", fix))
    return problems


def wanted_columns(data: Data) -> list[tuple[str, str]]:
    """(setting, column) of every column that the settings name."""
    found = [("text", data.text), *([("text_pair", data.text_pair)] if data.text_pair else [])]
    found += [("split_by", data.split_by)] if data.split_by else []
    found += [("split", data.split)] if data.split else []
    return found + [("label", name) for name in data.labels] + [("slices", name) for name in data.slices]


# ------------------------------------------------------------------------------------------------- inside the job


def read(
    piece: Piece, data: Data, part: parts.Part = parts.WHOLE, total: "hashlib._Hash | None" = None
) -> Iterator[Record]:
    """The rows of one file, or of a part of it, in order. `line` is the line of the file (csv, tsv, jsonl) or the row
    number from 1.

    After the last row, `total` has hashed the bytes of the part, from which they were read.
    """
    try:
        with parts.opened(piece.uri, piece.format, part, total) as file:
            yield from _checked(_raw(file, piece, data, part), data)
    except DAMAGED as error:
        # Not a bad row: how many are behind it, nobody knows.
        raise UserError(
            f"{piece.uri} cannot be read to its end ({_first_line(error)}); copy or write it again"
        ) from None


def _raw(file: IO[bytes], piece: Piece, data: Data, part: parts.Part) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line, columns by name), or (line, reason) where the line cannot be read."""
    if piece.format in ("csv", "tsv"):
        rows = readers.csv_rows(file, piece.format, part.before)
        header = next(rows, (1, []))[1] if part.start == 0 else _header("data.path", piece)
        for line, values in rows:
            if isinstance(values, str):
                yield line, values
            elif len(values) == len(header):
                yield line, dict(zip(header, values, strict=True))
            elif values:
                yield line, f"{len(values)} columns instead of {len(header)}; quote a text that holds the separator"
    elif piece.format == "jsonl":
        for line, document in readers.json_rows(file, part.before):
            yield line, document if isinstance(document, dict) else "not a JSON object; write one object a line"
    elif piece.format == "conll":
        yield from readers.conll_rows(file)
    elif piece.format == "squad":
        yield from readers.squad_rows(file)
    else:
        wanted = list(dict.fromkeys(column for _, column in wanted_columns(data)))
        found = readers.arrow_rows(file, piece.format, wanted, part)
        yield from enumerate(found, start=part.before + 1)


def _checked(rows: Iterable[tuple[int, dict[str, Any] | str]], data: Data) -> Iterator[Record]:
    for line, row in rows:
        if isinstance(row, str):
            yield Record(line, "", None, "", row)
            continue
        try:
            yield _record(line, row, data)
        except RecursionError:
            yield Record(line, "", None, "", "brackets inside brackets, too deep to be written as text; make it flat")


def _record(line: int, row: dict[str, Any], data: Data) -> Record:
    # A blank beside a label, invisible in most editors, must not make a second class of it.
    text, label = text_of(row.get(data.text)), _label(row, data)
    pair = None if data.text_pair is None else text_of(row.get(data.text_pair))
    slices = tuple(string(row.get(name)) for name in data.slices)
    group = None if data.split_by is None else string(row.get(data.split_by))
    split = None if data.split is None else string(row.get(data.split)).strip()
    reason = not_words(data, row) or _reason(data, text, pair, label)
    if split is not None and split.lower() not in ROLES:
        reason = reason or f"column {data.split!r} names no split ({quoted(split)}); write train, valid or test"
    return Record(line, text, pair, label, reason, slices, group, ROLES.get((split or "").lower()))


def _label(row: dict[str, Any], data: Data) -> str:
    """The label as text; several columns as a JSON object, nothing where none of them is filled."""
    found = {name: string(row.get(name)).strip() for name in data.labels}
    if isinstance(data.label, tuple):
        return json.dumps(found, ensure_ascii=False) if any(found.values()) else ""
    label = next(iter(found.values()), "")
    if data.separator is None or label.startswith("["):
        return label
    parts = [part.strip() for part in label.split(data.separator)]
    return json.dumps([part for part in parts if part], ensure_ascii=False)


def _reason(data: Data, text: str, pair: str | None, label: str) -> str | None:
    """Why a row cannot be used, and what to do, or None."""
    named = " and ".join(data.labels)
    for column, value in ((data.text, text), (data.text_pair, pair), (named, label)):
        try:
            size = len((value or "").encode("utf-8"))
        except UnicodeEncodeError:
            return f"column {column!r} is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"
        if size > data.max_row_bytes:
            return f"column {column!r} has {size:,} bytes; split it, or raise data.max_row_bytes={data.max_row_bytes:,}"
    if not text.strip():
        return f"column {data.text!r} is empty; write a text or remove the row"
    if data.labels and not label.strip():
        return f"column {named!r} is empty; write a label or remove the row"
    return None


def refuse_if_too_bad(bad: int, total: int, examples: list[str], data: Data) -> None:
    """Refuse a source of which more than `data.max_bad_rows` cannot be used, naming the first bad lines."""
    if total and bad > data.max_bad_rows * total:
        listed = "\n  ".join(examples[:5])
        raise UserError(
            f"{bad} of {total} rows cannot be used (data.max_bad_rows={data.max_bad_rows:g}):\n  {listed}\n"
            "Mend these lines, or raise data.max_bad_rows to set them aside."
        )
