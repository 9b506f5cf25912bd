"""Several labels for a text, and several heads on one encoder: losses by hand, scores against scikit-learn, answers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain import config
from rtrain.config import DistillConfig
from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, Head, RaggedArray, TokenBatch
from rtrain.data.store import builder as store_builder
from rtrain.data.store.store import Store
from rtrain.inference.predictor import Predictor
from rtrain.metrics import registry
from rtrain.models import builder as models_builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks import base
from rtrain.tasks.multi_head import MultiHead
from rtrain.tasks.multi_label import MultiLabel
from rtrain.trainer import evaluate, losses, step
from serve.app import build_app
from tests.conftest import labelled_rows
from tests.support.causes import caused_by
from tests.support.micro_batches import assert_same_step
from tests.support.serving import call
from tests.support.tiny import make_encoder, make_store, make_task_artifact
from tests.unit.trainer.test_step import make_still_encoder

LABELS, HEADS = MultiLabel(), MultiHead()
TOPICS = Head(("a", "b", "c"))
TWO_HEADS = Head(("intent=ask", "intent=buy", "mood=bad", "mood=good"), {"heads": [["intent", 2], ["mood", 2]]})
NO_POSITIONS = RaggedArray.from_rows([], np.int32)


def batch(targets: list[list[float]], teacher: Any = None) -> TokenBatch:
    rows = len(targets)
    one_per_row = np.ones(rows, dtype=np.int32)
    answers = np.empty((rows, 0)) if teacher is None else np.array(teacher)
    expected = RaggedArray.from_rows(targets, np.float32)
    ids = np.arange(rows, dtype=np.uint64)
    lengths = (one_per_row,) * 4
    return TokenBatch(*lengths, expected.values, expected.counts, ids, answers.astype(np.float32))


# ------------------------------------------------------------------------------------------------------ several labels


def test_labels_are_those_of_all_training_rows() -> None:
    assert LABELS.build_head({'["b", "a"]': 1, "[]": 5, "c": 2}).labels == ("a", "b", "c")
    with pytest.raises(UserError, check=caused_by("no_labels")):
        LABELS.build_head({"[]": 9})


def test_labels_that_are_whole_numbers_are_in_numeric_order() -> None:
    assert LABELS.build_head({"[10, 2]": 1, '["0", 1.0]': 1, "[true]": 1}).labels == ("0", "1", "10", "2", "true")
    assert LABELS.build_head({"[10, 2]": 1, '["0", 1.0]': 1}).labels == ("0", "1", "2", "10")
    assert base.get_task("classification").build_head({"10": 1, "9": 1, "-1": 1}, None).labels == ("-1", "9", "10")  # type: ignore[arg-type]
    labels = HEADS.build_head({'{"stars": 10, "mood": "b"}': 1, '{"stars": 9, "mood": "a"}': 1}).labels
    assert labels == ("stars=9", "stars=10", "mood=a", "mood=b")


def test_each_label_is_a_yes_or_a_no() -> None:
    targets = LABELS.build_targets(['["c", "a"]', "[]", "b", '["a", "new"]'], NO_POSITIONS, TOPICS)
    assert targets.values.to_matrix(3).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert targets.has_unknown_label.tolist() == [False, False, False, True]


def test_blanks_beside_a_label_in_a_list_make_no_second_class() -> None:
    assert LABELS.build_head({'["Delivery ", "Other"]': 1, '["Delivery"]': 1}).labels == ("Delivery", "Other")


def test_the_loss_of_labels_is_a_sum_over_rows_and_labels() -> None:
    rows = batch([[1, 0, 1], [0, 0, 0]])
    logits = torch.tensor([[2.0, -1.0, 0.0], [0.5, 0.0, -3.0]], dtype=torch.float64)
    chances = [[1 / (1 + math.exp(-float(z))) for z in row] for row in logits]
    truths = [[1, 0, 1], [0, 0, 0]]
    pairs = [pair for sides in zip(chances, truths, strict=True) for pair in zip(*sides, strict=True)]
    expected = -sum(math.log(chance if is_true else 1 - chance) for chance, is_true in pairs)
    assert LABELS.loss(logits, rows, TOPICS)["loss"].item() == pytest.approx(expected)
    assert LABELS.count_targets(rows, TOPICS) == {"loss": 6}


def test_a_student_with_its_teacher_s_chances_has_nothing_to_learn() -> None:
    teacher = [[2.0, -1.0, 0.0], [0.5, 0.0, -3.0]]
    rows = batch([[1, 0, 1], [0, 0, 0]], teacher)
    same = torch.tensor(teacher, dtype=torch.float64)
    assert LABELS.distillation_loss(same, rows, TOPICS, 2.0)["loss"].item() == pytest.approx(0, abs=1e-12)
    assert LABELS.distillation_loss(same + 1, rows, TOPICS, 2.0)["loss"].item() > 0.1


def test_the_threshold_is_the_best_of_the_validation_rows() -> None:
    # The label's rows have chances 0.4 and 0.3, the others 0.2 and 0.1: any threshold between 0.2 and 0.3 is perfect.
    chances = np.array([[0.4], [0.3], [0.2], [0.1]])
    row_results = RaggedArray.from_matrix(np.log(chances / (1 - chances)))
    targets, head = RaggedArray.from_matrix(np.array([[1], [1], [0], [0]])), Head(("a",))
    assert registry.METRICS["labels"].main_scores(row_results, targets, head)["micro_f1"] == 0
    facts = LABELS.calibrate(row_results, targets, head)
    assert 0.2 < facts["thresholds"]["a"] <= 0.3
    assert registry.METRICS["labels"].main_scores(row_results, targets, Head(("a",), facts))["micro_f1"] == 1
    no_rows = RaggedArray.from_matrix(np.empty((0, 1)))
    assert LABELS.calibrate(no_rows, no_rows, head) == {}


def test_each_label_has_a_threshold_of_its_own() -> None:
    """One label's logits lie 4 higher than the other's: no one threshold is right for both."""
    random = np.random.default_rng(0)
    targets = RaggedArray.from_matrix((random.random((400, 2)) < 0.3).astype(np.float32))
    logits = 2.0 * targets.to_matrix(2) + np.array([-5.0, -1.0]) + random.normal(0, 0.3, (400, 2))
    head = Head(("low", "high"))
    facts = LABELS.calibrate(RaggedArray.from_matrix(logits), targets, head)
    assert facts["thresholds"]["low"] < 0.1 < 0.4 < facts["thresholds"]["high"]
    scores = registry.METRICS["labels"].main_scores(RaggedArray.from_matrix(logits), targets, Head(head.labels, facts))
    assert scores["macro_f1"] > 0.97


def test_a_rare_label_leans_on_the_threshold_of_all() -> None:
    """Its only validation row has a logit far above the others' rows; a label without rows has the threshold of all."""
    common = np.repeat([2.0, -2.0], 100)
    logits = np.stack([common, np.where(np.arange(200) == 0, 9.0, -2.0), np.full(200, -3.0)], axis=1)
    true = np.stack([common > 0, np.arange(200) == 0, np.zeros(200)], axis=1)

    def thresholds(columns: slice, *labels: str) -> dict[str, float]:
        row_results, targets = (RaggedArray.from_matrix(side[:, columns].astype(np.float64)) for side in (logits, true))
        result: dict[str, float] = LABELS.calibrate(row_results, targets, Head(labels))["thresholds"]
        return result

    shared = thresholds(slice(3), "common", "rare", "absent")
    assert shared["absent"] == pytest.approx(shared["common"])
    assert shared["common"] <= shared["rare"] < thresholds(slice(1, 2), "rare")["rare"]


def test_rows_with_labels_are_described() -> None:
    logits, targets = (
        RaggedArray.from_matrix(np.array([[1.0, -1.0, 3.0], [-1.0, -2.0, -3.0]])),
        RaggedArray.from_matrix(np.array([[1, 1, 0], [0, 0, 0]])),
    )
    report = LABELS.explain_rows(logits, targets, TOPICS)
    assert (report.target, report.prediction) == ([["a", "b"], []], [["a", "c"], []])
    assert report.score.tolist() == pytest.approx([1 / (1 + math.exp(-1))] * 2)
    expected = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(1)), math.log(1 + math.exp(3))]
    assert report.loss[0] == pytest.approx(sum(expected) / 3)


# ------------------------------------------------------------------------------------------------------- several heads


def row(intent: str, mood: str) -> str:
    return json.dumps({"intent": intent, "mood": mood})


def test_each_column_is_a_head() -> None:
    head = HEADS.build_head({row("buy", "good"): 2, row("ask", ""): 1, row("ask", "bad"): 1})
    assert head == TWO_HEADS
    with pytest.raises(UserError, check=caused_by("one_label")):
        HEADS.build_head({row("buy", "good"): 2, row("ask", ""): 1})
    assert HEADS.validate_row("text", None, "buy") is not None
    assert HEADS.validate_row("text", None, row("buy", "")) is None


def test_a_row_counts_for_the_heads_whose_label_it_has() -> None:
    labels = [row("buy", "good"), row("ask", ""), row("", "bad"), row("new", "good")]
    targets = HEADS.build_targets(labels, NO_POSITIONS, TWO_HEADS)
    assert targets.values.to_matrix(2).tolist() == [[1, 1], [0, IGNORE_INDEX], [IGNORE_INDEX, 0], [-1, 1]]
    assert targets.has_unknown_label.tolist() == [False, False, False, True]
    rows = batch([[1, 1], [0, IGNORE_INDEX], [IGNORE_INDEX, 0]])
    assert HEADS.count_targets(rows, TWO_HEADS) == {"intent": 2, "mood": 2}
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.0], [3.0, 0.0, 9.0, 9.0], [9.0, 9.0, 0.0, 0.5]], dtype=torch.float64)
    found_loss = HEADS.loss(logits, rows, TWO_HEADS)
    assert found_loss["intent"].item() == pytest.approx(math.log(1 + math.e) - 1 + math.log(math.exp(3) + 1) - 3)
    assert found_loss["mood"].item() == pytest.approx(math.log(math.exp(2) + 1) + math.log(1 + math.exp(0.5)))


def test_heads_are_divided_by_their_own_targets_whatever_the_passes(tmp_path: Path) -> None:
    """I3 for several parts: a head with few labeled rows weighs as much as a head with all."""
    encoder = make_still_encoder(tmp_path / "encoder")
    network: Any = models_builder.build_network(encoder, HEADS, TWO_HEADS.labels, seed=0)
    network = network.double().train()
    rows = batch([[1, IGNORE_INDEX], [0, 1], [1, IGNORE_INDEX], [0, IGNORE_INDEX], [1, 0]])
    rows = TokenBatch(**{**vars(rows), "ids": np.array([7, 8, 9, 10, 11], dtype=np.int32)})
    assert losses.make_loss(HEADS, DistillConfig(), TWO_HEADS).num_parts == 2
    partitions = ([[0, 1, 2, 3, 4]], [[0, 2], [1], [3, 4]], [[3], [0, 1, 2], [4]])
    loss = assert_same_step(HEADS, TWO_HEADS, network, rows, partitions)
    sums = HEADS.loss(step.forward(network, rows, 0, "fp64").detach(), rows, TWO_HEADS)
    assert loss == pytest.approx(sums["intent"].item() / 5 + sums["mood"].item() / 2, rel=1e-12)


def test_an_update_without_a_head_s_label_trains_the_others(tmp_path: Path) -> None:
    encoder = make_still_encoder(tmp_path / "encoder")
    network: Any = models_builder.build_network(encoder, HEADS, TWO_HEADS.labels, seed=0)
    rows = batch([[1, IGNORE_INDEX], [0, IGNORE_INDEX]])
    rows = TokenBatch(**{**vars(rows), "ids": np.array([7, 8], dtype=np.int32)})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    done = step.StepRunner(
        DDPStrategy(network), optimizer, losses.make_loss(HEADS, DistillConfig(), TWO_HEADS), pad_id=0
    ).run_step([rows])
    assert math.isfinite(done.loss)
    head = dict(network.named_parameters())["classifier.weight"].grad
    assert (head[:2].abs().max() > 0, head[2:].abs().max() == 0) == (True, True)


def test_scores_of_heads_are_of_the_rows_that_have_their_label() -> None:
    logits = np.array([[0, 1, 1, 0], [0, 1, 5, 0], [1, 0, 0, 1]], dtype=np.float64)
    targets = RaggedArray.from_matrix(np.array([[1, 0], [0, IGNORE_INDEX], [0, 0]]))
    scores = registry.METRICS["heads"].main_scores(RaggedArray.from_matrix(logits), targets, TWO_HEADS)
    assert [scores["intent_accuracy"], scores["mood_accuracy"]] == pytest.approx([2 / 3, 1 / 2])
    assert scores["mean_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert scores["rows"] == 3
    report = HEADS.explain_rows(RaggedArray.from_matrix(logits), targets, TWO_HEADS)
    assert report.target == [["buy", "bad"], ["ask", ""], ["ask", "bad"]]
    assert report.prediction == [["buy", "bad"], ["buy", "bad"], ["ask", "good"]]


# ------------------------------------------------------------------------------------------------------- the whole way


def write(folder: Path) -> Path:
    lines = []
    for number, (text, label) in enumerate(labelled_rows(200)):
        combined = f"{label}|urgent" if number % 4 == 0 else "" if number % 7 == 0 else label
        lines.append(f"{text},{label},{'' if number % 5 == 0 else ['good', 'bad'][number % 2]},{combined}")
    path = folder / "rows.csv"
    path.write_text("text,intent,mood,topics\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("task", "settings", "labels"),
    [
        ("multi_label", {"data.label": "topics", "data.separator": "|"}, ("login", "parcel", "refund", "urgent")),
        (
            "multi_head",
            {"data.label": ["intent", "mood"]},
            ("intent=login", "intent=parcel", "intent=refund", "mood=bad", "mood=good"),
        ),
    ],
)
def test_from_a_file_to_an_answer(task: str, settings: dict[str, Any], labels: tuple[str, ...], tmp_path: Path) -> None:
    overrides = {"task": task, "data.path": str(write(tmp_path)), **settings}
    recipe = config.load_config("intent", overrides).recipe
    encoder = make_encoder(tmp_path / "encoder")
    store: Store = make_store(recipe, encoder, tmp_path)
    assert store.manifest.labels == labels
    assert (store.manifest.quarantined, sum(store.manifest.rows.values())) == (0, 200)
    result = base.get_task(task)
    network: Any = models_builder.build_network(encoder, result, labels, seed=0)
    scores = evaluate.evaluate(DDPStrategy(network), result, store, "valid", pad_id=0, precision="fp32")
    assert scores["rows"] == store.num_rows("valid")
    assert registry.get_metric(result.output).headline in scores
    folder = make_task_artifact(tmp_path / "artifact", task, store.manifest.head)
    predictor = Predictor.load(folder, threads=1)
    reply = call(build_app(predictor, config.ServeConfig()), "POST", "/predict", json={"inputs": ["money back"] * 2})
    [answer, same] = reply.json()
    assert answer == same
    if task == "multi_label":
        assert {entry["label"] for entry in answer} == set(labels)
    else:
        assert {name: sum(entry["score"] for entry in entries) for name, entries in answer.items()} == {
            "intent": pytest.approx(1),
            "mood": pytest.approx(1),
        }


@pytest.mark.parametrize("task", ["classification", "multi_label", "regression"])
def test_several_columns_of_labels_are_refused_by_a_task_that_reads_one(task: str) -> None:
    overrides = {"task": task, "data.path": "rows.csv", "data.label": ["intent", "mood"]}
    [problem] = store_builder.find_problems(config.load_config("intent", overrides).recipe)
    assert problem.field == "data.label"
    assert "task=multi_head" in problem.fix
    assert store_builder.find_problems(config.load_config("intent", {**overrides, "task": "multi_head"}).recipe) == []
