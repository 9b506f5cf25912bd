"""Bytes of a file -> its rows, by format. A row that cannot be read becomes a reason, never a crash."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple

from rtrain.core.errors import quoted
from rtrain.data.sources.file_ranges import WHOLE, Part, row_groups

BACKSLASH = "a quote behind a backslash; write --set 'data.escape=\\' if backslashes escape quotes, or double the quote"
"""Reason of a row that is not valid csv, where an escaped quote is the likely cause."""
_ESCAPED = re.compile(r'\\["\\\n]|"')


def csv_rows(
    file: IO[bytes], format: str, before: int = 0, delimiter: str = ",", escape: str = ""
) -> Iterator[tuple[int, list[str] | str]]:
    """(line, values) of each line or row, or (line, reason) if it cannot be read; a blank line has no values. `file`
    begins behind `before` lines. A csv file has `delimiter` between its columns; with `escape`, a backslash escapes
    quotes inside quotes."""
    # A row of a megabyte must become a bad row with its line, not csv's error "field larger than field limit".
    csv.field_size_limit(1 << 30)
    # Tab-separated files have no quoting by convention: a quote is a character of the text.
    options: dict[str, Any] = {"delimiter": delimiter}
    if format == "tsv":
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    ended = False
    raw_lines: list[str] = []
    taken: list[str] = []

    def lines() -> Iterator[str]:
        nonlocal ended
        for text in _text(file, before):
            raw_lines.append(text)
            if format == "csv" and (escape or ' "' in text or '\t"' in text):
                # A row goes on in the next line only inside quotes.
                text = _as_plain_csv(text, bool(taken), delimiter, escape)
            taken.append(text)
            yield text
        ended = True

    reader = csv.reader(lines(), **options)
    while True:
        line = before + reader.line_num + 1
        raw_lines.clear()
        taken.clear()
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error:
            quote = "replace it by a blank" if format == "tsv" else "quote the text"
            yield line, f"a carriage return outside quotes; {quote}, or end lines by a newline"
            continue
        # Where a quote that is text has taken following rows with it, each of their lines is told as bad: a single bad
        # row could hide half the file.
        last = before + reader.line_num
        is_escaped = format == "csv" and not escape and '\\"' in "".join(taken)
        if is_escaped and (ended or _is_torn(taken, delimiter)):
            yield from ((number, BACKSLASH) for number in range(line, last + 1))
        elif ended:
            reason = f"the quote that opens in line {line} is never closed; close it, or double one that is text"
            yield from ((number, reason) for number in range(line, last + 1))
        elif line < last and _is_torn(taken, delimiter):
            reason = f"text follows the quote that closes in line {last} what line {line} opens; double quotes of text"
            yield from ((number, reason) for number in range(line, last + 1))
        elif raw_lines != taken and not escape and _is_torn(taken, delimiter):
            yield line, next(csv.reader(raw_lines, **options))  # a text that begins with a quoted word
        else:
            yield line, values


def _as_plain_csv(line: str, in_quotes: bool, delimiter: str, escape: str) -> str:
    """A line without the blanks before a quoted field, and with doubled quotes in place of escaped ones. `in_quotes`:
    the line begins inside quotes."""
    if escape and escape in line:
        line = _unescaped(line, in_quotes)
    blanks, first, field = _quote_expressions(delimiter)
    if line[0] not in " \t" and not blanks.search(line):
        return line
    start = first.match(line).end() if in_quotes else 0  # type: ignore[union-attr]  # matches any text
    return line[:start] + field.sub(r"\1", line[start:])


@lru_cache(8)
def _quote_expressions(delimiter: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Expressions for blanks before a quote that may open a field, for the rest of a quoted field, and for a field."""
    sign, blanks = re.escape(delimiter), "[ ]" if delimiter == "\t" else "[ \t]"
    rest = rf'[^"]*+(?:""[^"]*+)*+"?+[^{sign}]*+{sign}?+'
    return (
        re.compile(rf'{sign}{blanks}++"'),
        re.compile(rest),
        re.compile(rf'(?:{blanks}++(?="))?+("{rest}|[^{sign}]*+{sign}?+)'),
    )


def _unescaped(line: str, in_quotes: bool) -> str:
    """A line with doubled quotes in place of those that a backslash escapes inside quotes."""

    def replace(match: re.Match[str]) -> str:
        nonlocal in_quotes
        if match[0] == '"':
            in_quotes = not in_quotes
        elif in_quotes:
            return '""' if match[0][1] == '"' else match[0][1]
        return match[0]

    return _ESCAPED.sub(replace, line)


def _is_torn(lines: list[str], delimiter: str) -> bool:
    """Whether text stands behind a closing quote: the quotes are then hardly a pair."""
    try:
        next(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error:
        return True
    return False


def json_rows(file: IO[bytes], before: int = 0) -> Iterator[tuple[int, Any]]:
    """(line, document) of each line that is not blank; the document is None if the line is not JSON."""
    for number, line in enumerate(_text(file, before), start=before + 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):  # ValueError: not JSON, or a number of thousands of digits
            yield number, None


def _text(file: IO[bytes], before: int) -> Iterator[str]:
    """Lines as text. Bytes that are not UTF-8 become lone surrogates, so that their row is refused, not the file."""
    first = before == 0
    for line in file:
        text = line.decode("utf-8", errors="surrogateescape")
        yield text.removeprefix("\ufeff") if first else text
        first = False


def arrow_schema(file: IO[bytes], format: str) -> Any:
    """The Arrow schema of a parquet or `datasets` file."""
    import pyarrow.ipc
    import pyarrow.parquet

    return (
        pyarrow.parquet.ParquetFile(file).schema_arrow if format == "parquet" else pyarrow.ipc.open_stream(file).schema
    )


def arrow_size(file: IO[bytes], format: str) -> tuple[Any, int, int]:
    """The Arrow schema of a parquet or `datasets` file, its rows, and the bytes that they take in memory, about."""
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


def arrow_batches(file: IO[bytes], format: str, first: int) -> Iterator[Any]:
    """The Arrow batches of a parquet or `datasets` file from the row `first` (from 0) on, with all columns."""
    import pyarrow.ipc
    import pyarrow.parquet

    batches: Iterable[Any]
    if format == "parquet":
        opened = pyarrow.parquet.ParquetFile(file)
        _, before = row_groups(opened.metadata)
        group = max((number for number, rows in enumerate(before) if rows <= first), default=0)
        first -= before[group] if before else 0
        batches = opened.iter_batches(1024, list(range(group, len(before))))
    else:
        batches = pyarrow.ipc.open_stream(file)
    for batch in batches:
        if first < batch.num_rows:
            yield batch.slice(first)
        first = max(0, first - batch.num_rows)


class _Bad(NamedTuple):
    """Stands for a value that cannot be turned into a Python object."""

    reason: str


def arrow_rows(file: IO[bytes], format: str, columns: list[str], part: Part = WHOLE) -> Iterator[dict[str, Any] | str]:
    """The columns of each row by name, or the reason why it cannot be read.

    A part of a parquet file has the rows of the row groups that begin in it.
    """
    import pyarrow.ipc
    import pyarrow.parquet

    if format == "parquet":
        opened = pyarrow.parquet.ParquetFile(file)
        firsts, _ = row_groups(opened.metadata)
        groups = [number for number, first in enumerate(firsts) if part.start <= first < part.stop]
        batches: Iterable[Any] = opened.iter_batches(4096, groups, columns=columns)
        names = _class_names(opened.schema_arrow)
    else:
        stream = pyarrow.ipc.open_stream(file)
        batches, names = stream, _class_names(stream.schema)
    for batch in batches:
        lists = {column: _values(column, batch.column(column)) for column in columns}
        for column in columns:
            if (known := names.get(column)) is not None:
                lists[column] = [_named(column, value, known) for value in lists[column]]
        yield from _joined(lists)


def table_rows(table: Any, columns: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    """The columns of each row of an Arrow table or batch by name, or the reason why it cannot be read."""
    yield from _joined({column: _values(column, table.column(column)) for column in columns})


def _joined(lists: dict[str, list[Any]]) -> Iterator[dict[str, Any] | str]:
    for values in zip(*lists.values(), strict=True):
        bad = next((value.reason for value in values if isinstance(value, _Bad)), None)
        yield bad or dict(zip(lists, values, strict=True))


def _values(column: str, array: Any) -> list[Any]:
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        return [_value(column, scalar) for scalar in array]


def _value(column: str, scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _Bad(f"column {column!r} is not UTF-8; write the file again with texts that are")
    except (ValueError, OverflowError) as error:
        return _Bad(f"column {column!r} holds what cannot be read ({quoted(str(error))}); correct it")


def _named(column: str, value: Any, known: list[str]) -> Any:
    """The name of the class that `value` numbers, or those of a list; None for a negative number, which means no
    class."""
    if isinstance(value, list):
        named = [_named(column, inner, known) for inner in value]
        return next((inner for inner in named if isinstance(inner, _Bad)), named)
    if not isinstance(value, int):
        return value
    if value >= len(known):
        return _Bad(f"column {column!r} is class {value}, and the file names {len(known)}; write the data set again")
    return known[value] if value >= 0 else None


def _class_names(schema: Any) -> dict[str, list[str]]:
    """The names of a column's classes, by column. What `datasets` writes, to Arrow or Parquet, has integer codes, and
    their names in its schema's metadata."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    return {column: names for column, feature in features.items() if (names := _names_of(feature)) is not None}


def _names_of(feature: Any) -> list[str] | None:
    """The names of a feature's classes, also where it is a list of classes."""
    if isinstance(feature, list):
        return _names_of(feature[0]) if feature else None
    if not isinstance(feature, dict):
        return None
    names = feature.get("names")
    return names if isinstance(names, list) else _names_of(feature.get("feature"))


def conll_rows(file: IO[bytes], labelled: bool = True) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line, row) of each sentence; its columns `tokens` and `tags` are lists. A bad sentence gives its reason."""
    from rtrain.data.readers import conll

    for sentence in conll.read(file, labelled=labelled):
        yield sentence.line, sentence.reason or {"tokens": list(sentence.tokens), "tags": list(sentence.tags)}


def squad_rows(file: IO[bytes], labelled: bool = True) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(number, row) of each question, with columns `id`, `title`, `question`, `context`, and `answers`, a list of
    `{"text", "start"}`. A bad question gives its reason."""
    from rtrain.data.readers import squad

    for row in squad.read(file, labelled):
        answers = [answer._asdict() for answer in row.answers]
        columns = {"id": row.id, "title": row.title, "question": row.question, "context": row.context}
        yield row.line, row.reason or {**columns, "answers": answers}


COLUMNS = {"conll": ("tokens", "tags"), "squad": ("id", "title", "question", "context", "answers")}
"""The columns of formats that do not name them in the file."""
