"""Bytes of a file -> its rows, by format. An unreadable row becomes a reason, not an exception."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple

from rtrain.core.errors import quote_value
from rtrain.data.sources.file_ranges import WHOLE_FILE, FilePart, list_row_groups

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

    return (
        pyarrow.parquet.ParquetFile(file).schema_arrow if format == "parquet" else pyarrow.ipc.open_stream(file).schema
    )


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


def iter_conll_rows(file: IO[bytes], labeled: bool = True) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line, row) of each sentence; its columns `tokens` and `tags` are lists. A bad sentence gives its reason."""
    from rtrain.data.readers import conll

    for sentence in conll.read_sentences(file, labeled=labeled):
        yield sentence.line, sentence.reason or {"tokens": list(sentence.tokens), "tags": list(sentence.tags)}


def iter_squad_rows(file: IO[bytes], labeled: bool = True) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(number, row) of each question, with columns `id`, `title`, `question`, `context`, and `answers`, a list of
    `{"text", "start"}`. A bad question gives its reason."""
    from rtrain.data.readers import squad

    for row in squad.read_questions(file, labeled):
        answers = [answer._asdict() for answer in row.answers]
        columns = {"id": row.id, "title": row.title, "question": row.question, "context": row.context}
        yield row.line, row.reason or {**columns, "answers": answers}


FIXED_COLUMNS = {"conll": ("tokens", "tags"), "squad": ("id", "title", "question", "context", "answers")}
"""The columns of formats that do not name them in the file."""
