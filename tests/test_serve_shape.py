"""The shape of a document from its bytes is the one that a parser finds."""

import json
from typing import Any

from hypothesis import given, strategies as st

from serve.door.shape import Shape, shape

MOST = 100
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{},:\n\u00e9', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{,', max_size=3), inner, max_size=4),
    max_leaves=12,
)


def counted(document: Any) -> tuple[int, int]:
    """Depth and values, an empty list or object as one more."""
    if not isinstance(document, list | dict):
        return 0, 1
    inner = [counted(one) for one in (document.values() if isinstance(document, dict) else document)]
    return 1 + max((depth for depth, _ in inner), default=0), 1 + (sum(values for _, values in inner) or 1)


@given(DOCUMENTS)
def test_it_is_that_of_the_parsed_document(document: Any) -> None:
    depth, values = counted(document)
    for body in (json.dumps(document), json.dumps(document, ensure_ascii=False, indent=1)):
        assert shape(body.encode(), 10_000) == Shape(depth, values)


def test_what_is_inside_a_text_does_not_count_even_without_its_end() -> None:
    assert shape(b'"[[[[,,,,\\"]]]"', MOST) == Shape(0, 1)
    assert shape(b'["[[[[,,,,\\", {{{', MOST) == Shape(1, 2)
    assert shape(b'["\\', MOST) == Shape(1, 2)


def test_counting_ends_where_there_is_too_much() -> None:
    for hostile in (b"[" * 1_000_000, b"]" * 1_000_000, b",1" * 500_000, b'"",' * 333_333, b'""' * 500_000):
        found = shape(hostile, MOST)
        assert (found.depth, found.values > MOST) == (0, True)
    assert shape(b"[" * 99 + b"]" * 99, MOST) == Shape(99, 100)
