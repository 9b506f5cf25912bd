"""Bytes of a file -> its rows, by format, and values of columns -> texts. An unreadable row becomes a reason.

CoNLL files have one token per line, columns separated by a tab or by blanks, an empty line after each sentence, and
`-DOCSTART-` lines between documents (Tjong Kim Sang and De Meulder 2003). Tags may be BIO (IOB2), IOB1 or IO: they
become BIO. A sentence that cannot be used keeps its line and the reason.
"""

import csv
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple

from rtrain.config import DataConfig
from rtrain.core.errors import quote_value
from rtrain.data.file_ranges import WHOLE_FILE, FilePart, list_row_groups
from rtrain.tasks.encode import canonical_name

ESCAPED_QUOTE_REASON = (
    "a quote behind a backslash; write --set 'data.escape=\\' if backslashes escape quotes, or double the quote"
)
"""Reason of a row of invalid csv if an escaped quote is the likely cause."""
_ESCAPED_QUOTE = re.compile(r'\\["\\\n]|"')


def iter_csv_rows(
    file: IO[bytes], format: str, lines_before: int = 0, delimiter: str = ",", escape: str = ""
) -> Iterator[tuple[int, list[str] | str]]:
    """(line, values) of each line or row, or (line, reason) if it cannot be read; a blank line has no values. `file`
    begins after `lines_before` lines. `delimiter` separates the columns of a csv file; with `escape`, a backslash
    escapes quotes inside quotes."""
    # A row of a megabyte must become a bad row with its line, not csv's error "field larger than field limit".
    csv.field_size_limit(1 << 30)
    # Tab-separated files have no quoting by convention: a quote is a character of the text.
    options: dict[str, Any] = {"delimiter": delimiter}
    if format == "tsv":
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    ended = False
    raw_lines: list[str] = []
    row_lines: list[str] = []

    def iter_lines() -> Iterator[str]:
        nonlocal ended
        for text in _decode_lines(file, lines_before):
            raw_lines.append(text)
            if format == "csv" and (escape or ' "' in text or '\t"' in text):
                # A row continues in the next line only inside quotes.
                text = _normalize_csv_line(text, bool(row_lines), delimiter, escape)
            row_lines.append(text)
            yield text
        ended = True

    reader = csv.reader(iter_lines(), **options)
    while True:
        line = lines_before + reader.line_num + 1
        raw_lines.clear()
        row_lines.clear()
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error:
            quote = "replace it by a blank" if format == "tsv" else "quote the text"
            yield line, f"a carriage return outside quotes; {quote}, or end lines by a newline"
            continue
        # A stray quote can swallow the rows after it. Each of their lines is reported as bad: one bad row could hide
        # half the file.
        last = lines_before + reader.line_num
        is_escaped = format == "csv" and not escape and '\\"' in "".join(row_lines)
        if is_escaped and (ended or _has_text_after_quote(row_lines, delimiter)):
            yield from ((number, ESCAPED_QUOTE_REASON) for number in range(line, last + 1))
        elif ended:
            reason = f"the quote that opens in line {line} is never closed; close it, or double quotes of text"
            yield from ((number, reason) for number in range(line, last + 1))
        elif line < last and _has_text_after_quote(row_lines, delimiter):
            reason = f"text follows the quote that closes in line {last} what line {line} opens; double quotes of text"
            yield from ((number, reason) for number in range(line, last + 1))
        elif raw_lines != row_lines and not escape and _has_text_after_quote(row_lines, delimiter):
            yield line, next(csv.reader(raw_lines, **options))  # a text that begins with a quoted word
        else:
            yield line, values


def _normalize_csv_line(line: str, in_quotes: bool, delimiter: str, escape: str) -> str:
    """A line without the blanks before a quoted field, and with doubled quotes in place of escaped ones. `in_quotes`:
    the line begins inside quotes."""
    if escape and escape in line:
        line = _unescape_quotes(line, in_quotes)
    blanks, first, field = _compile_quote_patterns(delimiter)
    if line[0] not in " \t" and not blanks.search(line):
        return line
    start = first.match(line).end() if in_quotes else 0  # type: ignore[union-attr]  # matches any text
    return line[:start] + field.sub(r"\1", line[start:])


@lru_cache(8)
def _compile_quote_patterns(delimiter: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Expressions for blanks before a quote that may open a field, for the rest of a quoted field, and for a field."""
    sign, blanks = re.escape(delimiter), "[ ]" if delimiter == "\t" else "[ \t]"
    rest = rf'[^"]*+(?:""[^"]*+)*+"?+[^{sign}]*+{sign}?+'
    return (
        re.compile(rf'{sign}{blanks}++"'),
        re.compile(rest),
        re.compile(rf'(?:{blanks}++(?="))?+("{rest}|[^{sign}]*+{sign}?+)'),
    )


def _unescape_quotes(line: str, in_quotes: bool) -> str:
    """The line with backslash-escaped quotes replaced by doubled quotes, inside quotes."""

    def replace(match: re.Match[str]) -> str:
        nonlocal in_quotes
        if match[0] == '"':
            in_quotes = not in_quotes
        elif in_quotes:
            return '""' if match[0][1] == '"' else match[0][1]
        return match[0]

    return _ESCAPED_QUOTE.sub(replace, line)


def _has_text_after_quote(lines: list[str], delimiter: str) -> bool:
    """Whether text follows a closing quote: the two quotes are then unlikely to be a pair."""
    try:
        next(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error:
        return True
    return False


def iter_json_rows(file: IO[bytes], lines_before: int = 0) -> Iterator[tuple[int, Any]]:
    """(line, document) of each line that is not blank; the document is None if the line is not JSON."""
    for number, line in enumerate(_decode_lines(file, lines_before), start=lines_before + 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):  # ValueError: not JSON, or a number of thousands of digits
            yield number, None


def _decode_lines(file: IO[bytes], lines_before: int) -> Iterator[str]:
    """Lines as text. Bytes that are not UTF-8 become lone surrogates, so their row is bad, not the file."""
    first = lines_before == 0
    for line in file:
        text = line.decode("utf-8", errors="surrogateescape")
        yield text.removeprefix("\ufeff") if first else text
        first = False


def read_arrow_schema(file: IO[bytes], format: str) -> Any:
    """The Arrow schema of a parquet or `datasets` file."""
    import pyarrow.ipc
    import pyarrow.parquet

    if format == "parquet":
        return pyarrow.parquet.ParquetFile(file).schema_arrow
    return pyarrow.ipc.open_stream(file).schema


def measure_arrow_file(file: IO[bytes], format: str) -> tuple[Any, int, int]:
    """The Arrow schema of a parquet or `datasets` file, its number of rows, and their approximate bytes in memory."""
    import pyarrow.ipc
    import pyarrow.parquet

    if format == "parquet":
        opened = pyarrow.parquet.ParquetFile(file)
        groups = (opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups))
        return opened.schema_arrow, opened.metadata.num_rows, sum(group.total_byte_size for group in groups)
    rows = size = 0
    stream = pyarrow.ipc.open_stream(file)
    for batch in stream:
        rows, size = rows + batch.num_rows, size + batch.nbytes
    return stream.schema, rows, size


def iter_arrow_batches(file: IO[bytes], format: str, first_row: int) -> Iterator[Any]:
    """The Arrow batches of a parquet or `datasets` file from the row `first_row` (from 0) on, with all columns."""
    import pyarrow.ipc
    import pyarrow.parquet

    batches: Iterable[Any]
    if format == "parquet":
        opened = pyarrow.parquet.ParquetFile(file)
        _, rows_before = list_row_groups(opened.metadata)
        group = max((number for number, rows in enumerate(rows_before) if rows <= first_row), default=0)
        first_row -= rows_before[group] if rows_before else 0
        batches = opened.iter_batches(1024, list(range(group, len(rows_before))))
    else:
        batches = pyarrow.ipc.open_stream(file)
    for batch in batches:
        if first_row < batch.num_rows:
            yield batch.slice(first_row)
        first_row = max(0, first_row - batch.num_rows)


class _UnreadableValue(NamedTuple):
    """A value that cannot be converted to a Python object."""

    reason: str


def iter_arrow_rows(
    file: IO[bytes], format: str, columns: list[str], part: FilePart = WHOLE_FILE
) -> Iterator[dict[str, Any] | str]:
    """The columns of each row by name, or the reason why it cannot be read.

    A part of a parquet file has the rows of the row groups that begin in it.
    """
    import pyarrow.ipc
    import pyarrow.parquet

    if format == "parquet":
        opened = pyarrow.parquet.ParquetFile(file)
        firsts, _ = list_row_groups(opened.metadata)
        groups = [number for number, first in enumerate(firsts) if part.start <= first < part.stop]
        batches: Iterable[Any] = opened.iter_batches(4096, groups, columns=columns)
        names = _read_class_names(opened.schema_arrow)
    else:
        stream = pyarrow.ipc.open_stream(file)
        batches, names = stream, _read_class_names(stream.schema)
    for batch in batches:
        lists = {column: _to_python_values(column, batch.column(column)) for column in columns}
        for column in columns:
            if (class_names := names.get(column)) is not None:
                lists[column] = [_name_classes(column, value, class_names) for value in lists[column]]
        yield from _zip_columns(lists)


def iter_table_rows(table: Any, columns: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    """The columns of each row of an Arrow table or batch by name, or the reason why it cannot be read."""
    yield from _zip_columns({column: _to_python_values(column, table.column(column)) for column in columns})


def _zip_columns(lists: dict[str, list[Any]]) -> Iterator[dict[str, Any] | str]:
    for values in zip(*lists.values(), strict=True):
        bad = next((value.reason for value in values if isinstance(value, _UnreadableValue)), None)
        yield bad or dict(zip(lists, values, strict=True))


def _to_python_values(column: str, array: Any) -> list[Any]:
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        return [_to_python_value(column, scalar) for scalar in array]


def _to_python_value(column: str, scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _UnreadableValue(f"column {column!r} is not UTF-8; write the file again with texts that are")
    except (ValueError, OverflowError) as error:
        return _UnreadableValue(f"column {column!r} holds an unreadable value ({quote_value(str(error))}); correct it")


def _name_classes(column: str, value: Any, class_names: list[str]) -> Any:
    """The name of the class that `value` numbers, or those of a list; None for a negative number, which means no
    class."""
    if isinstance(value, list):
        names = [_name_classes(column, inner, class_names) for inner in value]
        return next((inner for inner in names if isinstance(inner, _UnreadableValue)), names)
    if not isinstance(value, int):
        return value
    if value >= len(class_names):
        return _UnreadableValue(
            f"column {column!r} is class {value}, and the file names {len(class_names)}; write the data set again"
        )
    return class_names[value] if value >= 0 else None


def _read_class_names(schema: Any) -> dict[str, list[str]]:
    """Class names by column. Arrow and Parquet files of `datasets` hold integer codes, with the names in the schema's
    metadata."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    return {column: names for column, feature in features.items() if (names := _find_class_names(feature)) is not None}


def _find_class_names(feature: Any) -> list[str] | None:
    """The names of a feature's classes, also where it is a list of classes."""
    if isinstance(feature, list):
        return _find_class_names(feature[0]) if feature else None
    if not isinstance(feature, dict):
        return None
    names = feature.get("names")
    return names if isinstance(names, list) else _find_class_names(feature.get("feature"))


def iter_sheet_rows(file: IO[bytes], sheet: str) -> Iterator[tuple[int, list[Any]]]:
    """(number of the row in its sheet, cells) of each row of an xlsx file that is not blank: first the names of the
    columns. Columns without a name are left out. Formulas have their stored values.

    Raises `OSError` if the file is no xlsx file or has no such sheet.
    """
    try:
        import openpyxl
    except ImportError:
        raise OSError("openpyxl reads it and is not installed: pip install rtrain[xlsx]") from None
    try:
        workbook = openpyxl.load_workbook(file, read_only=True, data_only=True)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise OSError(f"no xlsx file: {error}") from None
    if sheet and sheet not in workbook.sheetnames:
        raise OSError(f"no sheet {sheet!r}; it has {', '.join(workbook.sheetnames)}")
    opened_sheet = workbook[sheet] if sheet else workbook.worksheets[0]
    opened_sheet.reset_dimensions()  # other programs write wrong ones
    columns: list[int] = []
    for number, cells in enumerate(opened_sheet.iter_rows(values_only=True), start=1):
        if all(cell is None for cell in cells):
            continue
        if not columns:
            columns = [place for place, cell in enumerate(cells) if cell is not None and str(cell).strip()]
            yield number, [str(cells[place]).strip() for place in columns]
            continue
        yield number, [cells[place] if place < len(cells) else None for place in columns]
    if not columns:
        raise OSError("the sheet has no rows")


# --------------------------------------------------------------------------------------------------------------- CoNLL

_TAG = re.compile(r"O|[BI]-.+")
# Only blanks separate: a token may hold a no-break space, at which str.split() would cut it.
_SEPARATOR = re.compile(" +")


class Sentence(NamedTuple):
    """One sentence. `line` is the line of its first token, from 1; `reason` says why it cannot be used, or is None.

    A sentence with a reason has no tokens, since one bad line makes the tags of the others doubtful.
    """

    line: int
    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    reason: str | None


class _InvalidLine(Exception):
    """Why a line cannot be used, and what to do."""


def read_sentences(file: IO[bytes], labeled: bool = True) -> Iterator[Sentence]:
    """The sentences of a file, in order: a line's first column is the token, its last the tag.

    Without `labeled`, tags are optional and are kept verbatim. The file's first line with both columns sets the number
    of columns of every line.
    """
    columns, min_columns = 0, 2 if labeled else 1
    start, tokens, tags, reason = 0, list[str](), list[str](), ""
    for number, line in enumerate(_decode_lines(file, 0), start=1):
        content = line.rstrip("\r\n")
        if not content.strip(" \t") or content.startswith("-DOCSTART-"):
            if start:
                yield _make_sentence(start, tokens, tags, reason or _check_numbered_tokens(tokens, columns), labeled)
            start, tokens, tags, reason = 0, [], [], ""
            continue
        start = start or number
        try:
            values = content.split("\t") if "\t" in content else _SEPARATOR.split(content.strip(" "))
            if len(values) < min_columns or len(values) != (columns or len(values)):
                has = f"has {len(values)} column{'s' * (len(values) != 1)} instead of {columns or min_columns}"
                raise _InvalidLine(f"{has}; separate columns by one tab, or by blanks")
            columns = len(values)
            tokens.append(_validate_token(values[0]))
            if labeled:
                tags.append(_validate_tag(values[-1].strip(" ")))
            elif columns > 1:
                tags.append(replace_surrogates(values[-1].strip(" ")))
        except _InvalidLine as bad:
            reason = reason or f"line {number} {bad}"
    if start:
        yield _make_sentence(start, tokens, tags, reason or _check_numbered_tokens(tokens, columns), labeled)


def _check_numbered_tokens(tokens: Sequence[str], columns: int) -> str:
    """Why the first column cannot hold words, or an empty text: some files number the words in it."""
    if columns < 3 or len(tokens) < 3 or tokens != [str(number) for number in range(1, len(tokens) + 1)]:
        return ""
    return "its first column counts the words; write the words in the first column and BIO tags in the last"


def to_bio(tags: Sequence[str]) -> tuple[str, ...]:
    """BIO tags for tags that are BIO, IOB1 or IO: an entity begins at each B-, and at each I- that follows no tag of
    its type.

    Two IO entities of one type that touch become one, since IO tags do not show the border.
    """
    bio_tags: list[str] = []
    previous_type = ""
    for tag in tags:
        prefix, _, type = tag.partition("-")
        begins = prefix == "B" or type != previous_type
        bio_tags.append(f"{'B' if begins else 'I'}-{type}" if type else "O")
        previous_type = type
    return tuple(bio_tags)


def _make_sentence(start: int, tokens: list[str], tags: list[str], reason: str, labeled: bool) -> Sentence:
    if reason:
        return Sentence(start, (), (), reason)
    are_tags = labeled or all(_TAG.fullmatch(tag) for tag in tags)
    return Sentence(start, tuple(tokens), to_bio(tags) if are_tags else tuple(tags), None)


def _validate_token(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _InvalidLine("is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8, or from utf-16") from None
    if "\r" in value:
        raise _InvalidLine("holds a carriage return; end lines by a newline")
    if not value.strip(" "):
        raise _InvalidLine("has an empty token; write one or remove the line")
    return value


def _validate_tag(value: str) -> str:
    if _TAG.fullmatch(value) is None:
        raise _InvalidLine(f"has the tag {value[:40]!a}, not O, B-TYPE or I-TYPE; write BIO tags in the last column")
    return value


# -------------------------------------------------------------------------------------------------------------- values

FIXED_COLUMNS = {"conll": ("tokens", "tags"), "squad": ("id", "title", "question", "context", "answers")}
"""The columns of formats that do not name them in the file."""


SURROGATE_BYTES = range(0xDC80, 0xDD00)
"""Surrogates that `surrogateescape` makes of bytes that are not UTF-8; other lone surrogates were in the file, as in
JSON."""


NULL = "\\N"
"""The text that databases write to csv and tsv for a missing value."""


def validate_words(data: DataConfig, row: Mapping[str, Any]) -> str | None:
    """Why a text column's list cannot be words, or None. Nulls and objects are not words."""
    for column in (*data.text_columns, data.text_pair):
        value = row.get(column) if column else None
        if isinstance(value, list) and not all(isinstance(word, str | int | float) for word in value):
            return f'column {column!r} is a list of more than words; write texts, e.g. ["to", "be"]'
    return None


def to_text(value: Any) -> str:
    """The value as text. A list of words is joined by single blanks, and blanks inside a word become underscores, so
    that the words can be told apart again."""
    if value == NULL:
        return ""
    return " ".join(str(word).replace(" ", "_") for word in value) if isinstance(value, list) else to_string(value)


def to_string(value: Any) -> str:
    """The value as text: null and NaN are empty, lists and objects are JSON, bytes are decoded (`surrogateescape`)."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=to_string)
    return value if isinstance(value, str) else str(value)


def to_name(value: Any) -> str:
    """The value as what rows are sorted by: a label, a slice, a group. A column of whole numbers with a gap is one of
    floats in a Parquet file, and not in the next one."""
    is_whole_number = isinstance(value, float) and value.is_integer()
    name = to_string(int(value) if is_whole_number else value).strip()
    return "" if name == NULL else canonical_name(name)


def is_json_list(label: str) -> bool:
    """Whether a label is a JSON list; a label that begins with a bracket need not be."""
    try:
        return label.startswith("[") and isinstance(json.loads(label), list)
    except ValueError:
        return False


def explain_encode_error(error: UnicodeEncodeError) -> str:
    """Explain why a text cannot be encoded as UTF-8, with a fix."""
    if ord(error.object[error.start]) in SURROGATE_BYTES:
        return "is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"
    return "holds half of a character (as \\ud83d, of an emoji); write it whole"


def replace_surrogates(text: str) -> str:
    """Replace each lone surrogate by a question mark: Arrow, HTML and terminals cannot encode surrogates."""
    return text.encode("utf-8", "replace").decode()
