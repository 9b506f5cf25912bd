"""Groups of a split's rows: every row in one of them, small ones together."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings, strategies as st

from rtrain.metrics import slices


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=80), st.integers(0, 10))
def test_every_row_is_in_one_group(values: list[str | None], min_rows: int) -> None:
    result = slices.group_rows(values, min_rows)
    assert sorted(row for group in result for row in group.rows) == list(range(len(values)))
    assert sum(len(group.rows) < min_rows for group in result) <= 1  # only that of small ones, or a single small value
    assert all(len(group.merged_values) != 1 for group in result)  # a single small value keeps its name


def test_all_but_the_most_frequent_values_are_one() -> None:
    values = [*"aaaa", *"bbb", *"cc", *"dd", *"e"]
    result = slices.group_rows(values, min_rows=1, max_groups=2)
    assert [(entry.value, entry.rows.tolist(), entry.merged_values) for entry in result] == [
        ("a", [0, 1, 2, 3], ()),
        ("b", [4, 5, 6], ()),
        ("(the 3 rarest values)", [7, 8, 9, 10, 11], ("c", "d", "e")),
    ]
    # Ties are sorted by name: values with equally many rows are not all merged.
    assert [entry.value for entry in slices.group_rows([*"abcd"] * 5, min_rows=1, max_groups=2)] == [
        "a",
        "b",
        "(the 2 rarest values)",
    ]


@settings(deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=50), st.integers(1, 6))
def test_quantile_ranges_do_not_overlap_and_hold_their_numbers(numbers: list[int], parts: int) -> None:
    labels = slices.bin_by_quantile(numbers, parts)
    order = [label for _, label in sorted(zip(numbers, labels, strict=True), key=lambda pair: pair[0])]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == len(set(labels)) - 1 < parts
    for number in set(numbers):
        assert len({label for value, label in zip(numbers, labels, strict=True) if value == number}) == 1
    assert np.unique(labels).size <= parts
    assert slices.bin_by_quantile([]) == []
