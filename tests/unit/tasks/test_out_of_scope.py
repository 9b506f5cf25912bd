"""Rows outside of all classes: not trained on, told by a threshold of the validation rows, answered by their label."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.config import ServeConfig
from rtrain.core.errors import UserError
from rtrain.core.ragged import OUT_OF_SCOPE, Head, RaggedArray
from rtrain.data.store import builder
from rtrain.data.store.store import Store
from rtrain.inference.predictor import Predictor
from rtrain.metrics import classes, registry, scores
from rtrain.tasks import base
from serve.app import build_app
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.serving import INFER, call, predict, tensor
from tests.support.tiny import CORPUS, make_store, make_task_artifact, make_tokenizer

TASK = base.get_task("classification")
HEAD = Head(("a", "b"), {"out_of_scope_label": "none"})
THRESHOLDED = Head(("a", "b"), {"out_of_scope_label": "none", "threshold": 0.7})
NO_POSITIONS = RaggedArray.from_rows([], np.int32)

# Chances of a: 0.9, 0.8, 0.6, 0.25, 0.55, 0.5 -> sure 0.9, 0.8, 0.6, 0.75, 0.55, 0.5.
ROW_RESULTS = RaggedArray.from_matrix(
    np.log([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.25, 0.75], [0.55, 0.45], [0.5, 0.5]])
)
TARGETS = RaggedArray.from_matrix(np.array([0, 1, 0, OUT_OF_SCOPE, OUT_OF_SCOPE, OUT_OF_SCOPE]))


def store_of(folder: Path, labels: dict[str, str], **overrides: Any) -> Store:
    """A store of rows; `labels` maps some labels to another label."""
    results = [(text, labels.get(label, label)) for text, label in labelled_rows(150)]
    recipe = config.load_config(
        "intent", {"data.path": str(write_rows(folder / "rows.csv", results)), **overrides}
    ).recipe
    return make_store(recipe, make_tokenizer(folder / "encoder"), folder)


def test_rows_outside_are_left_out_of_training_alone(tmp_path: Path) -> None:
    store = store_of(
        tmp_path, {"login": "none"}, **{"data.out_of_scope_label": "none", "augment.copies": 1, "augment.drop": 0.2}
    )
    assert store.manifest.head == Head(("parcel", "refund"), {"out_of_scope_label": "none"})
    assert set(store.targets("train").values.tolist()) == {0, 1}
    for split in ("valid", "test"):
        assert set(store.targets(split).values.tolist()) == {0, 1, OUT_OF_SCOPE}
    share = store.num_rows("train") - store.manifest.copies
    assert share + store.manifest.out_of_scope_rows + store.num_rows("valid") + store.num_rows("test") == 150
    assert store.manifest.out_of_scope_rows > 20
    assert store.manifest.quarantined == 0


def test_a_threshold_needs_validation_rows_of_both_kinds(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=caused_by("too_few_rows")):
        store_of(tmp_path, {}, **{"data.out_of_scope_label": "nowhere"})


def test_other_tasks_refuse_it() -> None:
    recipe = config.load_config("essay", {"data.out_of_scope_label": "none"}).recipe
    assert [problem.field for problem in builder.find_problems(recipe)] == ["data.out_of_scope_label"]
    assert builder.find_problems(config.load_config("intent", {"data.out_of_scope_label": "none"}).recipe) == []
    [problem] = builder.find_problems(config.load_config("intent", {"data.out_of_scope_label": "TRUE"}).recipe)
    assert (problem.field, problem.fix) == ("data.out_of_scope_label", "write true")


def test_targets_tell_outside_from_unknown() -> None:
    targets = TASK.build_targets(["b", "none", "c"], NO_POSITIONS, HEAD)
    assert (targets.values.values.tolist(), targets.has_unknown_label.tolist()) == (
        [1, OUT_OF_SCOPE, -1],
        [False, False, True],
    )
    assert TASK.build_targets(["none"], NO_POSITIONS, Head(("a", "b"))).has_unknown_label.tolist() == [True]


def test_the_threshold_is_the_one_of_the_best_f1() -> None:
    # Refusing below 0.8 - 0.75 finds all three and one too many: F1 6/7. Below 0.6 - 0.55: two of three, F1 4/5.
    facts = TASK.calibrate(ROW_RESULTS, TARGETS, HEAD)
    assert facts == {"threshold": pytest.approx((0.75 + 0.8) / 2)}
    assert TASK.calibrate(ROW_RESULTS, TARGETS, Head(("a", "b"))) == {}
    inside = RaggedArray.from_matrix(np.zeros(6))
    assert TASK.calibrate(ROW_RESULTS, inside, HEAD) == {}


def test_scores_are_of_the_rows_inside_and_of_telling_the_others() -> None:
    before = registry.METRICS["classes"].main_scores(ROW_RESULTS, TARGETS, HEAD)
    # Inside: a found, b taken for a, a found.
    assert before["accuracy"] == pytest.approx(2 / 3)
    assert "out_of_scope_f1" not in before
    scores = registry.get_metric("classes").all_scores(ROW_RESULTS, TARGETS, THRESHOLDED)
    assert {name: scores[name] for name in before} == before
    # Below 0.7: rows 2, 4 and 5; rows 3, 4 and 5 are outside.
    assert (
        scores["out_of_scope_precision"]
        == scores["out_of_scope_recall"]
        == scores["out_of_scope_f1"]
        == pytest.approx(2 / 3)
    )
    assert scores["in_scope_recall"] == pytest.approx(2 / 3)
    assert scores["accuracy_with_abstentions"] == pytest.approx(3 / 6)
    # Pairs (inside, outside) in which the inside one is surer: 3 + 3 + 2 of 9.
    assert scores["out_of_scope_auc"] == pytest.approx(8 / 9)
    assert scores["rows"] == 6


def test_a_slice_of_outside_rows_alone_has_scores_too() -> None:
    every = {"source": ["chat"] * 3 + ["feed"] * 3}
    document = scores.measure_split(TASK, THRESHOLDED, "test", ROW_RESULTS, TARGETS, np.arange(6), every)
    assert {entry["value"]: entry["rows"] for entry in document["slices"]["source"]} == {
        "(2 values with fewer than 20 rows)": 6
    }
    last = np.array([3, 4, 5])
    single = scores.measure_split(
        TASK, THRESHOLDED, "test", ROW_RESULTS.take(last), TARGETS.take(last), np.arange(3), {}
    )
    # The first of the three is sure enough to be kept.
    assert (
        single["scores"]["out_of_scope_recall"] == single["scores"]["accuracy_with_abstentions"] == pytest.approx(2 / 3)
    )
    assert single["scores"]["ece"] == 0
    assert sum(entry["rows"] for entry in single["tables"]["calibration"]["bins"]) == 0


def test_tables_have_it_as_a_class() -> None:
    built_tables = classes.build_class_tables(ROW_RESULTS, TARGETS, THRESHOLDED)
    assert built_tables["confusion"]["labels"] == ["a", "b", "none"]
    assert built_tables["confusion"]["counts"] == [[1, 0, 1], [1, 0, 0], [0, 1, 2]]
    assert built_tables["threshold"] == 0.7
    assert {entry["class"]: entry["auc"] for entry in built_tables["per_class"]}["none"] == pytest.approx(8 / 9)


def test_described_rows_say_it() -> None:
    report = TASK.explain_rows(ROW_RESULTS, TARGETS, THRESHOLDED)
    assert report.target == ["a", "b", "a", "none", "none", "none"]
    assert report.prediction == ["a", "a", "none", "b", "none", "none"]
    assert report.score.tolist() == pytest.approx([0.9, 0.8, 0.4, 0.75, 0.45, 0.5])
    assert report.loss.tolist() == pytest.approx([-math.log(part) for part in (0.9, 0.2, 0.6, 0.25, 0.45, 0.5)])


def test_answers_begin_with_it_below_the_threshold() -> None:
    outputs = np.log(np.array([[0.9, 0.1], [0.4, 0.6]], dtype=np.float32))
    sure, unsure = TASK.decode(outputs, [], [], THRESHOLDED, {})
    assert [entry["label"] for entry in sure] == ["a", "b"]
    assert [entry["label"] for entry in unsure] == ["none", "b", "a"]
    assert [entry["score"] for entry in unsure] == pytest.approx([0.4, 0.6, 0.4])
    assert [
        [entry["label"] for entry in answer] for answer in TASK.decode(outputs, [], [], THRESHOLDED, {"top_k": 1})
    ] == [["a"], ["none"]]
    assert [entry["label"] for entry in TASK.decode(outputs, [], [], HEAD, {})[1]] == ["b", "a"]  # no threshold yet


# ---------------------------------------------------------------------------------------------------------- over HTTP


def test_the_endpoint_answers_outside_where_the_threshold_says_so(tmp_path: Path) -> None:
    inside = make_task_artifact(tmp_path / "inside", "classification", Head(("a", "b", "c")), seed=5)
    expected = Predictor.load(inside, threads=1)(CORPUS)  # the same weights without a threshold
    sure = [answer[0]["score"] for answer in expected]
    order = np.argsort(sure)
    minimum, next_to_least, maximum = (sure[order[place]] for place in (1, 2, -1))
    assert next_to_least - minimum > 1e-5 < maximum - next_to_least  # far above the rounding of another batch
    head = Head(("a", "b", "c"), {"out_of_scope_label": "none", "threshold": (minimum + next_to_least) / 2})
    folder = make_task_artifact(tmp_path / "outside", "classification", head, seed=5)
    app = build_app(Predictor.load(folder, threads=1), ServeConfig())

    answers = predict(app, list(CORPUS))
    refused = set(order[:2].tolist())
    for place, (answer, plain) in enumerate(zip(answers, expected, strict=True)):
        classes = answer[1:] if place in refused else answer
        assert [entry["label"] for entry in classes] == [entry["label"] for entry in plain]
        assert [entry["score"] for entry in classes] == pytest.approx([entry["score"] for entry in plain], abs=1e-6)
        if place in refused:  # first, with 1 minus the best class's score
            assert answer[0] == {"label": "none", "score": pytest.approx(1 - sure[place], abs=1e-6)}
    first = [answer[0] for answer in answers]
    assert predict(app, list(CORPUS), top_k=1) == [[entry] for entry in first]
    assert [len(answer) for answer in predict(app, list(CORPUS), top_k=2)] == [2] * len(CORPUS)

    response = call(app, "POST", INFER, json={"inputs": [tensor(list(CORPUS), [len(CORPUS)])]})
    labels, scores = response.json()["outputs"]
    assert labels["data"] == [entry["label"] for entry in first]
    assert labels["data"].count("none") == 2
    assert scores["data"] == pytest.approx([entry["score"] for entry in first], abs=1e-6)
