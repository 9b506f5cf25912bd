"""Classification scores against arithmetic by hand and scikit-learn."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn import metrics as sk

from rtrain.core.errors import UserError
from rtrain.metrics import classification
from rtrain.metrics.bootstrap import Bools, Floats
from tests.support.causes import caused_by

# Class 0 twice right, once taken for 1; class 1 once right, once taken for 2; the last label is no class.
TRUE = np.array([0, 0, 0, 1, 1, -1])
PREDICTED = np.array([0, 0, 1, 1, 2, 2])


def test_confusion_counts_every_row_once_and_an_unknown_label_in_the_last_row() -> None:
    counts = classification.count_confusion(TRUE, PREDICTED, 3)
    assert counts.tolist() == [[2, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1]]


labels = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


@settings(deadline=None, max_examples=40)
@given(labels)
def test_scores_are_scikit_learns(rows: list[tuple[int, int]]) -> None:
    true, predicted = np.array(rows).T
    scores = classification.make_sum_metric(true, predicted, 5).scores()
    assert scores["accuracy"] == pytest.approx(sk.accuracy_score(true, predicted), abs=1e-12)
    for average in ("macro", "micro"):
        expected = sk.precision_recall_fscore_support(true, predicted, average=average, zero_division=0)
        for kind, value in zip(("precision", "recall", "f1"), expected[:3], strict=True):
            assert scores[f"{average}_{kind}"] == pytest.approx(value, abs=1e-12)


def test_auc_of_a_class_without_rows_is_left_out() -> None:
    scores = np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 0.0]])
    area, each = classification.compute_auc(np.array([0, 1]), scores)
    assert each == [1.0, 1.0, None]
    assert area == 1.0
    assert classification.compute_auc(np.array([0, 0]), scores) == (None, [None, None, None])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_auc_is_scikit_learns_one_vs_rest(seed: int) -> None:
    generator = np.random.default_rng(seed)
    true = np.concatenate([np.arange(4), generator.integers(0, 4, 40)])
    scores = generator.dirichlet(np.ones(4), len(true)).round(1)  # rounded: with ties
    scores /= scores.sum(axis=1, keepdims=True)
    area, _ = classification.compute_auc(true, scores)
    assert area == pytest.approx(sk.roc_auc_score(true, scores, multi_class="ovr", average="macro"), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_multilabel_is_scikit_learns(seed: int) -> None:
    generator = np.random.default_rng(seed)
    true = np.concatenate([np.eye(4, dtype=bool), generator.random((20, 4)) < 0.3])
    scores = generator.random((24, 4)).round(1)
    actual_scores = classification.make_multilabel_metric(true, scores >= 0.4).scores()
    assert actual_scores["subset_accuracy"] == pytest.approx(sk.accuracy_score(true, scores >= 0.4))
    for average in ("macro", "micro"):
        expected = sk.f1_score(true, scores >= 0.4, average=average, zero_division=0)
        assert actual_scores[f"{average}_f1"] == pytest.approx(expected, abs=1e-12)
    expected = sk.average_precision_score(true, scores)
    assert classification.mean_average_precision(true, scores) == pytest.approx(expected, abs=1e-12)


def test_multilabel_without_any_label_has_no_average_precision() -> None:
    nothing = np.zeros((2, 2), dtype=bool)
    assert classification.mean_average_precision(nothing, np.zeros((2, 2))) is None
    assert classification.make_multilabel_metric(nothing, nothing).scores()["subset_accuracy"] == 1.0


CONFIDENCE = np.array([0.1, 0.2, 0.3, 0.4, 0.9, 0.95])
OUTSIDE = np.array([True, True, False, True, False, False])


def f1(confidence: Floats, outside: Bools, threshold: float) -> float:
    return float(sk.f1_score(outside, confidence < threshold, zero_division=0))


def test_threshold_of_the_highest_f1() -> None:
    # Refusing below .25: P 1, R 2/3, F1 4/5; below .65: P 3/4, R 1, F1 6/7.
    threshold = classification.choose_threshold(CONFIDENCE, OUTSIDE)
    assert threshold == pytest.approx(0.65)
    assert f1(CONFIDENCE, OUTSIDE, threshold) == pytest.approx(6 / 7)


def test_threshold_lies_between_neighbouring_floats() -> None:
    nearby = np.nextafter(0.5, 1)
    threshold = classification.choose_threshold(np.array([0.5, nearby]), np.array([True, False]))
    assert 0.5 < threshold <= nearby


def test_threshold_may_refuse_every_row() -> None:
    confidence, outside = np.array([0.5, 0.4]), np.array([True, False])
    assert classification.choose_threshold(confidence, outside) > 0.5


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans()), min_size=2, max_size=30))
def test_no_threshold_has_a_higher_f1_than_the_chosen_one(rows: list[tuple[float, bool]]) -> None:
    confidence, outside = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    if outside.all() or not outside.any():
        with pytest.raises(UserError, check=caused_by("too_few_rows")):
            classification.choose_threshold(confidence, outside)
        return
    selected = f1(confidence, outside, classification.choose_threshold(confidence, outside))
    assert selected == pytest.approx(max(f1(confidence, outside, at) for at in (0.0, 0.15, 0.3, 0.7, 1.0)))
