"""Labels that are more than one text: the JSON that stands in a column -> texts, or why the row cannot be used.

A label comes from a file, so it may hold anything that JSON can say: numbers that no float holds, halves of characters,
brackets a hundred thousand deep. What is wrong with one row is that row's reason, never the end of a job.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from rtrain.core.errors import quoted

TRUTH_VALUES = {name: word for word in ("true", "false") for name in (word, word.title(), word.upper())}
"""The name of a truth value, by each spelling."""
_WHOLE = re.compile(r"(0|-?[1-9][0-9]*)\.0+")


class BadLabel(ValueError):
    """Why a label cannot be used, and what to write instead."""


def parsed(label: str, example: str) -> Any:
    """The JSON value of a label. `example` shows what the task reads."""
    try:
        return json.loads(label)
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of thousands of digits
        raise BadLabel(
            f"the label {quoted(label)} is not JSON; write {example}, with double quotes, as json.dumps does"
        ) from None


def text_of(value: Any, label: str, example: str) -> str:
    """A value of the list or object `label` as a text, under its `canonical_name`."""
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise BadLabel(f"the label {quoted(label)} holds what is no text; write {example}")
    found = canonical_name(str(value).strip())
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:
        raise BadLabel(f"the label {quoted(label)} holds half of a character; write it whole, in UTF-8") from None
    return found


def listed(label: str, example: str) -> list[str]:
    """The texts of a JSON list, without blanks beside them, as labels that stand alone are read."""
    values = parsed(label, example)
    assert isinstance(values, list)  # the label begins with a bracket
    found = [text_of(value, label, example).strip() for value in values]
    if not all(found):
        raise BadLabel(f"the label {quoted(label)} holds an empty text; leave it out, as in {example}")
    return found


def canonical_name(name: str) -> str:
    """A label's name whatever program has written it: `true` for `True`, and `1` for `1.0`, as in JSON."""
    whole = _WHOLE.fullmatch(name)
    return whole[1] if whole else TRUTH_VALUES.get(name, name)


def ordered(names: Iterable[str]) -> list[str]:
    """Labels in the order of a model's outputs: whole numbers by their value, other labels by their text."""
    names = list(names)
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def flaw_of(read: Any, label: str) -> str | None:
    """Why `read` cannot read a label, or None."""
    try:
        read(label)
    except BadLabel as bad:
        return str(bad)
    return None
