"""The figures behind the charts, against arithmetic by hand."""

import numpy as np
import pytest

from rtrain.report import stats


def test_thinning_keeps_a_spike_of_one_update_and_both_ends() -> None:
    ys = [1.0] * 50_000
    ys[31_234] = 99.0
    xs, thinned = stats.thin_curve(list(range(50_000)), ys, max_points=100)
    assert len(xs) <= 102
    assert (xs[0], xs[-1]) == (0, 49_999)
    assert thinned[xs.index(31_234)] == 99.0
    assert xs == sorted(xs)


def test_a_short_curve_is_left_as_it_is() -> None:
    assert stats.thin_curve([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_a_sample_is_of_distinct_rows_in_order() -> None:
    config = stats.sample_rows(10_000, 100)
    assert len(set(config.tolist())) == 100
    assert config.tolist() == sorted(config.tolist())
    assert stats.sample_rows(5, 100).tolist() == [0, 1, 2, 3, 4]


def test_whole_numbers_get_bins_of_whole_widths() -> None:
    edges = stats.bin_edges(np.array([3.0, 10.0]))
    assert edges.tolist() == [2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5]
    wide = stats.bin_edges(np.array([0.0, 512.0]))
    assert set(np.diff(wide)) == {18.0}
    assert wide[0] <= 0
    assert wide[-1] >= 512


def test_correlations() -> None:
    xs = np.array([1.0, 2.0, 3.0, 4.0])
    assert stats.pearson_correlation(xs, 7 - 2 * xs) == pytest.approx(-1.0)
    assert stats.pearson_correlation(xs, np.ones(4)) is None


def test_wilson_interval_of_eight_in_ten() -> None:
    """Figures of Newcombe (1998), Statistics in Medicine 17, for 81 of 263, and by hand for 8 of 10."""
    assert stats.wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert stats.wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert stats.wilson_interval(0, 10)[0] == 0.0
    assert stats.wilson_interval(10, 10)[1] == 1.0


def test_confused_classes_become_neighbours() -> None:
    counts = np.diag([9, 9, 9, 9, 9])
    counts[0, 3] = counts[3, 0] = 6
    counts[1, 4] = 5
    order = stats.confusion_order(counts).tolist()
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert abs(order.index(0) - order.index(3)) == 1
    assert abs(order.index(1) - order.index(4)) == 1
    assert order[-1] == 2  # it is confused with none
