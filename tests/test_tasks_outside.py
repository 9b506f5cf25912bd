"""Rows outside of all classes: not trained on, told by a threshold of the validation rows, answered by their label."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.config import Serve
from rtrain.core.errors import UserError
from rtrain.core.ragged import OUTSIDE, Head, Ragged
from rtrain.data.store import builder
from rtrain.data.store.store import Store
from rtrain.inference.predictor import Predictor
from rtrain.metrics import registry, scores, tables
from rtrain.tasks import base
from serve.app import build_app
from tests.causes import caused_by
from tests.conftest import labelled_rows, write_rows
from tests.serving import INFER, call, predict, tensor
from tests.tiny import CORPUS, make_store, make_task_artifact, make_tokenizer

TASK = base.get("classification")
HEAD = Head(("a", "b"), {"outside": "none"})
CHOSEN = Head(("a", "b"), {"outside": "none", "threshold": 0.7})
NO_MARKS = Ragged.of([], np.int32)

# Chances of a: 0.9, 0.8, 0.6, 0.25, 0.55, 0.5 -> sure 0.9, 0.8, 0.6, 0.75, 0.55, 0.5.
OUTCOMES = Ragged.even(np.log([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.25, 0.75], [0.55, 0.45], [0.5, 0.5]]))
TARGETS = Ragged.even(np.array([0, 1, 0, OUTSIDE, OUTSIDE, OUTSIDE]))


def store_of(folder: Path, labels: dict[str, str], **overrides: Any) -> Store:
    """A store of rows of which those that `labels` names have another label."""
    found = [(text, labels.get(label, label)) for text, label in labelled_rows(150)]
    recipe = config.load("intent", {"data.path": str(write_rows(folder / "rows.csv", found)), **overrides}).recipe
    return make_store(recipe, make_tokenizer(folder / "encoder"), folder)


def test_rows_outside_are_left_out_of_training_alone(tmp_path: Path) -> None:
    made = store_of(tmp_path, {"login": "none"}, **{"data.outside": "none", "augment.copies": 1, "augment.drop": 0.2})
    assert made.manifest.head == Head(("parcel", "refund"), {"outside": "none"})
    assert set(made.targets("train").values.tolist()) == {0, 1}
    for split in ("valid", "test"):
        assert set(made.targets(split).values.tolist()) == {0, 1, OUTSIDE}
    kept = made.rows("train") - made.manifest.copies
    assert kept + made.manifest.left_out + made.rows("valid") + made.rows("test") == 150
    assert made.manifest.left_out > 20
    assert made.manifest.quarantined == 0


def test_a_threshold_needs_validation_rows_of_both_kinds(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=caused_by("too_few_rows")):
        store_of(tmp_path, {}, **{"data.outside": "nowhere"})


def test_other_tasks_refuse_it() -> None:
    recipe = config.load("essay", {"data.outside": "none"}).recipe
    assert [problem.field for problem in builder.problems(recipe)] == ["data.outside"]
    assert builder.problems(config.load("intent", {"data.outside": "none"}).recipe) == []
    [problem] = builder.problems(config.load("intent", {"data.outside": "TRUE"}).recipe)
    assert (problem.field, problem.fix) == ("data.outside", "write true")


def test_targets_tell_outside_from_unknown() -> None:
    found = TASK.targets(["b", "none", "c"], NO_MARKS, HEAD)
    assert (found.values.values.tolist(), found.unknown.tolist()) == ([1, OUTSIDE, -1], [False, False, True])
    assert TASK.targets(["none"], NO_MARKS, Head(("a", "b"))).unknown.tolist() == [True]


def test_the_threshold_is_the_one_of_the_best_f1() -> None:
    # Refusing below 0.8 - 0.75 finds all three and one too many: F1 6/7. Below 0.6 - 0.55: two of three, F1 4/5.
    chosen = TASK.calibrate(OUTCOMES, TARGETS, HEAD)
    assert chosen == {"threshold": pytest.approx((0.75 + 0.8) / 2)}
    assert TASK.calibrate(OUTCOMES, TARGETS, Head(("a", "b"))) == {}
    inside = Ragged.even(np.zeros(6))
    assert TASK.calibrate(OUTCOMES, inside, HEAD) == {}


def test_scores_are_of_the_rows_inside_and_of_telling_the_others() -> None:
    before = registry.METRICS["classes"].scores(OUTCOMES, TARGETS, HEAD)
    # Inside: a found, b taken for a, a found.
    assert before["accuracy"] == pytest.approx(2 / 3)
    assert "outside_f1" not in before
    found = registry.metric_for("classes").all(OUTCOMES, TARGETS, CHOSEN)
    assert {name: found[name] for name in before} == before
    # Below 0.7: rows 2, 4 and 5; rows 3, 4 and 5 are outside.
    assert found["outside_precision"] == found["outside_recall"] == found["outside_f1"] == pytest.approx(2 / 3)
    assert found["inside_kept"] == pytest.approx(2 / 3)
    assert found["accuracy_with_refusals"] == pytest.approx(3 / 6)
    # Pairs (inside, outside) in which the inside one is surer: 3 + 3 + 2 of 9.
    assert found["outside_auc"] == pytest.approx(8 / 9)
    assert found["rows"] == 6


def test_a_slice_of_outside_rows_alone_has_scores_too() -> None:
    every = {"source": ["chat"] * 3 + ["feed"] * 3}
    found = scores.measure(TASK, CHOSEN, "test", OUTCOMES, TARGETS, np.arange(6), every)
    assert {one["value"]: one["rows"] for one in found["slices"]["source"]} == {"(2 values with fewer than 20 rows)": 6}
    last = np.array([3, 4, 5])
    alone = scores.measure(TASK, CHOSEN, "test", OUTCOMES.take(last), TARGETS.take(last), np.arange(3), {})
    # The first of the three is sure enough to be kept.
    assert alone["scores"]["outside_recall"] == alone["scores"]["accuracy_with_refusals"] == pytest.approx(2 / 3)
    assert alone["scores"]["ece"] == 0
    assert sum(one["rows"] for one in alone["tables"]["calibration"]["bins"]) == 0


def test_tables_have_it_as_a_class() -> None:
    found = tables.classes(OUTCOMES, TARGETS, CHOSEN)
    assert found["confusion"]["labels"] == ["a", "b", "none"]
    assert found["confusion"]["counts"] == [[1, 0, 1], [1, 0, 0], [0, 1, 2]]
    assert found["threshold"] == 0.7
    assert {one["class"]: one["auc"] for one in found["per_class"]}["none"] == pytest.approx(8 / 9)


def test_described_rows_say_it() -> None:
    found = TASK.describe(OUTCOMES, TARGETS, CHOSEN)
    assert found.target == ["a", "b", "a", "none", "none", "none"]
    assert found.prediction == ["a", "a", "none", "b", "none", "none"]
    assert found.score.tolist() == pytest.approx([0.9, 0.8, 0.4, 0.75, 0.45, 0.5])
    assert found.loss.tolist() == pytest.approx([-math.log(part) for part in (0.9, 0.2, 0.6, 0.25, 0.45, 0.5)])


def test_answers_begin_with_it_below_the_threshold() -> None:
    outputs = np.log(np.array([[0.9, 0.1], [0.4, 0.6]], dtype=np.float32))
    sure, unsure = TASK.decode(outputs, [], [], CHOSEN, {})
    assert [one["label"] for one in sure] == ["a", "b"]
    assert [one["label"] for one in unsure] == ["none", "b", "a"]
    assert [one["score"] for one in unsure] == pytest.approx([0.4, 0.6, 0.4])
    assert [[one["label"] for one in answer] for answer in TASK.decode(outputs, [], [], CHOSEN, {"top_k": 1})] == [
        ["a"],
        ["none"],
    ]
    assert [one["label"] for one in TASK.decode(outputs, [], [], HEAD, {})[1]] == ["b", "a"]  # no threshold yet


# ---------------------------------------------------------------------------------------------------------- over HTTP


def test_the_endpoint_answers_outside_where_the_threshold_says_so(tmp_path: Path) -> None:
    inside = make_task_artifact(tmp_path / "inside", "classification", Head(("a", "b", "c")), seed=5)
    known = Predictor.load(inside, threads=1)(CORPUS)  # the same weights without a threshold
    sure = [answer[0]["score"] for answer in known]
    order = np.argsort(sure)
    least, next_to_least, most = (sure[order[place]] for place in (1, 2, -1))
    assert next_to_least - least > 1e-5 < most - next_to_least  # of which rounding in another batch is far below
    head = Head(("a", "b", "c"), {"outside": "none", "threshold": (least + next_to_least) / 2})
    folder = make_task_artifact(tmp_path / "outside", "classification", head, seed=5)
    app = build_app(Predictor.load(folder, threads=1), Serve())

    answers = predict(app, list(CORPUS))
    refused = set(order[:2].tolist())
    for place, (answer, plain) in enumerate(zip(answers, known, strict=True)):
        classes = answer[1:] if place in refused else answer
        assert [one["label"] for one in classes] == [one["label"] for one in plain]
        assert [one["score"] for one in classes] == pytest.approx([one["score"] for one in plain], abs=1e-6)
        if place in refused:  # first, with what is left of the best class's score
            assert answer[0] == {"label": "none", "score": pytest.approx(1 - sure[place], abs=1e-6)}
    first = [answer[0] for answer in answers]
    assert predict(app, list(CORPUS), top_k=1) == [[one] for one in first]
    assert [len(answer) for answer in predict(app, list(CORPUS), top_k=2)] == [2] * len(CORPUS)

    response = call(app, "POST", INFER, json={"inputs": [tensor(list(CORPUS), [len(CORPUS)])]})
    labels, scores = response.json()["outputs"]
    assert labels["data"] == [one["label"] for one in first]
    assert labels["data"].count("none") == 2
    assert scores["data"] == pytest.approx([one["score"] for one in first], abs=1e-6)
