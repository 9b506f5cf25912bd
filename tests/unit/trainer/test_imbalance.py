"""Weights of labels and rows: against scikit-learn and torch, exact over micro-batches, and refused where they mean
nothing; the first bias of a multi-label head, and the warning of a model with one answer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from rtrain import config
from rtrain.config import Recipe, TrainConfig
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import IGNORE_INDEX, Head, RaggedArray, TokenBatch
from rtrain.core.run_folder import Run
from rtrain.data import sampling
from rtrain.data.store.store import Store
from rtrain.data.stream import StreamSpec, plan_worker_batch
from rtrain.models import builder
from rtrain.parallel import layout
from rtrain.tasks import base
from rtrain.tasks.label_losses import get_label_loss
from rtrain.trainer import imbalance, losses, trainer
from rtrain.trainer.imbalance import TargetWeighting, check_class_weight_labels, check_weighting
from tests.support.tiny import make_encoder, make_store
from tests.unit.trainer.test_trainer import Recorder, weights_digest

CLASSES, LABELS, HEADS = (base.get_task(name) for name in ("classification", "multi_label", "multi_head"))
THREE = Head(("a", "b", "c"))
TWO_HEADS = Head(("intent=ask", "intent=buy", "mood=bad", "mood=good"), {"heads": [["intent", 2], ["mood", 2]]})
WEIGHTS = np.array([0.5, 0.0, 2.0, 1.25])


def batch(targets: list[list[float]], row_weights: Any = None) -> TokenBatch:
    lengths = np.ones(len(targets), dtype=np.int32)
    values, ids = RaggedArray.from_rows(targets, np.float32), np.arange(len(targets), dtype=np.uint64)
    no_teacher = np.empty((len(targets), 0), dtype=np.float32)
    tokens = TokenBatch(lengths, lengths, lengths, lengths, values.values, values.counts, ids, no_teacher)
    return replace(tokens, row_weights=row_weights)


def make_weighting(task: base.Task, head: Head, **class_weights: Any) -> TargetWeighting:
    return TargetWeighting(task, head, get_label_loss(TrainConfig()), class_weights)


# --------------------------------------------------------------------------------------------------- rows and a store


def recipe_of(folder: Path, **settings: Any) -> Recipe:
    """`task` and settings with `__` for the point."""
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    defaults = {"data.path": str(folder / "rows.jsonl"), "train.seed": 3, "train.global_batch_size": 16}
    return config.load_config("intent", {**defaults, **overrides}).recipe


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 rows: every tenth is urgent, every third has the topic `late`, the language is uneven."""
    folder = tmp_path_factory.mktemp("imbalance")
    make_encoder(folder / "encoder")
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(120):
            row = {
                "text": f"number {number} please help with the parcel {'now ' * (number % 4)}",
                "label": "urgent" if number % 10 == 0 else "usual",
                "topics": ["late"] * (number % 3 == 0) + ["rare"] * (number % 12 == 0),
                "lang": "de" if number % 8 == 0 else "en",
                "weight": number % 4 / 2,
            }
            file.write(json.dumps(row) + "\n")
    return folder


SEVERAL = {"task": "multi_label", "data__label": "topics"}
MIXED = {"data__weight_column": "weight", "data__sampling": {"column": "lang", "temperature": 0.0}}


@pytest.fixture(scope="module")
def classes_store(ground: Path) -> Store:
    return make_store(recipe_of(ground, **MIXED), ground / "encoder", ground)


@pytest.fixture(scope="module")
def labels_store(ground: Path) -> Store:
    return make_store(recipe_of(ground, **SEVERAL), ground / "encoder", ground)


# ----------------------------------------------------------------------------------------------------- class weights


def test_balanced_weights_are_those_of_scikit_learn(classes_store: Store) -> None:
    targets = classes_store.targets("train").values.astype(int)
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=targets)
    weights = imbalance.compute_class_weights(TrainConfig(class_weights="balanced"), CLASSES, classes_store)
    assert weights["loss"].tolist() == pytest.approx([*expected, 1.0])


def test_effective_weights_are_those_of_the_paper(classes_store: Store) -> None:
    rows = np.bincount(classes_store.targets("train").values.astype(int))
    inverse = (1 - 0.999) / (1 - 0.999**rows)
    weights = imbalance.compute_class_weights(TrainConfig(class_weights="effective"), CLASSES, classes_store)
    assert weights["loss"][:2].tolist() == pytest.approx((inverse * 2 / inverse.sum()).tolist())


def test_positives_of_a_label_weigh_as_much_as_its_negatives(labels_store: Store) -> None:
    targets = labels_store.targets("train").to_matrix(2)
    weights = imbalance.compute_class_weights(TrainConfig(class_weights="balanced"), LABELS, labels_store)
    assert weights["loss"].tolist() == pytest.approx([*((targets == 0).sum(axis=0) / targets.sum(axis=0)), 1.0])


def test_labels_without_a_weight_weigh_one(classes_store: Store) -> None:
    train = TrainConfig(class_weights={"urgent": 5})
    assert imbalance.compute_class_weights(train, CLASSES, classes_store)["loss"].tolist() == [5, 1, 1]


# --------------------------------------------------------------------------------------------------------- the loss


def test_the_weighted_loss_of_classes_is_torch_s_weighted_mean() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, class_weights = batch([[0], [2], [1], [2]]), np.array([1.0, 3.0, 0.25, 1.0])
    weighting = make_weighting(CLASSES, THREE, loss=class_weights)
    targets, weight = torch.tensor([0, 2, 1, 2]), torch.from_numpy(class_weights[:3])
    expected = torch.nn.functional.cross_entropy(logits, targets, weight=weight)
    [total], [value] = weighting.total_weights(tokens).values(), weighting.sum_losses(logits, tokens).values()
    assert value.item() / total == pytest.approx(expected.item())


def test_the_weighted_loss_of_labels_is_torch_s_with_weights_of_positives() -> None:
    logits = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens = batch([[1, 0, 1], [0, 0, 1]])
    weighting = make_weighting(LABELS, THREE, loss=np.array([4.0, 2.0, 0.5, 1.0]))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits,
        torch.tensor([[1.0, 0, 1], [0, 0, 1]], dtype=torch.float64),
        pos_weight=torch.tensor([4.0, 2.0, 0.5]),
        reduction="sum",
    )
    assert weighting.sum_losses(logits, tokens)["loss"].item() == pytest.approx(expected.item())
    assert weighting.total_weights(tokens) == {"loss": 4.0 + 0.5 + 0.5 + 3.0}


TARGETS: dict[str, tuple[base.Task, Head, list[list[float]], int]] = {
    "classification": (CLASSES, THREE, [[0], [2], [1], [2]], 3),
    "multi_label": (LABELS, THREE, [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]], 3),
    "multi_head": (HEADS, TWO_HEADS, [[0, 1], [IGNORE_INDEX, 0], [1, IGNORE_INDEX], [1, 1]], 4),
    "regression": (base.get_task("regression"), Head(("score",), {"mean": 2.0, "std": 0.5}), [[1], [2], [3], [2]], 1),
    "token_tags": (
        base.get_task("token_tags"),
        Head(("O", "B-PER", "I-PER")),
        [[0], [2], [IGNORE_INDEX], [1]],
        3,
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_without_weights_of_classes_and_with_equal_rows_it_is_the_plain_loss(name: str) -> None:
    task, head, targets, width = TARGETS[name]
    logits = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plain, counts = task.loss(logits, batch(targets), head), task.count_targets(batch(targets), head)
    weighting, tokens = make_weighting(task, head), batch(targets, np.full(4, 2.0))
    for part, value in weighting.sum_losses(logits, tokens).items():
        assert value.item() == pytest.approx(2 * plain[part].item())
    assert weighting.total_weights(tokens) == {part: 2 * count for part, count in counts.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_sums_and_weights_add_up_over_micro_batches(name: str) -> None:
    task, head, targets, width = TARGETS[name]
    class_weights = {part: np.arange(1.0, len(names) + 2) for part, names in task.label_names(head).items()}
    weighting = make_weighting(task, head, **class_weights)
    logits = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens, parts = batch(targets, WEIGHTS), ([0, 2], [1], [3])
    sums, total = weighting.sum_losses(logits, tokens), weighting.total_weights(tokens)
    for part in sums:
        values = [weighting.sum_losses(logits[rows], tokens.take(rows))[part].item() for rows in parts]
        assert sum(values) == pytest.approx(sums[part].item(), rel=1e-14)
        weights = [weighting.total_weights(tokens.take(rows))[part] for rows in parts]
        assert sum(weights) == pytest.approx(total[part], rel=1e-14)


def test_a_row_of_weight_zero_has_no_gradient() -> None:
    logits = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    make_weighting(CLASSES, THREE).sum_losses(logits, batch([[0]] * 4, WEIGHTS))["loss"].backward()
    assert (logits.grad.abs().sum(dim=1) > 0).tolist() == [True, False, True, True]  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    ("recipe", "settings", "fields"),
    [
        ("essay", {"train.class_weights": "balanced", "train.loss": "focal"}, ["train.class_weights", "train.loss"]),
        ("squad", {"data.weight_column": "weight"}, ["data.weight_column"]),
        ("intent", {"train.loss": "asymmetric"}, ["train.loss"]),
        ("domain-adapt", {"data.sampling": {"column": "lang"}}, ["data.sampling"]),
        ("essay", {"data.weight_column": "weight"}, []),
        ("entities", {"train.class_weights": "balanced", "train.loss": "focal", "data.weight_column": "w"}, []),
    ],
)
def test_weights_are_refused_by_name_where_they_mean_nothing(
    recipe: str, settings: dict[str, Any], fields: list[str]
) -> None:
    problems = check_weighting(config.load_config(recipe, settings).recipe)
    assert [(problem.field, problem.code) for problem in problems] == [(field, "unsupported") for field in fields]


def test_an_unknown_label_is_named(ground: Path) -> None:
    recipe = recipe_of(ground, train__class_weights={"urgent": 2, "1.0": 2, "urgnet": 2})
    [problem] = check_class_weight_labels(recipe, ("1", "urgent", "usual"))
    assert (problem.field, problem.value, problem.code) == ("train.class_weights.urgnet", 2.0, "unknown_name")


def test_labels_that_yaml_reads_as_numbers_and_truth_values_are_names() -> None:
    name, value = config.parse_assignment("train.class_weights={2: 5, yes: 3}")
    recipe = config.load_config("intent", {name: value}).recipe
    assert recipe.train.class_weights == {"2": 5.0, "true": 3.0}


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("train.class_weights", "balance", "unknown_name"),
        ("train.class_weights", ["a"], "unknown_name"),
        ("train.class_weights", {"a": -1}, "out_of_range"),
        ("train.class_weights", {"a": "much"}, "out_of_range"),
        ("train.class_weights", {"a": float("nan")}, "out_of_range"),
        ("train.loss", "focl", "unknown_name"),
        ("data.sampling", {"temperature": 0.5}, "missing"),
        ("data.sampling", {"column": "lang", "temperature": 1.5}, "out_of_range"),
    ],
)
def test_bad_settings_are_refused(name: str, value: Any, code: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.load_config("intent", {name: value})
    [problem] = error.value.problems
    assert (problem.field.startswith(name), problem.code) == (True, code)


def test_only_settings_with_an_effect_identify_a_run(ground: Path) -> None:
    plain = recipe_of(ground).recipe_digest()
    assert recipe_of(ground, train__focal_gamma=1.0, train__asymmetric_margin=0.1).recipe_digest() == plain
    changed: list[dict[str, Any]] = [
        {"train__loss": "focal"},
        {"train__loss": "focal", "train__focal_gamma": 1.0},
        {"train__class_weights": "balanced"},
        {"data__weight_column": "weight"},
        {"data__sampling": {"column": "lang"}},
        {"data__sampling": {"column": "lang", "temperature": 0.7}},
    ]
    assert len({plain, *(recipe_of(ground, **settings).recipe_digest() for settings in changed)}) == 7


def test_a_student_is_refused_weights_of_labels(ground: Path) -> None:
    with pytest.raises(ConfigError) as error:
        recipe_of(ground, distill__teacher="v1", train__class_weights="balanced", train__loss="focal")
    assert {problem.field for problem in error.value.problems} == {"train.class_weights", "train.loss"}


# ------------------------------------------------------------------------------------------------------- the first bias


def output_bias(network: Any) -> list[float]:
    bias: list[float] = network.classifier.bias.tolist()
    return bias


def test_a_new_head_of_labels_starts_at_their_log_odds(ground: Path, labels_store: Store, tmp_path: Path) -> None:
    recipe, labels = recipe_of(ground, **SEVERAL), labels_store.manifest.labels
    network: Any = builder.build_network(ground / "encoder", LABELS, labels, 0)
    imbalance.initialize_output_bias(network, recipe, LABELS, labels_store)
    positives, rows = labels_store.targets("train").to_matrix(2).sum(axis=0), labels_store.num_rows("train")
    log_odds = np.log((positives + 1) / (rows - positives + 1)).tolist()
    assert output_bias(network) == pytest.approx(log_odds, abs=1e-6)
    network.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((ground / "encoder" / "tokenizer.json").read_bytes())
    network.classifier.bias.data.fill_(7.0)
    network.save_pretrained(tmp_path)
    trained: Any = builder.build_network(tmp_path, LABELS, labels, 0)
    imbalance.initialize_output_bias(trained, recipe, LABELS, labels_store)
    assert output_bias(trained) == [7.0, 7.0]
    renamed: Any = builder.build_network(tmp_path, LABELS, ("x", "y"), 0)
    imbalance.initialize_output_bias(renamed, recipe, LABELS, labels_store)
    assert output_bias(renamed) == pytest.approx(log_odds, abs=1e-6)


def test_balanced_weights_start_a_head_of_labels_even(ground: Path, labels_store: Store) -> None:
    recipe = recipe_of(ground, **SEVERAL, train__class_weights="balanced")
    network: Any = builder.build_network(ground / "encoder", LABELS, labels_store.manifest.labels, 0)
    imbalance.initialize_output_bias(network, recipe, LABELS, labels_store)
    assert output_bias(network) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_classes_start_at_zero(ground: Path, classes_store: Store) -> None:
    network: Any = builder.build_network(ground / "encoder", CLASSES, classes_store.manifest.labels, 0)
    imbalance.initialize_output_bias(network, recipe_of(ground), CLASSES, classes_store)
    assert output_bias(network) == [0.0, 0.0]


# --------------------------------------------------------------------------------------------------------- trainings


def train(recipe: Recipe, store: Store, ground: Path, run: Path, end_step: int | None = None) -> tuple[Recorder, Any]:
    """One worker, from the newest checkpoint of `run`."""
    task, order = base.get_task(recipe.task), sampling.make_order(recipe, store)
    network: Any = builder.build_network(
        ground / "encoder", task, store.manifest.labels, recipe.train.seed, recipe.model
    )
    imbalance.initialize_output_bias(network, recipe, task, store)
    context = trainer.TrainingContext(
        recipe=recipe,
        run=Run(run),
        store=store,
        task=task,
        loss=losses.make_run_loss(recipe, task, store),
        order=order,
        pad_id=0,
        precision="fp32",
        end_step=end_step or order.num_steps,
    )
    recorder = Recorder()
    strategy = layout.build_strategy(network, recipe.train, None, recorder.event)
    spec = StreamSpec(store.folder, order, 1, 0, 4)
    trainer.train(
        context,
        strategy,
        lambda first, last: (plan_worker_batch(store, spec, step) for step in range(first, last)),
        recorder,
        trainer.Clock(),
    )
    return recorder, network


def test_a_weighted_and_mixed_run_resumes_bit_for_bit(ground: Path, classes_store: Store, tmp_path: Path) -> None:
    settings = {**MIXED, "train__class_weights": "balanced", "train__loss": "focal", "train__epochs": 2}
    recipe = recipe_of(ground, **settings)
    recorder, undisturbed = train(recipe, classes_store, ground, tmp_path / "whole")
    train(recipe, classes_store, ground, tmp_path / "parts", end_step=4)
    rest, resumed = train(recipe, classes_store, ground, tmp_path / "parts")
    assert rest.of("started")[0]["step"] == 4
    assert weights_digest(resumed) == weights_digest(undisturbed)
    assert rest.of("trained")[0]["order_digest"] == recorder.of("trained")[0]["order_digest"]


def test_weights_change_what_is_learned(ground: Path, classes_store: Store, tmp_path: Path) -> None:
    digests = set()
    changes: list[dict[str, Any]] = [{}, {"train__class_weights": "balanced"}, {"train__loss": "focal"}]
    for number, settings in enumerate(changes):
        recipe = recipe_of(ground, **MIXED, **settings, train__epochs=1)
        digests.add(weights_digest(train(recipe, classes_store, ground, tmp_path / str(number))[1]))
    assert len(digests) == 3


def test_a_model_with_one_answer_is_reported_at_each_evaluation(ground: Path, tmp_path: Path) -> None:
    """With a learning rate near zero a model of rare labels answers none to every row."""
    recipe = recipe_of(ground, **SEVERAL, optim__lr=1e-7, train__epochs=2, data__valid_share=0.4)
    store = make_store(recipe, ground / "encoder", tmp_path)
    recorder, _ = train(recipe, store, ground, tmp_path / "run")
    rows = store.num_rows("valid")
    without = int((store.targets("valid").to_matrix(2).sum(axis=1) > 0).sum())
    events = recorder.of("collapsed")
    assert [event["step"] for event in events] == [event["step"] for event in recorder.of("evaluated")[:2]]
    assert {(event["rows"], event["other_rows_with_answer"], event["split"]) for event in events} == {
        (rows, without, "valid")
    }
