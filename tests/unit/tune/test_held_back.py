"""Which validation rows are held back from a search's rungs: about their share, duplicates together, any order."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from rtrain.data.store.commit import assign_row_ids
from tune.holdout_scores import holdout_mask

Ids = npt.NDArray[np.uint64]


def row_ids(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_share_of_the_rows_is_held_back(share: float) -> None:
    count = 40_000
    holdout = holdout_mask(row_ids(count), share).sum()
    assert abs(holdout - share * count) < 4 * math.sqrt(count * share * (1 - share))


@given(st.integers(2, 30), st.floats(1e-12, 1 - 1e-12), st.integers(0, 2**32))
def test_of_two_rows_or_more_there_is_one_on_each_side(count: int, share: float, seed: int) -> None:
    holdout = holdout_mask(row_ids(count, seed), share)
    assert holdout.any()
    assert not holdout.all()


@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_rows_of_equal_content_are_on_one_side(content: list[int], share: float, seed: int) -> None:
    kinds = row_ids(6, seed)[content]
    holdout = holdout_mask(assign_row_ids(kinds), share)
    sides = [set(holdout[kinds == kind]) for kind in np.unique(kinds)]
    if len(sides) > 1:
        assert all(len(side) == 1 for side in sides)
    else:
        assert 0 < holdout.sum() < len(holdout)  # all rows are equal, and neither side may be empty


@given(st.integers(2, 200), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_a_rows_side_is_the_same_in_any_order(count: int, share: float, seed: int) -> None:
    ids = row_ids(count)
    order = np.random.default_rng(seed).permutation(count)
    assert np.array_equal(holdout_mask(ids, share)[order], holdout_mask(ids[order], share))


@pytest.mark.parametrize("first", [0, 2**63, 2**64 - 2**59], ids=["low", "middle", "high"])
def test_rows_whose_ids_lie_in_one_range_are_spread_evenly(first: int) -> None:
    """A split takes the rows of a range of hashes, so a part by the same range would be biased."""
    rows, tenths = 20_000, 10
    within = np.sort(np.random.default_rng(1).integers(0, 2**59, rows, dtype=np.uint64))
    holdout = holdout_mask(np.uint64(first) + within, 0.5).reshape(tenths, -1).mean(axis=1)
    assert np.abs(holdout - 0.5).max() < 4 * math.sqrt(0.25 / (rows / tenths))
    assert abs(holdout_mask(np.arange(rows, dtype=np.uint64), 0.5).mean() - 0.5) < 4 * math.sqrt(0.25 / rows)


@pytest.mark.parametrize(("count", "share"), [(0, 0.5), (1, 0.5), (1, 0.99), (50, 0.0)])
def test_nothing_is_held_back_of_a_single_row_or_of_no_share(count: int, share: float) -> None:
    holdout = holdout_mask(row_ids(count), share)
    assert holdout.shape == (count,)
    assert not holdout.any()
