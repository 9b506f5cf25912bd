"""Slices of a split: every row in one of them, worst first, small ones together."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.errors import UserError
from rtrain.metrics import additive, slices
from rtrain.metrics.slices import Slice

LANGUAGES = ["en", "en", "de", "de", "de", "fr", "it", None]
RIGHT = additive.means({"accuracy": [1, 1, 0, 1, 0, 0, 1, 1]})


def test_worst_first_with_counts_and_small_ones_merged() -> None:
    found = slices.by_column(LANGUAGES, RIGHT.of, "accuracy", least=2)
    merged = ("(none)", "fr", "it")
    assert found == [
        Slice("de", 3, {"accuracy": 1 / 3}),
        Slice("(3 values with fewer than 2 rows)", 3, {"accuracy": 2 / 3}, merged),
        Slice("en", 2, {"accuracy": 1.0}),
    ]


def test_a_single_small_value_keeps_its_name() -> None:
    found = slices.by_column(["a", "a", "b"], additive.means({"x": [1, 1, 0]}).of, "x", least=2)
    assert [(item.value, item.rows, item.merged) for item in found] == [("b", 1, ()), ("a", 2, ())]


def test_where_smaller_is_better_the_largest_is_first_and_equals_are_ordered() -> None:
    error = additive.means({"mae": [1, 2, 2, 2]})
    found = slices.by_column(["a", "c", "b", "b"], error.of, "mae", larger_is_better=False, least=1)
    assert [item.value for item in found] == ["b", "c", "a"]


def test_a_score_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="no score 'f1'; there are accuracy"):
        slices.by_column(LANGUAGES, RIGHT.of, "f1")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 1)), max_size=80), st.integers(0, 10))
def test_every_row_is_in_one_slice(rows: list[tuple[str, int]], least: int) -> None:
    values = [row[0] for row in rows]
    scores = additive.means({"x": [row[1] for row in rows]})
    found = slices.by_column(values, scores.of, "x", least=least)
    assert sum(item.rows for item in found) == len(rows)
    assert sum(item.rows * item.scores["x"] for item in found) == pytest.approx(sum(row[1] for row in rows))
    worst = [item.scores["x"] for item in found]
    assert worst == sorted(worst)
    assert sum(item.rows < least for item in found) <= 1  # only the slice of small ones, or a single small value


def test_all_but_the_most_frequent_values_are_one() -> None:
    values = [*"aaaa", *"bbb", *"cc", *"dd", *"e"]
    found = slices.groups(values, least=1, most=2)
    assert [(one.value, one.rows.tolist(), one.merged) for one in found] == [
        ("a", [0, 1, 2, 3], ()),
        ("b", [4, 5, 6], ()),
        ("(the 3 rarest values)", [7, 8, 9, 10, 11], ("c", "d", "e")),
    ]
    # Equals go by name: values of equally many rows are not all merged.
    assert [one.value for one in slices.groups([*"abcd"] * 5, least=1, most=2)] == ["a", "b", "(the 2 rarest values)"]


def test_quantiles_by_hand() -> None:
    assert slices.quantiles([1, 2, 3, 4], parts=2) == ["1 to 2", "1 to 2", "3 to 4", "3 to 4"]
    assert slices.quantiles([5, 5, 5, 9], parts=4) == ["5", "5", "5", "9"]
    assert slices.quantiles([]) == []


@settings(deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=50), st.integers(1, 6))
def test_quantile_ranges_do_not_overlap_and_hold_their_numbers(numbers: list[int], parts: int) -> None:
    labels = slices.quantiles(numbers, parts)
    order = [label for _, label in sorted(zip(numbers, labels, strict=True), key=lambda pair: pair[0])]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == len(set(labels)) - 1 < parts
    for number in set(numbers):
        assert len({label for value, label in zip(numbers, labels, strict=True) if value == number}) == 1
    assert np.unique(labels).size <= parts
