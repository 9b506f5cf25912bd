"""A column's value, of whatever type the file has given it -> text."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rtrain.config import DataConfig
from rtrain.tasks.labels import canonical_name

SURROGATE_BYTES = range(0xDC80, 0xDD00)
"""Surrogates that `surrogateescape` makes of bytes that are not UTF-8; other lone surrogates were in the file, as in
JSON."""


NULL = "\\N"
"""The text that databases write to csv and tsv for a missing value."""


def validate_words(data: DataConfig, row: Mapping[str, Any]) -> str | None:
    """Why a text column's list cannot be words, or None. Nulls and objects are not words."""
    for column in (data.text, data.text_pair):
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
