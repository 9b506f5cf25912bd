"""How deep a JSON document is nested and how many values it has, told from its bytes before a parser makes them."""

import re
from typing import NamedTuple

# The end of the document ends a string that has no other: what is inside it must not count. Possessive, so that a
# hostile string is read once.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Shape(NamedTuple):
    depth: int
    """Lists and objects within each other; none in a document that is a text or a number."""
    values: int
    """Commas and opening brackets, and one: as many values, a few more where lists are empty."""


def shape(body: bytes, most_values: int) -> Shape:
    """The shape of `body`. Nothing is counted further in one that has more than `most_values`, and its depth is 0: what
    this costs is bounded by the length and by `most_values`."""
    # A value has a name at most, so that it is two texts.
    bare, texts = _STRING.subn(b"", body, 2 * most_values + 1)
    if texts > 2 * most_values:
        return Shape(0, texts)
    brackets = bare.translate(None, _NOT_BRACKETS)
    values = 1 + bare.count(b",") + brackets.count(b"[") + brackets.count(b"{")
    if max(values, len(brackets) // 2) > most_values:
        return Shape(0, max(values, len(brackets) // 2))
    depth = deepest = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return Shape(deepest, values)
