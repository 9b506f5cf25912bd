"""Operating points: the threshold of a label keeps its promise on new rows, and every answer follows it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import precision_recall_curve

from rtrain.core.ragged import IGNORE_INDEX, Head, RaggedArray
from rtrain.metrics import classes, operating_points
from rtrain.metrics.operating_points import LabelRows
from rtrain.metrics.registry import get_metric
from rtrain.tasks import base

LABELS = ("a", "b", "c")
HEADS = Head(("intent=buy", "intent=sell", "mood=bad", "mood=good"), {"heads": [["intent", 2], ["mood", 2]]})


def rows_of(scores: Sequence[float], true: Sequence[int]) -> LabelRows:
    is_true = np.array(true) > 0
    return LabelRows(np.array(scores), is_true, np.zeros(len(is_true), dtype=np.bool_))


def draw(rows: int, seed: int, classes_: int = 3) -> tuple[RaggedArray, RaggedArray]:
    """Row results and targets of a model that is often wrong."""
    generator = np.random.default_rng(seed)
    true = generator.integers(0, classes_, rows)
    logits = generator.normal(size=(rows, classes_))
    logits[np.arange(rows), true] += 1.0
    return RaggedArray.from_matrix(logits), RaggedArray.from_matrix(true.astype(np.float32))


def with_points(head: Head, facts: dict[str, Any]) -> Head:
    return Head(head.labels, {**head.facts, **facts})


def point(label: str, threshold: float) -> dict[str, Any]:
    return {"label": label, "recall": 0.8, "threshold": threshold, "is_reached": True}


@pytest.mark.parametrize("positives", [4, 9, 24])
def test_new_rows_have_the_requested_recall_on_average(positives: int) -> None:
    """The mean over draws of validation rows: at least 0.8, and no more than one row of slack above it."""
    generator, recalls = np.random.default_rng(0), []
    for _ in range(1500):
        true = np.arange(positives + 200) < positives
        scores = generator.beta(np.where(true, 3.0, 1.5), 3.0)
        threshold, is_reached = operating_points.choose_threshold(
            rows_of(scores.tolist(), true.tolist()), "recall", 0.8
        )
        assert is_reached
        recalls.append((generator.beta(3.0, 3.0, 200) >= threshold).mean())
    assert 0.795 <= np.mean(recalls) <= 0.8 + 1 / (positives + 1) + 0.02


@pytest.mark.parametrize(
    ("name", "value", "true", "rows", "reached"),
    [
        ("recall", 0.8, [1, 1, 0, 1, 1, 0, 0, 0], 5, True),  # four rows promise 0.8 by all of them
        ("recall", 0.5, [1, 1, 0, 1, 0, 0, 0, 0], 2, True),
        ("recall", 0.9, [1, 1, 0, 1, 0, 0, 0, 0], 4, False),  # three rows promise no 0.9
        ("precision", 0.6, [1, 1, 1, 0, 1, 0, 0, 0], 5, True),
        ("precision", 0.75, [1, 1, 1, 0, 1, 0, 0, 0], 3, True),
        ("precision", 0.9, [1, 1, 1, 0, 0, 0, 0, 0], 3, False),
    ],
)
def test_the_threshold_separates_the_rows(name: str, value: float, true: list[int], rows: int, reached: bool) -> None:
    scores = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    threshold, is_reached = operating_points.choose_threshold(rows_of(scores, true), name, value)
    assert (sum(score >= threshold for score in scores), is_reached) == (rows, reached)
    assert threshold not in scores  # half-way: another engine's rounding changes no row


def test_equal_scores_are_decided_together() -> None:
    threshold, _ = operating_points.choose_threshold(rows_of([0.5, 0.5, 0.5, 0.1], [1, 0, 1, 0]), "precision", 0.5)
    assert 0.1 < threshold < 0.5
    assert operating_points.choose_threshold(rows_of([0.5, 0.5], [0, 0]), "recall", 0.5) == (1.0, False)


def test_the_first_point_decides_and_other_labels_are_compared_without_those_of_points() -> None:
    logits = np.log([[0.2, 0.7, 0.1], [0.35, 0.34, 0.31], [0.1, 0.3, 0.6], [0.05, 0.9, 0.05], [0.6, 0.2, 0.2]])
    head = Head(LABELS, {classes.OPERATING_POINTS: [point("a", 0.3), point("b", 0.33)]})
    best = logits.argmax(axis=1)
    assert classes.decide_classes(logits, LABELS, head).tolist() == [1, 0, 2, 1, 0]
    assert classes.decide_classes(logits, LABELS, Head(LABELS)).tolist() == best.tolist()
    # A label below its threshold is no answer, though it has the highest score.
    strict = Head(LABELS, {classes.OPERATING_POINTS: [point("b", 0.95)]})
    assert classes.decide_classes(logits, LABELS, strict).tolist() == [0, 0, 2, 0, 0]
    every = Head(LABELS, {classes.OPERATING_POINTS: [point(label, 0.99) for label in LABELS]})
    assert classes.decide_classes(logits, LABELS, every).tolist() == best.tolist()
    unknown = np.array([[np.nan, 1.0, 2.0]])
    assert classes.decide_classes(unknown, LABELS, head).tolist() == [-3]


def test_all_answers_of_a_classifier_follow_its_points() -> None:
    task = base.get_task("classification")
    valid, test, plain = draw(400, 1), draw(300, 2), Head(LABELS)
    requests: list[dict[str, Any]] = [{"label": "c", "recall": 0.95}, {"label": "a", "recall": None, "precision": 0.7}]
    head = with_points(plain, operating_points.choose_operating_points("classes", *valid, plain, requests))
    [first, second] = operating_points.measure_operating_points("classes", *test, head)
    assert (first["label"], first["requested"], second["requested"]) == ("c", "recall", "precision")
    report = task.explain_rows(*test, head)
    true, predicted = np.array(report.target), np.array(report.prediction)
    for measured in (first, second):
        is_true, is_predicted = true == measured["label"], predicted == measured["label"]
        assert (measured["rows"], measured["predicted"]) == (is_true.sum(), is_predicted.sum())
        assert measured["recall"] == pytest.approx((is_true & is_predicted).sum() / is_true.sum())
        assert measured["precision"] == pytest.approx((is_true & is_predicted).sum() / is_predicted.sum())
        low, high = measured["intervals"][measured["requested"]]
        assert low < measured[measured["requested"]] < high
    assert first["recall"] > 0.9 > (np.array(task.explain_rows(*test, plain).prediction)[true == "c"] == "c").mean()
    metric = get_metric("classes")
    assert metric.main_scores(*test, head)["accuracy"] == pytest.approx((true == predicted).mean())
    assert metric.mark_correct is not None
    assert metric.mark_correct(*test, head).tolist() == (true == predicted).tolist()
    assert metric.build_tables is not None
    recalls = {row["class"]: row["recall"] for row in metric.build_tables(*test, head)["per_class"]}
    assert recalls["c"] == pytest.approx(first["recall"])
    outputs = test[0].to_matrix(3)
    for top_k in (None, 1, 2):
        answers = task.decode(outputs, [], [], head, {"top_k": top_k} if top_k else {})
        assert [answer[0]["label"] for answer in answers] == predicted.tolist()
        assert {len(answer) for answer in answers} == {top_k or 3}
        assert all(len({entry["label"] for entry in answer}) == len(answer) for answer in answers)
    whole = task.decode(outputs, [], [], head, {})
    assert all(abs(sum(entry["score"] for entry in answer) - 1) < 1e-9 for answer in whole)


def test_points_that_are_chosen_again_start_from_their_own_facts() -> None:
    valid, other = draw(400, 1), draw(400, 3)
    request = [{"label": "b", "recall": 0.9}]
    facts = operating_points.choose_operating_points("classes", *valid, Head(LABELS), request)
    head = Head(LABELS, facts)
    again = operating_points.choose_operating_points("classes", *valid, head, facts[classes.OPERATING_POINTS])
    assert again == facts
    moved = operating_points.choose_operating_points("classes", *other, head, facts[classes.OPERATING_POINTS])
    assert moved[classes.OPERATING_POINTS][0]["threshold"] != facts[classes.OPERATING_POINTS][0]["threshold"]


def test_a_later_point_leaves_the_rows_of_an_earlier_one_alone() -> None:
    valid = draw(600, 5)
    requests = [{"label": "a", "recall": 1.0}, {"label": "b", "recall": 0.99}]
    facts = operating_points.choose_operating_points("classes", *valid, Head(LABELS), requests)
    [first, second] = operating_points.measure_operating_points("classes", *valid, Head(LABELS, facts))
    assert first["recall"] == 1.0
    assert not first["is_reached"]  # 200 rows promise no recall of 1
    assert (second["is_reached"], second["recall"] < 0.9) == (False, True)


def test_several_heads_and_several_labels_have_points_too() -> None:
    generator = np.random.default_rng(0)
    true = generator.integers(0, 2, (300, 2)).astype(np.float32)
    true[:40, 1] = IGNORE_INDEX
    logits = generator.normal(size=(300, 4))
    logits[np.arange(300), 2 + np.maximum(true[:, 1], 0).astype(int)] += 1
    valid = RaggedArray.from_matrix(logits), RaggedArray.from_matrix(true)
    assert operating_points.list_labels("heads", HEADS) == ["intent/buy", "intent/sell", "mood/bad", "mood/good"]
    facts = operating_points.choose_operating_points("heads", *valid, HEADS, [{"label": "mood/good", "recall": 0.9}])
    head = with_points(HEADS, facts)
    [measured] = operating_points.measure_operating_points("heads", *valid, head)
    assert measured["rows"] == (true[:, 1] == 1).sum()
    assert measured["recall"] >= 0.9
    task = base.get_task("multi_head")
    decided = [row[1] for row in task.explain_rows(*valid, head).prediction]
    assert [
        answer["mood"][0]["label"] for answer in task.decode(logits.astype(np.float32), [], [], head, {})
    ] == decided
    plain = [row[0] for row in task.explain_rows(*valid, HEADS).prediction]
    assert [row[0] for row in task.explain_rows(*valid, head).prediction] == plain  # the other head is as it was

    labels, many = Head(LABELS, {"thresholds": dict.fromkeys(LABELS, 0.5)}), (logits[:, :3], true[:, [0, 0, 0]])
    both = RaggedArray.from_matrix(many[0]), RaggedArray.from_matrix(many[1])
    facts = operating_points.choose_operating_points("labels", *both, labels, [{"label": "b", "recall": 0.9}])
    assert {name: value == 0.5 for name, value in facts["thresholds"].items()} == {"a": True, "b": False, "c": True}
    [measured] = operating_points.measure_operating_points("labels", *both, with_points(labels, facts))
    given = [row for row in base.get_task("multi_label").explain_rows(*both, with_points(labels, facts)).prediction]
    assert measured["predicted"] == sum("b" in row for row in given)
    assert measured["recall"] >= 0.9


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (5, 5), (3, 7), (16, 20), (0, 0)])
def test_the_exact_interval_is_that_of_scipy(successes: int, trials: int) -> None:
    low, high = operating_points.exact_interval(successes, trials)
    expected = binomtest(successes, trials).proportion_ci(method="exact") if trials else (0.0, 1.0)
    assert (low, high) == pytest.approx(tuple(expected))


def test_recall_at_a_precision_is_the_best_on_the_curve_of_scikit_learn() -> None:
    generator = np.random.default_rng(4)
    true = generator.random(200) < 0.3
    scores = np.round(generator.random(200) + 0.4 * true, 1)  # with ties
    precisions, recalls, _ = precision_recall_curve(true, scores)
    rows = rows_of(scores.tolist(), true.tolist())
    for value in (0.4, 0.6, 0.8):
        assert rows.score_at("recall", value) == pytest.approx(recalls[:-1][precisions[:-1] >= value].max(initial=0))
        assert rows.score_at("precision", value) == pytest.approx(precisions[:-1][recalls[:-1] >= value].max(initial=0))
    assert rows.score_at("recall", 1.0) == pytest.approx(recalls[:-1][precisions[:-1] >= 1.0].max(initial=0))
