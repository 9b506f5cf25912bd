"""A column's value, of whatever type the file has given it -> text."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rtrain.config import Data
from rtrain.tasks.labels import canonical_name

DECODED = range(0xDC80, 0xDD00)
"""What `surrogateescape` makes of bytes that are no UTF-8; other halves of characters were written so, as in JSON."""


NULL = "\\N"
"""What databases write to csv and tsv in place of a missing value."""


def not_words(data: Data, row: Mapping[str, Any]) -> str | None:
    """Why a text column's list cannot be words, or None. Nulls and objects, written as text, would be words that nobody
    wrote."""
    for column in (data.text, data.text_pair):
        value = row.get(column) if column else None
        if isinstance(value, list) and not all(isinstance(word, str | int | float) for word in value):
            return f'column {column!r} is a list of more than words; write texts, e.g. ["to", "be"]'
    return None


def text_of(value: Any) -> str:
    """The value as text. A list of words is joined by single blanks, and blanks inside a word become underscores, so
    that the words can be told apart again."""
    if value == NULL:
        return ""
    return " ".join(str(word).replace(" ", "_") for word in value) if isinstance(value, list) else string(value)


def string(value: Any) -> str:
    """The value as text: null and NaN are empty, lists and objects are JSON, bytes are decoded (`surrogateescape`)."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=string)
    return value if isinstance(value, str) else str(value)


def name_of(value: Any) -> str:
    """The value as what rows are sorted by: a label, a slice, a group. A column of whole numbers with a gap is one of
    floats in a Parquet file, and not in the next one."""
    whole = isinstance(value, float) and value.is_integer()
    name = string(int(value) if whole else value).strip()
    return "" if name == NULL else canonical_name(name)


def is_list(label: str) -> bool:
    """Whether a label is written as a JSON list; one that begins with a bracket may be no more than that."""
    try:
        return label.startswith("[") and isinstance(json.loads(label), list)
    except ValueError:
        return False


def halved(error: UnicodeEncodeError) -> str:
    """What is wrong with a text that cannot be written as UTF-8, and what to do."""
    if ord(error.object[error.start]) in DECODED:
        return "is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"
    return "holds half of a character (as \\ud83d, of an emoji); write it whole"


def printable(text: str) -> str:
    """The text with a question mark in place of each lone surrogate, which Arrow, a page and a terminal cannot hold."""
    return text.encode("utf-8", "replace").decode()
