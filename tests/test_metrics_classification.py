"""Classification scores against arithmetic by hand and scikit-learn."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn import metrics as sk

from rtrain.errors import UserError
from rtrain.metrics import classification

# Class 0 twice right, once taken for 1; class 1 once right, once taken for 2; the last label is no class.
TRUE = np.array([0, 0, 0, 1, 1, -1])
PREDICTED = np.array([0, 0, 1, 1, 2, 2])


def test_confusion_counts_every_row_once_and_an_unknown_label_in_the_last_row() -> None:
    counts = classification.confusion(TRUE, PREDICTED, 3)
    assert counts.tolist() == [[2, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1]]


def test_per_class_by_hand() -> None:
    zero, one, two = classification.per_class(classification.confusion(TRUE, PREDICTED, 3))
    assert zero == pytest.approx((2 / 2, 2 / 3, 4 / 5, 3, 2))
    assert one == pytest.approx((0.5, 0.5, 0.5, 2, 2))
    assert two == pytest.approx((0, 0, 0, 0, 2))  # never true: recall has nothing to divide by


def test_scores_by_hand() -> None:
    found = classification.scores(TRUE, PREDICTED, 3)
    assert found["accuracy"] == pytest.approx(3 / 6)
    assert found["macro_f1"] == pytest.approx((4 / 5 + 1 / 2 + 0) / 3)
    # Over classes: 3 right, 6 predicted, 5 true (the sixth label is no class).
    assert found["micro_precision"] == pytest.approx(3 / 6)
    assert found["micro_recall"] == pytest.approx(3 / 5)
    assert found["micro_f1"] == pytest.approx(6 / 11)


def test_a_class_that_neither_occurs_nor_is_predicted_is_left_out_of_the_mean() -> None:
    assert classification.scores(np.array([0, 1]), np.array([0, 1]), 5)["macro_f1"] == 1.0


def test_no_rows_score_nothing() -> None:
    empty = np.zeros(0, dtype=np.int64)
    assert set(classification.scores(empty, empty, 2).values()) == {0.0}


labels = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


@settings(deadline=None)
@given(labels)
def test_scores_are_scikit_learns(rows: list[tuple[int, int]]) -> None:
    true, predicted = np.array(rows).T
    found = classification.scores(true, predicted, 5)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(true, predicted), abs=1e-12)
    for average in ("macro", "micro"):
        expected = sk.precision_recall_fscore_support(true, predicted, average=average, zero_division=0)
        for kind, value in zip(("precision", "recall", "f1"), expected[:3], strict=True):
            assert found[f"{average}_{kind}"] == pytest.approx(value, abs=1e-12)


def test_auc_by_hand() -> None:
    scores = np.array([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5], [0.2, 0.8]])
    # Class 1: true rows 1 and 2 score .6 and .5, others .1 and .8: of four pairs two are in order.
    area, each = classification.auc(np.array([0, 1, 1, 0]), scores)
    assert each == [0.5, 0.5]
    assert area == 0.5


def test_auc_of_a_class_without_rows_is_left_out() -> None:
    scores = np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 0.0]])
    area, each = classification.auc(np.array([0, 1]), scores)
    assert each == [1.0, 1.0, None]
    assert area == 1.0
    assert classification.auc(np.array([0, 0]), scores) == (None, [None, None, None])


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_auc_is_scikit_learns_one_vs_rest(seed: int) -> None:
    generator = np.random.default_rng(seed)
    true = np.concatenate([np.arange(4), generator.integers(0, 4, 40)])
    scores = generator.dirichlet(np.ones(4), len(true)).round(1)  # rounded: with ties
    scores /= scores.sum(axis=1, keepdims=True)
    area, _ = classification.auc(true, scores)
    assert area == pytest.approx(sk.roc_auc_score(true, scores, multi_class="ovr", average="macro"), abs=1e-12)


def test_multilabel_by_hand() -> None:
    true = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]], dtype=bool)
    scores = np.array([[0.9, 0.2, 0.6], [0.5, 0.7, 0.1], [0.8, 0.3, 0.0]])
    found = classification.multilabel(true, scores)
    # Label 0: both right, one too many; 1: one of two found; 2: right. Only row 0 is right as a whole.
    assert found["subset_accuracy"] == pytest.approx(1 / 3)
    assert found["macro_f1"] == pytest.approx((4 / 5 + 2 / 3 + 1) / 3)
    assert found["micro_f1"] == pytest.approx(2 * 4 / (5 + 5))
    # Each label's true rows come first by its scores, so all three average precisions are 1.
    assert found["mean_average_precision"] == 1.0


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_multilabel_is_scikit_learns(seed: int) -> None:
    generator = np.random.default_rng(seed)
    true = np.concatenate([np.eye(4, dtype=bool), generator.random((20, 4)) < 0.3])
    scores = generator.random((24, 4)).round(1)
    found = classification.multilabel(true, scores, 0.4)
    assert found["subset_accuracy"] == pytest.approx(sk.accuracy_score(true, scores >= 0.4))
    for average in ("macro", "micro"):
        expected = sk.f1_score(true, scores >= 0.4, average=average, zero_division=0)
        assert found[f"{average}_f1"] == pytest.approx(expected, abs=1e-12)
    assert found["mean_average_precision"] == pytest.approx(sk.average_precision_score(true, scores), abs=1e-12)


def test_multilabel_without_any_label_has_no_average_precision() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = classification.multilabel(np.zeros((2, 2), dtype=bool), np.zeros((2, 2)))
    assert "mean_average_precision" not in found
    assert found["subset_accuracy"] == 1.0


CONFIDENCE = np.array([0.1, 0.2, 0.3, 0.4, 0.9, 0.95])
OUTSIDE = np.array([True, True, False, True, False, False])


def test_threshold_of_the_highest_f1() -> None:
    # Refusing below .25: P 1, R 2/3, F1 4/5; below .65: P 3/4, R 1, F1 6/7.
    threshold = classification.choose_threshold(CONFIDENCE, OUTSIDE)
    assert threshold == pytest.approx(0.65)
    found = classification.out_of_scope(CONFIDENCE, OUTSIDE, threshold)
    assert found["f1"] == pytest.approx(6 / 7)
    assert found["precision"] == pytest.approx(3 / 4)
    assert found["in_scope_kept"] == pytest.approx(2 / 3)
    assert found["auc"] == pytest.approx(8 / 9)  # of 9 pairs only (.4 outside, .3 inside) is in the wrong order


def test_a_confidence_at_the_threshold_is_in_scope() -> None:
    found = classification.out_of_scope(np.array([0.5, 0.4]), np.array([False, True]), 0.5)
    assert (found["in_scope_kept"], found["recall"]) == (1.0, 1.0)


@pytest.mark.parametrize(("recall", "threshold"), [(0.3, 0.15), (0.6, 0.25), (0.67, 0.65), (1.0, 0.65)])
def test_threshold_of_a_given_recall_refuses_as_few_as_it_can(recall: float, threshold: float) -> None:
    assert classification.choose_threshold(CONFIDENCE, OUTSIDE, recall) == pytest.approx(threshold)


def test_threshold_may_refuse_every_row_and_lies_between_neighbouring_floats() -> None:
    near = np.nextafter(0.5, 1)
    threshold = classification.choose_threshold(np.array([0.5, near]), np.array([True, False]))
    assert 0.5 < threshold <= near
    everything = classification.choose_threshold(np.array([0.5, 0.4]), np.array([True, False]), recall=1.0)
    assert classification.out_of_scope(np.array([0.5, 0.4]), np.array([True, False]), everything)["recall"] == 1.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans()), min_size=2, max_size=30))
def test_no_threshold_has_a_higher_f1_than_the_chosen_one(rows: list[tuple[float, bool]]) -> None:
    confidence, outside = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    if outside.all() or not outside.any():
        with pytest.raises(UserError, match="rows of both kinds"):
            classification.choose_threshold(confidence, outside)
        return
    chosen = classification.out_of_scope(confidence, outside, classification.choose_threshold(confidence, outside))
    every = [classification.out_of_scope(confidence, outside, at)["f1"] for at in (0.0, 0.15, 0.3, 0.7, 1.0)]
    assert chosen["f1"] == pytest.approx(max(every))
