"""Answers as JSON, byte for byte as the standard library writes them; and the shape of a document from its bytes."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from serve.replies import labels_to_json, to_json
from serve.schemas.predict import JsonSize, measure_json

LABELS = st.text(st.characters(exclude_categories=["Cs"]))
SCORES = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
ANSWER = st.tuples(LABELS, SCORES).map(lambda pair: {"label": pair[0], "score": pair[1]})
ANSWERS = st.lists(st.lists(ANSWER, max_size=4), max_size=4)


@given(ANSWERS)
def test_labels_with_scores_are_written_as_any_json(answers: list[list[dict[str, object]]]) -> None:
    assert labels_to_json(answers) == to_json(answers)
    assert json.loads(labels_to_json(answers)) == answers


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_not_written(score: float) -> None:
    for write in (to_json, labels_to_json):
        with pytest.raises(ValueError):  # noqa: PT011  # it has no code
            write([[{"label": "a", "score": 0.5}, {"label": "b", "score": score}]])


MAX_ITEMS = 100
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{},:\n\u00e9', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{,', max_size=3), inner, max_size=4),
    max_leaves=12,
)


def counted(document: Any) -> tuple[int, int]:
    """Depth and values, an empty list or object as one more."""
    if not isinstance(document, list | dict):
        return 0, 1
    inner = [counted(value) for value in (document.values() if isinstance(document, dict) else document)]
    return 1 + max((depth for depth, _ in inner), default=0), 1 + (sum(values for _, values in inner) or 1)


@given(DOCUMENTS)
def test_it_is_that_of_the_parsed_document(document: Any) -> None:
    depth, values = counted(document)
    for body in (json.dumps(document), json.dumps(document, ensure_ascii=False, indent=1)):
        assert measure_json(body.encode(), 10_000) == JsonSize(depth, values)


def test_what_is_inside_a_text_does_not_count_even_without_its_end() -> None:
    assert measure_json(b'"[[[[,,,,\\"]]]"', MAX_ITEMS) == JsonSize(0, 1)
    assert measure_json(b'["[[[[,,,,\\", {{{', MAX_ITEMS) == JsonSize(1, 2)
    assert measure_json(b'["\\', MAX_ITEMS) == JsonSize(1, 2)


def test_counting_ends_where_there_is_too_much() -> None:
    for hostile in (b"[" * 1_000_000, b"]" * 1_000_000, b",1" * 500_000, b'"",' * 333_333, b'""' * 500_000):
        size = measure_json(hostile, MAX_ITEMS)
        assert (size.depth, size.num_values > MAX_ITEMS) == (0, True)
    assert measure_json(b"[" * 99 + b"]" * 99, MAX_ITEMS) == JsonSize(99, 100)
