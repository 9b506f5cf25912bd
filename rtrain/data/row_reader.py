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
from rtrain.config.data import is_table, parse_time
from rtrain.core import row_filter, row_text
from rtrain.core.errors import ConfigError, Problem, UserError, escape, quote_value
from rtrain.data import file_ranges, sources, tables
from rtrain.data.readers import annotations, squad, tabular
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
from rtrain.tasks.encode import canonical_name


@dataclass
class ReadCounts:
    """Counts of rows, filled while they are read."""

    left_out: int = 0
    """Rows that `data.where` leaves out, or that annotators have rejected or not finished."""
    relabeled: int = 0
    """Rows whose label `data.labels` has changed."""


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
    weight: float = 1.0
    """Value of the column `data.weight_column`; 1 where none is named."""
    sampling_value: str = ""
    """Value of the column of `data.sampling`; empty where none is named."""
    stratum: str | None = None
    """Label or value of the column `data.stratify`; None where no column is named."""
    time: float | None = None
    """Seconds since 1970 in the column of `data.split_time`; None where no column is named."""
    is_relabeled: bool = False
    """`data.labels` has changed the label."""


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
READ_ERRORS = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    pyarrow.ArrowException,
    squad.InvalidSquadFile,
    annotations.InvalidExport,
)
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
            sheet = f" {source_file.sheet}" if source_file.sheet else ""
            hasher.update(f"{source_file.role} {source_file.format} {sha256}{sheet}\n".encode())
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
            if is_table(uri):
                uri = str(tables.copy_temporarily(field, uri, data.query))
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
    if len(columns) > 1 or columns[0] in data.text_columns or delimiter is None:
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
        if source_file.format in annotations.FORMATS:
            entries = annotations.read_annotations(file, source_file.format)
            sample = islice((entry for _, entry in entries if isinstance(entry, dict)), SCHEMA_SAMPLE_ROWS)
            return list(dict.fromkeys(name for entry in sample for name in entry)) or ["text"]
        if source_file.format == "xlsx":
            return list(next(tabular.iter_sheet_rows(file, source_file.sheet))[1])
        return list(tabular.read_arrow_schema(file, source_file.format).names)


def _find_missing_columns(data: DataConfig, columns: tuple[str, ...], name: str, role: str) -> list[Problem]:
    problems = []
    available_columns = ", ".join(escape(column) if column.strip() else UNNAMED_COLUMN for column in columns)
    delimiter = next((sign for sign in DELIMITERS if sign in columns[0]), None) if len(columns) == 1 else None
    for field, column in _list_configured_columns(data, role):
        if column in columns:
            continue
        suggestion = _suggest_column(column, columns)
        assignment = f"data.{field}=COLUMN" if field != "sampling" else "'data.sampling={column: COLUMN}'"
        fix = f"did you mean {escape(suggestion)}?" if suggestion else f"write --set {assignment}"
        if delimiter:
            fix = f"its columns look separated by {delimiter!r}: write --set data.format=csv"
        fix = f"{name} has {available_columns}; {fix}"
        reason = "no such column"
        if field == "where":
            reason = f"no such column (character {_load_filter(data).columns[column]} of the condition)"
        problems.append(Problem(f"data.{field}", column, reason, fix, code="unknown_column"))
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
    split_columns = () if role != "train" else _list_split_columns(data)
    return [
        *(("text", column) for column in data.text_columns),
        *(("features", column) for column in data.features),
        *(("where", column) for column in (_load_filter(data).columns if data.where else ())),
        *split_columns,
        *((setting, column) for setting in settings if (column := getattr(data, setting))),
        *((("weight_column", data.weight_column),) if data.weight_column and role == "train" else ()),
        *((("sampling", data.sampling.column),) if data.sampling and role == "train" else ()),
        *(("label", column) for column in data.label_columns),
        *(("slices", column) for column in data.slices),
    ]


def _list_split_columns(data: DataConfig) -> Iterator[tuple[str, str]]:
    if data.stratify not in (None, "label"):
        yield "stratify", str(data.stratify)
    if data.split_time is not None:
        yield "split_time", data.split_time.column


def _load_filter(data: DataConfig) -> row_filter.RowFilter:
    """The condition `data.where`. The configuration has checked it."""
    return row_filter.parse_filter(data.where or "", canonical_name)


# ------------------------------------------------------------------------------------------------- inside the job


def read_rows(
    source_file: SourceFile,
    data: DataConfig,
    part: file_ranges.FilePart = file_ranges.WHOLE_FILE,
    hasher: "hashlib._Hash | None" = None,
    counts: ReadCounts | None = None,
) -> Iterator[SourceRow]:
    """The rows of one file, or of a part of it, in order; `data.where` leaves rows out.

    A row's `line` is its line in the file (csv, tsv, jsonl, conll), or else its row number from 1. After the last
    row, `hasher` has hashed all bytes of the part, and `counts` has counted the part's rows. Raises `UserError` if the
    file is damaged or truncated.
    """
    if source_file.role != "train":  # evaluation rows need neither
        data = data.model_copy(update={"weight_column": None, "sampling": None})
    with (
        reject_damaged_file(source_file),
        file_ranges.open_part(source_file.uri, source_file.format, part, hasher) as file,
    ):
        counts = counts or ReadCounts()
        for line, row in iter_raw_rows(file, source_file, data, part):
            if not isinstance(row, str) and _is_left_out(row, source_file, data):
                counts.left_out += 1
                continue
            source_row = parse_row(line, row, data)
            counts.relabeled += source_row.is_relabeled
            yield source_row


def _is_left_out(row: Mapping[str, Any], source_file: SourceFile, data: DataConfig) -> bool:
    """Whether the row is not selected, or is no finished annotation."""
    is_annotation = source_file.format in annotations.FORMATS and bool(data.label_columns)
    if is_annotation and row[annotations.ANSWER] != annotations.ACCEPTED:
        return True
    return data.where is not None and not _load_filter(data).matches(lambda column: to_name(row.get(column)))


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
    elif source_file.format in annotations.FORMATS:
        yield from annotations.read_annotations(file, source_file.format)
    elif source_file.format == "xlsx":
        sheet_rows = tabular.iter_sheet_rows(file, source_file.sheet)
        header = [str(name) for name in next(sheet_rows)[1]]
        for line, cells in sheet_rows:
            yield line, dict(zip(header, cells, strict=True))
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
    features = {name: to_name(row.get(name)) for name in data.features}
    text = row_text.build_text([to_text(row.get(column)) for column in data.text_columns], data, features)
    original_label = _format_label(row, data)
    label = _rename_label(original_label, data.labels) if data.labels else original_label
    pair = None if data.text_pair is None else to_text(row.get(data.text_pair))
    slices = tuple(replace_surrogates(to_name(row.get(name))) for name in data.slices)
    group = None if data.group_column is None else to_name(row.get(data.group_column))
    split = None if data.split_column is None else to_string(row.get(data.split_column)).strip()
    reason = validate_words(data, row) or _missing_text_reason(data, row) or _rejection_reason(data, text, pair, label)
    role = ROLE_BY_SPLIT_NAME.get((split or "").lower())
    if split is not None and role is None and reason is None:
        reason = f"column {data.split_column!r} names no split ({quote_value(split)}); write train, valid or test"
    weight = 1.0 if data.weight_column is None else _parse_weight(row.get(data.weight_column))
    if weight is None and reason is None:
        value = quote_value(to_string(row.get(data.weight_column or "")))
        reason = f"the weight {value} in column {data.weight_column!r} is not a number of 0 or more; correct it"
    sampling_value = "" if data.sampling is None else replace_surrogates(to_name(row.get(data.sampling.column)))
    if pair is not None and data.strip_html:
        pair = row_text.strip_html(pair)
    stratum = label if data.stratify == "label" else data.stratify and to_name(row.get(data.stratify))
    time_value = None if data.split_time is None else row.get(data.split_time.column)
    time = None if time_value is None else parse_time(time_value)
    if data.split_time is not None and time is None and reason is None:
        value = quote_value(to_string(time_value))
        reason = f"column {data.split_time.column!r} is no date ({value}); write one such as 2024-06-01T14:30:00Z"
    row_id = "" if data.id is None else replace_surrogates(to_name(row.get(data.id)))
    is_relabeled = label != original_label
    further_columns = (weight or 0.0, sampling_value, stratum, time, is_relabeled)
    return SourceRow(line, text, pair, label, reason, slices, group, role, row_id, *further_columns)


def _parse_weight(value: Any) -> float | None:
    """The weight of a row; None if the value is not one."""
    text = to_string(value).strip()
    try:
        weight = math.nan if "_" in text else float(text)  # Python reads 1_000 as a thousand
    except ValueError:
        return None
    return weight if math.isfinite(weight) and weight >= 0 else None


def _rename_label(label: str, names: Mapping[str, str]) -> str:
    """The label with the names of `data.labels`; those inside a list or an object by column, too."""
    if label in names or label[:1] not in ("[", "{"):
        return names.get(label, label)
    try:
        document = json.loads(label)
    except ValueError:
        return label
    values = document.values() if isinstance(document, dict) else document
    if not any(isinstance(value, str) and value in names for value in values):
        return label
    renamed = [names.get(value, value) if isinstance(value, str) else value for value in values]
    document = dict(zip(document, renamed, strict=True)) if isinstance(document, dict) else renamed
    return json.dumps(document, ensure_ascii=False)


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
    columns = " and ".join(data.text_columns)
    if any(column in row for column in data.text_columns):
        return None
    if not row:
        return f"no column {columns!r}, nor any other; write a text or remove the row"
    keys = ", ".join([*map(quote_value, islice(row, MAX_NAMED_KEYS)), *(["..."] if len(row) > MAX_NAMED_KEYS else [])])
    return f"no column {columns!r}; it has {keys}; name one of these with --set data.text=NAME, or remove the row"


def _rejection_reason(data: DataConfig, text: str, pair: str | None, label: str) -> str | None:
    """Why a row cannot be used, and what to do; None if it can."""
    label_columns, text_columns = " and ".join(data.label_columns), " and ".join(data.text_columns)
    for column, value in ((text_columns, text), (data.text_pair, pair), (label_columns, label)):
        try:
            size = len((value or "").encode())
        except UnicodeEncodeError as error:
            return f"column {column!r} {explain_encode_error(error)}"
        if size > data.max_row_bytes:
            return f"column {column!r} has {size:,} bytes; split it, or raise data.max_row_bytes={data.max_row_bytes:,}"
    if not text.strip() and not (pair or "").strip():
        return f"column {text_columns!r} is empty; write a text or remove the row"
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
