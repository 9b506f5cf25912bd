"""Classification and its metrics, by hand-computed examples and against scikit-learn."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, RaggedArray, TokenBatch, single_window_batch
from rtrain.metrics import registry
from rtrain.tasks import base
from rtrain.tasks.classification import Classification
from rtrain.tasks.defaults import pool_logits
from tests.support.causes import caused_by

TASK = base.get_task("classification")


NO_POSITIONS = RaggedArray.from_rows([], np.int32)


def head(counts: dict[str, int]) -> Head:
    return Classification().build_head(counts)


def batch(targets: list[int]) -> TokenBatch:
    one_per_row = np.ones(len(targets), dtype=np.int32)
    return single_window_batch(
        one_per_row, one_per_row, one_per_row, np.array(targets), np.arange(len(targets), dtype=np.uint64)
    )


def decode(logits: Any, labels: tuple[str, ...], parameters: dict[str, Any]) -> list[Any]:
    return TASK.decode(logits, [], [], Head(labels), parameters)


def logits_of(predicted: list[int], classes: int) -> Any:
    return np.eye(classes, dtype=np.float32)[predicted]


# ------------------------------------------------------------------------------------------------------ classification


@pytest.mark.parametrize("counts", [{}, {"x": 9}])
def test_fewer_than_two_labels_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(UserError, check=caused_by("one_label")):
        head(counts)


def test_targets_are_places_among_the_labels() -> None:
    targets = TASK.build_targets(["b", "a", "c", "b"], NO_POSITIONS, Head(("a", "b")))
    assert (targets.values.values.tolist(), targets.values.counts.tolist()) == ([1, 0, -1, 1], [1, 1, 1, 1])
    assert targets.has_unknown_label.tolist() == [False, False, True, False]
    assert len(TASK.build_targets([], NO_POSITIONS, Head(("a", "b"))).values) == 0


def test_the_loss_is_a_sum_and_its_count() -> None:
    # Row 0: log(e^1 + e^0) - 1; row 1: log(e^0 + e^2) - 0.
    logits = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    rows = batch([0, 0])
    [(name, total)] = TASK.loss(logits, rows, Head()).items()
    [(counted, count)] = TASK.count_targets(rows, Head()).items()
    expected = (math.log(math.e + 1) - 1) + math.log(1 + math.e**2)
    assert (name, counted, count) == ("loss", "loss", 2)
    assert TASK.loss_parts(Head()) == ("loss",)
    assert total.item() == pytest.approx(expected, rel=1e-14)


def test_answers_are_labels_by_falling_score() -> None:
    # e^0 : e^ln2 : e^ln5 = 1 : 2 : 5.
    logits = np.log(np.array([[1.0, 2.0, 5.0], [5.0, 1.0, 2.0]])).astype(np.float32)
    first, second = decode(logits, ("a", "b", "c"), {})
    assert [answer["label"] for answer in first] == ["c", "b", "a"]
    assert [answer["score"] for answer in first] == pytest.approx([5 / 8, 2 / 8, 1 / 8], rel=1e-6)
    assert [answer["label"] for answer in second] == ["a", "c", "b"]
    assert {type(answer["score"]) for answer in first} == {float}


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (3, 3), (9, 3), (None, 3)])
def test_top_k_limits_the_answers(top_k: int | None, count: int) -> None:
    [answers] = decode(np.array([[0.0, 2.0, 1.0]], dtype=np.float32), ("a", "b", "c"), {"top_k": top_k})
    assert [answer["label"] for answer in answers] == ["b", "c", "a"][:count]


def test_equal_scores_keep_the_order_of_the_labels() -> None:
    [answers] = decode(np.zeros((1, 4), dtype=np.float32), ("d", "c", "b", "a"), {})
    assert answers == [{"label": label, "score": 0.25} for label in ("d", "c", "b", "a")]


# ------------------------------------------------------------------------------------------------------------- metrics


def scores(predicted: list[int], targets: list[int], classes: int) -> dict[str, float]:
    row_results = RaggedArray.from_matrix(logits_of(predicted, classes))
    return registry.METRICS["classes"].main_scores(
        row_results, RaggedArray.from_matrix(np.array(targets)), Head(tuple("abcde"[:classes]))
    )


def test_a_row_without_a_class_is_wrong_whatever_is_predicted() -> None:
    actual_scores = scores([0, 1, 2, 2], [-1, -1, -1, 2], 3)
    # One of four rows is right. Class 2: 2 x 1 / (1 + 2); classes 0 and 1 are predicted, and never there: 0.
    assert [actual_scores["accuracy"], actual_scores["macro_f1"], actual_scores["rows"]] == pytest.approx(
        [1 / 4, (2 / 3 + 0 + 0) / 3, 4]
    )


def test_rows_are_described_for_people() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]))
    report = TASK.explain_rows(
        RaggedArray.from_matrix(logits), RaggedArray.from_matrix(np.array([1, -1])), Head(("a", "b", "c"))
    )
    assert (report.target, report.prediction) == (["b", None], ["a", "b"])
    assert report.score.tolist() == pytest.approx([0.5, 0.75])
    assert report.loss.tolist() == pytest.approx([math.log(4), math.inf])


# ------------------------------------------------------------------------------------------------------------- windows

LONG = TokenBatch(
    ids=np.zeros(6, dtype=np.int32),
    window_lengths=np.ones(6, dtype=np.int32),
    pair_start=np.ones(6, dtype=np.int32),
    windows_per_row=np.array([1, 3, 2], dtype=np.int32),
    targets=np.array([0, 1, 1], dtype=np.float32),
    targets_per_row=np.ones(3, dtype=np.int32),
    row_ids=np.arange(3, dtype=np.uint64),
    teacher_logits=np.empty((3, 0), dtype=np.float32),
)
WINDOWS = [[1, 0], [2, 5], [3, 1], [7, 0], [4, 4], [0, 2]]


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("mean", [[1, 0], [4, 2], [2, 3]]), ("max", [[1, 0], [7, 5], [4, 4]]), ("first", [[1, 0], [2, 5], [4, 4]])],
)
def test_windows_of_a_row_are_pooled_alike_in_training_and_in_answers(pooling: str, expected: list[list[int]]) -> None:
    head = Head(("a", "b"), {"pooling": pooling})
    answers = np.array(WINDOWS, dtype=np.float32)
    assert np.asarray(TASK.row_outputs(answers, LONG, head)).tolist() == expected
    logits = torch.tensor(WINDOWS, dtype=torch.float64, requires_grad=True)
    result = pool_logits(logits, LONG, head)
    assert result.tolist() == expected
    result.sum().backward()
    assert logits.grad is not None
    assert logits.grad.sum().item() == 6  # every output of a row counts once, however many windows it has
    [total] = TASK.loss(torch.tensor(WINDOWS, dtype=torch.float64), LONG, head).values()
    [single] = TASK.loss(torch.tensor(expected, dtype=torch.float64), batch([0, 1, 1]), head).values()
    assert total.item() == pytest.approx(single.item(), rel=1e-12)
