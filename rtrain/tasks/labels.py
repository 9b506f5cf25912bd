"""Labels that are lists or objects: the JSON of a column -> texts, or the reason why the row cannot be used.

A label comes from a file, so it may hold any JSON: numbers beyond float, lone surrogates, brackets a hundred
thousand deep. An invalid label makes its row bad and never ends the job.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from rtrain.core.errors import quote_value

BOOLEAN_NAMES = {name: word for word in ("true", "false") for name in (word, word.title(), word.upper())}
"""The name of a truth value, by each spelling."""
_WHOLE_NUMBER = re.compile(r"(0|-?[1-9][0-9]*)\.0+")


class InvalidLabel(ValueError):
    """Why a label cannot be used, and what to write instead."""


def parse_json_label(label: str, example: str) -> Any:
    """The JSON value of a label. `example` shows a valid label in messages."""
    try:
        return json.loads(label)
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of thousands of digits
        raise InvalidLabel(
            f"the label {quote_value(label)} is not JSON; write {example}, with double quotes, as json.dumps does"
        ) from None


def to_label_text(value: Any, label: str, example: str) -> str:
    """A value of the list or object `label` as a text, under its `canonical_name`."""
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidLabel(f"the label {quote_value(label)} holds a value that is not a text; write {example}")
    text = canonical_name(str(value).strip())
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidLabel(
            f"the label {quote_value(label)} holds half of a character; write it whole, in UTF-8"
        ) from None
    return text


def parse_label_list(label: str, example: str) -> list[str]:
    """The texts of a JSON list, stripped like single labels."""
    values = parse_json_label(label, example)
    assert isinstance(values, list)  # the label begins with a bracket
    texts = [to_label_text(value, label, example).strip() for value in values]
    if not all(texts):
        raise InvalidLabel(f"the label {quote_value(label)} holds an empty text; leave it out, as in {example}")
    return texts


def canonical_name(name: str) -> str:
    """A label's name independent of the program that wrote it: `true` for `True`, and `1` for `1.0`, as in JSON."""
    whole_number = _WHOLE_NUMBER.fullmatch(name)
    return whole_number[1] if whole_number else BOOLEAN_NAMES.get(name, name)


def sort_labels(names: Iterable[str]) -> list[str]:
    """Labels in the order of a model's outputs: whole numbers by their value, other labels by their text."""
    names = list(names)
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def validate_label(parse: Any, label: str) -> str | None:
    """Why `parse` cannot read a label, or None."""
    try:
        parse(label)
    except InvalidLabel as bad:
        return str(bad)
    return None
