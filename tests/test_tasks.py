"""Classification and its metrics, by hand-computed examples and against scikit-learn."""

import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtrain.errors import UserError
from rtrain.tasks import base
from rtrain.tasks.metrics import Confusion, metric_for

TASK = base.get("classification")


def logits_of(predicted: list[int], classes: int) -> Any:
    return np.eye(classes, dtype=np.float32)[predicted]


# ------------------------------------------------------------------------------------------------------ classification


def test_labels_are_sorted_whatever_their_counts() -> None:
    assert TASK.labels({"b": 1, "ä": 9, "a": 5, "B": 2}) == ("B", "a", "b", "ä")


@pytest.mark.parametrize(("counts", "found"), [({}, "none"), ({"x": 9}, "'x'")])
def test_fewer_than_two_labels_are_refused(counts: dict[str, int], found: str) -> None:
    with pytest.raises(UserError) as caught:
        TASK.labels(counts)
    assert str(caught.value) == (
        f"data.label: the training rows have one class only ({found}); a classifier needs at least two. "
        "Add rows of another label, or name another column with --set data.label=COLUMN."
    )


def test_targets_are_places_among_the_labels() -> None:
    found = TASK.targets(["b", "a", "c", "b"], ("a", "b"))
    assert (found.tolist(), found.dtype.name) == ([1, 0, -1, 1], "int64")
    assert TASK.targets([], ("a", "b")).tolist() == []


def test_the_loss_is_a_sum_and_its_count() -> None:
    # Row 0: log(e^1 + e^0) - 1; row 1: log(e^0 + e^2) - 0.
    logits = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    [(name, (total, count))] = TASK.loss(logits, torch.tensor([0, 0])).items()
    expected = (math.log(math.e + 1) - 1) + math.log(1 + math.e**2)
    assert (name, count) == ("loss", 2)
    assert total.item() == pytest.approx(expected, rel=1e-14)


def test_answers_are_labels_by_falling_score() -> None:
    # e^0 : e^ln2 : e^ln5 = 1 : 2 : 5.
    logits = np.log(np.array([[1.0, 2.0, 5.0], [5.0, 1.0, 2.0]])).astype(np.float32)
    first, second = TASK.decode(logits, ("a", "b", "c"), {})
    assert [answer["label"] for answer in first] == ["c", "b", "a"]
    assert [answer["score"] for answer in first] == pytest.approx([5 / 8, 2 / 8, 1 / 8], rel=1e-6)
    assert [answer["label"] for answer in second] == ["a", "c", "b"]
    assert {type(answer["score"]) for answer in first} == {float}


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (3, 3), (9, 3), (None, 3)])
def test_top_k_limits_the_answers(top_k: int | None, count: int) -> None:
    [found] = TASK.decode(np.array([[0.0, 2.0, 1.0]], dtype=np.float32), ("a", "b", "c"), {"top_k": top_k})
    assert [answer["label"] for answer in found] == ["b", "c", "a"][:count]


def test_equal_scores_keep_the_order_of_the_labels() -> None:
    [found] = TASK.decode(np.zeros((1, 4), dtype=np.float32), ("d", "c", "b", "a"), {})
    assert found == [{"label": label, "score": 0.25} for label in ("d", "c", "b", "a")]


def test_large_logits_do_not_overflow() -> None:
    [found] = TASK.decode(np.array([[1e30, -1e30]], dtype=np.float32), ("a", "b"), {})
    assert found == [{"label": "a", "score": 1.0}, {"label": "b", "score": 0.0}]


# ------------------------------------------------------------------------------------------------------------- metrics


def test_accuracy_and_macro_f1_by_hand() -> None:
    metric = Confusion(3)
    targets = [0, 0, 0, 1, 1, 2]
    predicted = [0, 0, 1, 1, 2, 0]
    metric.add(logits_of(predicted, 3), np.array(targets))
    # Right: 0 twice, 1 once, 2 never. F1 = 2 TP / (true + predicted): 4/6, 2/4, 0/2.
    assert metric.scores() == pytest.approx({"accuracy": 3 / 6, "macro_f1": (4 / 6 + 2 / 4 + 0) / 3, "rows": 6})


def test_a_class_that_neither_occurs_nor_is_predicted_is_left_out() -> None:
    metric = Confusion(4)
    metric.add(logits_of([0, 1, 1], 4), np.array([0, 1, 0]))
    # Class 0: 2/3; class 1: 2/3; classes 2 and 3 are nowhere.
    assert metric.scores() == pytest.approx({"accuracy": 2 / 3, "macro_f1": 2 / 3, "rows": 3})


def test_a_row_without_a_class_is_wrong_whatever_is_predicted() -> None:
    metric = Confusion(3)
    metric.add(logits_of([0, 1, 2, 2], 3), np.array([-1, -1, -1, 2]))
    # One of four rows is right. Class 2: 2 x 1 / (1 + 2); classes 0 and 1 are predicted, and never there: 0.
    assert metric.scores() == pytest.approx({"accuracy": 1 / 4, "macro_f1": (2 / 3 + 0 + 0) / 3, "rows": 4})


def test_nothing_added_scores_nothing() -> None:
    assert Confusion(2).scores() == {"accuracy": 0.0, "macro_f1": 0.0, "rows": 0}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60), st.integers(1, 59))
@settings(deadline=None)
def test_sums_of_parts_are_the_scores_of_the_whole(pairs: list[tuple[int, int]], cut: int) -> None:
    targets, predicted = (np.array(column) for column in zip(*pairs, strict=True))
    parts = [Confusion(5), Confusion(5)]
    for metric, part in zip(parts, (slice(None, cut), slice(cut, None)), strict=True):
        metric.add(logits_of(predicted[part].tolist(), 5), targets[part])
    parts[0].state += parts[1].state  # as `all_reduce` does
    found = parts[0].scores()
    assert found["rows"] == len(pairs)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(targets, predicted))
    seen = sorted(set(targets) | set(predicted))
    expected = sklearn.metrics.f1_score(targets, predicted, labels=seen, average="macro", zero_division=0)
    assert found["macro_f1"] == pytest.approx(expected)


def test_the_kind_of_output_chooses_the_metric() -> None:
    metric = metric_for(TASK.output, 3)
    assert isinstance(metric, Confusion)
    assert (metric.headline, metric.state.shape) == ("accuracy", (4, 3))
