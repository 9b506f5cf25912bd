"""Files of any supported format -> checked rows. A bad row keeps its line and the reason.

`inspect_source` runs before anything starts, without Ray. `read_rows` runs inside the token job, one file at a time.
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

from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError, Problem, UserError, escape, quote_value
from rtrain.data import file_ranges, sources
from rtrain.data.readers import squad, tabular
from rtrain.data.readers.tabular import (
    explain_encode_error,
    is_json_list,
    replace_surrogates,
    to_name,
    to_string,
    to_text,
    validate_words,
)
from rtrain.data.sources import ROLE_BY_SPLIT_NAME, SourceFile, make_config_error, open_file, strip_query


class SourceRow(NamedTuple):
    """One row of a source. `reason` says why it cannot be used; then `text` and the rest may be empty."""

    line: int
    text: str
    pair: str | None
    label: str
    """The label, verbatim. A list is written as JSON, several columns as a JSON object by column."""
    reason: str | None
    slices: tuple[str, ...] = ()
    """Values of the columns `data.slices`, without surrogates (`values.replace_surrogates`): a slice never makes a row
    bad."""
    group: str | None = None
    """Value of the column `data.group_column`; None where none is named."""
    split: str | None = None
    """`train`, `valid` or `test` by the column `data.split_column`; None where no such column is named."""
    id: str = ""
    """Value of the column `data.id`; empty where none is named."""


UNNAMED_COLUMN = "(unnamed)"
"""The name of an unnamed column (such as a table's index) in messages."""
SCHEMA_SAMPLE_ROWS = 100
"""Rows of JSON lines whose keys make the columns: a row may lack some."""
MAX_NAMED_KEYS = 8
"""Most keys of a JSON line that are named if the text's key is missing."""
DELIMITERS = ",;\t|"
"""Candidate delimiters of a csv file, the first is preferred."""
SEPARATOR_HINTS = {
    "csv": "quote a text that holds the separator",
    "tsv": "replace the tabs of a text by blanks, or write csv",
}
"""Advice for a text that holds the delimiter."""
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException, squad.InvalidSquadFile)
"""Errors of readers on damaged or truncated files: snappy raises OSError, gzip EOFError."""


@dataclass(frozen=True)
class DataSource:
    """All the files of `data.path`, `data.valid` and `data.test`, in a fixed order, and the columns of the first."""

    files: tuple[SourceFile, ...]
    columns: tuple[str, ...]
    cached_digests: sources.DigestCache | None = None
    """Digests of earlier starts; None until `with_cached_digests` loads them."""

    @property
    def has_valid(self) -> bool:
        return any(file.role == "valid" for file in self.files)

    @property
    def has_test(self) -> bool:
        return any(file.role == "test" for file in self.files)

    @cached_property
    def file_digests(self) -> list[sources.FileDigest]:
        """The digest of each file, in order.

        Computed once: the files may be large, and both the store's address and its manifest need them.
        """
        return sources.compute_digests([file.uri for file in self.files], self.cached_digests or {})

    @property
    def sha256s(self) -> tuple[str, ...]:
        """The SHA-256 of each file, in order."""
        return tuple(digest.sha256 for digest in self.file_digests)

    def with_cached_digests(self, root: Path) -> "DataSource":
        """The same source, with the digests of earlier starts under `root`."""
        has_digests = self.cached_digests is not None or "file_digests" in vars(self)
        return self if has_digests else replace(self, cached_digests=sources.load_cache(root))

    def digest(self) -> str:
        """SHA-256 over the role, format and bytes of each file, without names.

        Two copies of a file are the same source; an edited file is another source.
        """
        hasher = hashlib.sha256()
        for source_file, sha256 in zip(self.files, self.sha256s, strict=True):
            hasher.update(f"{source_file.role} {source_file.format} {sha256}\n".encode())
        return hasher.hexdigest()


# ------------------------------------------------------------------------------------------- before a process starts


def inspect_source(data: DataConfig, root: Path | None = None) -> DataSource:
    """Find the files and check their columns. Raises `ConfigError` with every problem found.

    A data set of the hub is read from its copy under `root` if there is one.
    """
    if data.path is None:
        raise make_config_error("data.path", None, "not given", "write --data FILE", "missing")
    problems: list[Problem] = []
    source_files: list[SourceFile] = []
    columns: tuple[str, ...] = ()
    for role, field in (("train", "path"), ("valid", "valid"), ("test", "test")):
        field, uri = f"data.{field}", getattr(data, field)
        if uri is None:
            continue
        reported_columns: set[tuple[str, tuple[str, ...]]] = set()  # files of one origin lack the same columns
        try:
            for listed_file in sources.find_files(field, uri, data.format, role, root):
                source_file, file_columns = _detect_columns(field, listed_file, data)
                source_files.append(source_file)
                columns = columns or file_columns
                if (source_file.role, file_columns) not in reported_columns:
                    reported_columns.add((source_file.role, file_columns))
                    name = uri if sources.is_hub_name(uri, data.format) else Path(strip_query(source_file.uri)).name
                    problems += _find_missing_columns(data, file_columns, name, source_file.role)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # the splits of a hub data set lack the same columns
    return DataSource(tuple(source_files), columns)


def _detect_columns(field: str, source_file: SourceFile, data: DataConfig) -> tuple[SourceFile, tuple[str, ...]]:
    """The file with the delimiter of its header line, and the names of its columns."""
    if source_file.format != "csv":
        configured_columns = [column for _, column in _list_configured_columns(data, source_file.role)]
        return source_file, _read_columns(field, source_file, configured_columns)
    source_file = source_file._replace(delimiter=data.delimiter or ",", escape=data.escape or "")
    columns = _read_columns(field, source_file)
    delimiter = next((sign for sign in DELIMITERS if sign in columns[0]), None)
    if len(columns) > 1 or columns[0] == data.text or delimiter is None:
        return source_file, columns
    source_file = source_file._replace(delimiter=delimiter)
    return source_file, _read_columns(field, source_file)


def read_columns(source_file: SourceFile) -> tuple[str, ...]:
    """Names of a file's columns, from its first line or its schema."""
    return _read_columns("data.path", source_file)


def _read_columns(field: str, source_file: SourceFile, configured_columns: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the file's columns. Raises `ConfigError` if it has no columns or duplicate names. `configured_columns`
    are searched in all rows of JSON lines."""
    try:
        with sources.wrap_storage_errors(field, source_file.uri):
            fixed_columns = tabular.FIXED_COLUMNS.get(source_file.format)
            column_names = list(fixed_columns or _read_header(field, source_file, configured_columns))
    except READ_ERRORS as error:
        reason = f"not readable as {source_file.format} ({_first_line(error)})"
        fix = "write the file again, or correct data.format"
        raise make_config_error(field, source_file.uri, reason, fix, "unreadable") from None
    if not any(name.strip() for name in column_names):
        fix = "name the columns in the first line"
        raise make_config_error(field, source_file.uri, "no header line", fix, "no_header")
    if duplicates := sorted({escape(name) or UNNAMED_COLUMN for name in column_names if column_names.count(name) > 1}):
        reason, fix = f"two columns are called {', '.join(duplicates)}", "give each its own name, or remove it"
        raise make_config_error(field, source_file.uri, reason, fix, "duplicate_columns")
    return tuple(column_names)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_header(field: str, source_file: SourceFile, configured_columns: Sequence[str] = ()) -> list[str]:
    with open_file(source_file.uri) as file:
        if source_file.format in ("csv", "tsv", "jsonl"):
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                fix = "convert it, e.g. iconv -f utf-16 -t utf-8"
                raise make_config_error(field, source_file.uri, "the file is UTF-16, not UTF-8", fix, "not_utf8")
            file.seek(0)
        if source_file.format in ("csv", "tsv"):
            line, header = next(tabular.iter_csv_rows(file, source_file.format, 0, source_file.delimiter), (1, []))
            if isinstance(header, str):
                reason, _, fix = header.partition("; ")
                raise make_config_error(field, source_file.uri, f"line {line}: {reason}", fix, "unreadable")
            return [name.strip() for name in header]
        if source_file.format == "jsonl":
            following = tabular.iter_json_rows(file)
            line, document = next(following, (1, None))
            if not isinstance(document, dict):
                fix = 'write one JSON object a line, e.g. {"text": "...", "label": "..."}'
                raise make_config_error(field, source_file.uri, f"line {line} is not a JSON object", fix, "unreadable")
            rows = [document, *(row for _, row in islice(following, SCHEMA_SAMPLE_ROWS - 1) if isinstance(row, dict))]
            names = dict.fromkeys(name for row in rows for name in row)
            while any(name not in names for name in configured_columns) and (later := next(following, None)):
                if isinstance(later[1], dict):
                    names |= dict.fromkeys(name for name in configured_columns if name in later[1])
            return list(names)
        return list(tabular.read_arrow_schema(file, source_file.format).names)


def _find_missing_columns(data: DataConfig, columns: tuple[str, ...], name: str, role: str) -> list[Problem]:
    problems = []
    available_columns = ", ".join(escape(column) if column.strip() else UNNAMED_COLUMN for column in columns)
    delimiter = next((sign for sign in DELIMITERS if sign in columns[0]), None) if len(columns) == 1 else None
    for field, column in _list_configured_columns(data, role):
        if column in columns:
            continue
        suggestion = _suggest_column(column, columns)
        fix = f"did you mean {escape(suggestion)}?" if suggestion else f"write --set data.{field}=COLUMN"
        if delimiter:
            fix = f"its columns look separated by {delimiter!r}: write --set data.format=csv"
        fix = f"{name} has {available_columns}; {fix}"
        problems.append(Problem(f"data.{field}", column, "no such column", fix, code="unknown_column"))
    return problems


def _suggest_column(name: str, columns: tuple[str, ...]) -> str | None:
    """The column that a wrong name most likely stands for: the same but for case and blanks, else a close one."""
    folded = {column.strip().casefold(): column for column in reversed(columns) if column.strip()}
    close_matches = difflib.get_close_matches(name.strip().casefold(), list(folded), n=1, cutoff=0.7)
    return folded[close_matches[0]] if close_matches else None


def _list_configured_columns(data: DataConfig, role: str) -> list[tuple[str, str]]:
    """(setting, column) for every column that the settings name; `role` is that of the file. Rows of a validation or
    test file are not split."""
    settings = ("text_pair", *(("group_column",) if role == "train" else ()), "split_column", "id")
    return [
        ("text", data.text),
        *((setting, column) for setting in settings if (column := getattr(data, setting))),
        *(("label", column) for column in data.label_columns),
        *(("slices", column) for column in data.slices),
    ]


# ------------------------------------------------------------------------------------------------- inside the job


def read_rows(
    source_file: SourceFile,
    data: DataConfig,
    part: file_ranges.FilePart = file_ranges.WHOLE_FILE,
    hasher: "hashlib._Hash | None" = None,
) -> Iterator[SourceRow]:
    """The rows of one file, or of a part of it, in order.

    A row's `line` is its line in the file (csv, tsv, jsonl, conll), or else its row number from 1. After the last
    row, `hasher` has hashed all bytes of the part. Raises `UserError` if the file is damaged or truncated.
    """
    with (
        reject_damaged_file(source_file),
        file_ranges.open_part(source_file.uri, source_file.format, part, hasher) as file,
    ):
        for line, row in iter_raw_rows(file, source_file, data, part):
            yield parse_row(line, row, data)


@contextmanager
def reject_damaged_file(source_file: SourceFile) -> Iterator[None]:
    """Convert errors of reading a damaged file to `UserError`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, READ_ERRORS) and not sources.is_storage_error(error):
            raise
        # Damage is not one bad row: the number of rows after it is unknown.
        raise UserError(
            f"{source_file.uri} cannot be read to its end ({sources.format_storage_error(error)}); copy or write it "
            "again",
            code="damaged_file",
        ) from None


def iter_raw_rows(
    file: IO[bytes],
    source_file: SourceFile,
    data: DataConfig,
    part: file_ranges.FilePart = file_ranges.WHOLE_FILE,
    *,
    keep_blank_lines: bool = False,
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line, columns by name), or (line, reason) where the line cannot be read.

    A blank line is no row. With `keep_blank_lines` it is one where the file has a single column, and the row has no
    text.
    """
    if source_file.format in ("csv", "tsv"):
        dialect = (source_file.format, part.lines_before, source_file.delimiter, source_file.escape)
        rows = tabular.iter_csv_rows(file, *dialect)
        first = next(rows, (1, []))[1] if part.start == 0 else _read_header("data.path", source_file)
        header = [name.strip() for name in first]
        for line, values in rows:
            if isinstance(values, str):
                yield line, values
            elif len(values) == len(header):
                yield line, dict(zip(header, values, strict=True))
            elif not values and keep_blank_lines and len(header) == 1:
                yield line, {header[0]: ""}
            elif values:
                is_escaped = source_file.format == "csv" and any(value.endswith("\\") for value in values)
                widths = f"{len(values)} columns instead of {len(header)}; {SEPARATOR_HINTS[source_file.format]}"
                yield line, tabular.ESCAPED_QUOTE_REASON if is_escaped and not source_file.escape else widths
    elif source_file.format == "jsonl":
        for line, document in tabular.iter_json_rows(file, part.lines_before):
            yield line, document if isinstance(document, dict) else "not a JSON object; write one object a line"
    elif source_file.format == "conll":
        for sentence in tabular.read_sentences(file, bool(data.label_columns)):
            yield sentence.line, sentence.reason or {"tokens": list(sentence.tokens), "tags": list(sentence.tags)}
    elif source_file.format == "squad":
        for question in squad.read_questions(file, bool(data.label_columns)):
            yield question.line, question.reason or question.columns()
    else:
        columns = list(dict.fromkeys(column for _, column in _list_configured_columns(data, source_file.role)))
        arrow_rows = tabular.iter_arrow_rows(file, source_file.format, columns, part)
        yield from enumerate(arrow_rows, start=part.lines_before + 1)


def parse_row(line: int, row: Mapping[str, Any] | str, data: DataConfig) -> SourceRow:
    """The source row of a row's columns by name; a row that could not be read keeps its reason."""
    if isinstance(row, str):
        return SourceRow(line, "", None, "", row)
    try:
        return _parse_columns(line, row, data)
    except RecursionError:
        return SourceRow(line, "", None, "", "brackets inside brackets, too deep to be written as text; make it flat")


def _parse_columns(line: int, row: Mapping[str, Any], data: DataConfig) -> SourceRow:
    # Editors hide blanks around a value. Labels and group names are stripped, or a blank would make a second class or
    # document.
    text, label = to_text(row.get(data.text)), _format_label(row, data)
    pair = None if data.text_pair is None else to_text(row.get(data.text_pair))
    slices = tuple(replace_surrogates(to_name(row.get(name))) for name in data.slices)
    group = None if data.group_column is None else to_name(row.get(data.group_column))
    split = None if data.split_column is None else to_string(row.get(data.split_column)).strip()
    reason = validate_words(data, row) or _missing_text_reason(data, row) or _rejection_reason(data, text, pair, label)
    role = ROLE_BY_SPLIT_NAME.get((split or "").lower())
    if split is not None and role is None and reason is None:
        reason = f"column {data.split_column!r} names no split ({quote_value(split)}); write train, valid or test"
    row_id = "" if data.id is None else replace_surrogates(to_name(row.get(data.id)))
    return SourceRow(line, text, pair, label, reason, slices, group, role, row_id)


def _format_label(row: Mapping[str, Any], data: DataConfig) -> str:
    """The label as text. Several columns become a JSON object, or an empty text if none of them is filled."""
    values_by_column = {name: to_name(row.get(name)) for name in data.label_columns}
    if isinstance(data.label, tuple):
        return json.dumps(values_by_column, ensure_ascii=False) if any(values_by_column.values()) else ""
    label = next(iter(values_by_column.values()), "")
    if data.separator is None or is_json_list(label):
        return label
    parts = [part.strip() for part in label.split(data.separator)]
    return json.dumps([part for part in parts if part], ensure_ascii=False)


def _missing_text_reason(data: DataConfig, row: Mapping[str, Any]) -> str | None:
    """Why a row without the text column cannot be used: each JSON line has its own columns."""
    if data.text in row:
        return None
    if not row:
        return f"no column {data.text!r}, nor any other; write a text or remove the row"
    keys = ", ".join([*map(quote_value, islice(row, MAX_NAMED_KEYS)), *(["..."] if len(row) > MAX_NAMED_KEYS else [])])
    return f"no column {data.text!r}; it has {keys}; name one of these with --set data.text=NAME, or remove the row"


def _rejection_reason(data: DataConfig, text: str, pair: str | None, label: str) -> str | None:
    """Why a row cannot be used, and what to do; None if it can."""
    label_columns = " and ".join(data.label_columns)
    for column, value in ((data.text, text), (data.text_pair, pair), (label_columns, label)):
        try:
            size = len((value or "").encode())
        except UnicodeEncodeError as error:
            return f"column {column!r} {explain_encode_error(error)}"
        if size > data.max_row_bytes:
            return f"column {column!r} has {size:,} bytes; split it, or raise data.max_row_bytes={data.max_row_bytes:,}"
    if not text.strip() and not (pair or "").strip():
        return f"column {data.text!r} is empty; write a text or remove the row"
    if data.label_columns and not label.strip():
        return f"column {label_columns!r} is empty; write a label or remove the row"
    return None


def check_bad_row_share(num_bad: int, total_rows: int, examples: list[str], data: DataConfig) -> None:
    """Raise `UserError` if more than the share `data.max_bad_rows` of `total_rows` rows is bad.

    The message lists the first five of `examples`, the bad lines with their reasons.
    """
    if num_bad <= data.max_bad_rows * total_rows:
        return
    listed = "\n  ".join(examples[:5])
    # Never below the share, however it is rounded.
    sufficient_share = min(1.0, math.floor(1000 * num_bad / total_rows + 1) / 1000)
    advice = f"Correct these lines, or quarantine them with --set data.max_bad_rows={sufficient_share:g}"
    if num_bad == total_rows:
        advice = "Without these lines no row is left: correct them, or name other columns in data.text or data.label"
    problem = f"{num_bad} of {total_rows} rows cannot be used (data.max_bad_rows={data.max_bad_rows:g})"
    raise UserError(f"{problem}:\n  {listed}\n{advice}", code="too_many_bad_rows")
