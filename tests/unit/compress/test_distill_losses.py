"""The loss of a student, for every task: rows without labels, relations, hidden states. Sums, whatever the passes."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rtrain.config import Config, DistillConfig, ModelConfig, with_overrides
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, TokenBatch, collate
from rtrain.data import unlabeled
from rtrain.data.store.store import Store
from rtrain.models import builder, network_parts
from rtrain.models.pack_layout import make_layout
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks import base
from rtrain.trainer import losses, optimizers, step
from tests.ray import test_tasks as tasks
from tests.support.tiny import make_store

TASKS = ("classification", *tasks.TASKS)
ROWS = 12
"""Rows of a pass: the first half has labels."""


@dataclass(frozen=True)
class Case:
    config: Config
    labelled: Store
    rows: Store
    """The same texts, read without their labels."""

    @property
    def task(self) -> base.Task:
        return base.get_task(self.config.recipe.task)

    def tokens(self) -> TokenBatch:
        """Rows of both stores, as a joined store gives them, with a teacher's answers that were drawn."""
        task, head, half = self.task, self.labelled.manifest.head, np.arange(ROWS // 2)
        first, other = self.labelled.read_tokens("train", half), self.rows.read_tokens("train", half)
        names = ("ids", "window_lengths", "pair_start", "windows_per_row", "targets", "targets_per_row", "row_ids")
        pair = {name: np.concatenate([getattr(first, name), getattr(other, name)]) for name in names}
        lines = len(pair["ids"]) if task.is_token_level else ROWS
        answers = np.random.default_rng(0).normal(size=(lines, len(head.labels))).astype(np.float32)
        return TokenBatch(**pair, teacher_logits=answers, is_unlabeled=np.arange(ROWS) >= ROWS // 2)


@pytest.fixture(scope="module", params=TASKS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    config = tasks.settings("multi_head" if request.param == "classification" else request.param, folder)
    if request.param == "classification":
        config = with_overrides(config, {"task": "classification", "data.label": "intent", "data.separator": None})
    recipe = with_overrides(config, {"distill.unlabeled_rows_path": config.recipe.data.path}).recipe
    encoder = Path(recipe.model.name)
    labelled = make_store(recipe, encoder, folder)
    rows = make_store(unlabeled.make_unlabeled_recipe(recipe), encoder, folder, labelled.manifest.head)
    return Case(config, labelled, rows)


def logits_of(tokens: TokenBatch, case: Case, seed: int = 1) -> torch.Tensor:
    lines = len(tokens.ids) if case.task.is_token_level else len(tokens.window_lengths)
    samples = np.random.default_rng(seed).normal(size=(lines, len(case.labelled.manifest.labels)))
    return torch.tensor(samples, dtype=torch.float64, requires_grad=True)


def loss_of(case: Case, **settings: Any) -> losses.RunLoss:
    return losses.make_loss(case.task, DistillConfig(teacher="v1", **settings), case.labelled.manifest.head)


def halves(tokens: TokenBatch) -> Iterator[tuple[TokenBatch, Any]]:
    """Passes over every second row, and their lines of a matrix over the windows or tokens of all."""
    for start in (0, 1):
        rows = np.arange(start, len(tokens), 2)
        windows = np.flatnonzero(np.isin(np.repeat(np.arange(len(tokens)), tokens.windows_per_row), rows))
        ids = np.flatnonzero(np.isin(np.repeat(np.arange(len(tokens.window_lengths)), tokens.window_lengths), windows))
        yield tokens.take(rows), (windows, ids)


def test_rows_without_labels_become_rows_of_their_task(case: Case) -> None:
    """None is set aside for the label that it lacks, and it asks of the student what its text asks."""
    assert case.rows.manifest.quarantined <= case.labelled.manifest.quarantined + case.rows.num_rows("train") // 10
    every = sum(case.labelled.num_rows(split) for split in ("train", "valid", "test"))
    assert case.rows.num_rows("train") >= every
    assert case.rows.manifest.labels == case.labelled.manifest.labels
    tokens = case.rows.read_tokens("train", np.arange(case.rows.num_rows("train")))
    assert all(count > 0 for count in case.task.count_targets(tokens, case.rows.manifest.head).values())


def test_a_row_without_label_has_the_teacher_s_part_alone(case: Case) -> None:
    tokens, head = case.tokens(), case.labelled.manifest.head
    logits, loss, alpha = logits_of(tokens, case), loss_of(case, alpha=0.7), 0.7
    labelled = tokens.take(np.arange(ROWS // 2))
    lines = len(labelled.ids) if case.task.is_token_level else len(labelled.window_lengths)
    hard = case.task.loss(logits[:lines], labelled, head)
    soft = case.task.distillation_loss(logits, tokens, head, 2.0)
    expected = [(1 - alpha) * hard[name].item() + alpha * soft[name].item() for name in case.task.loss_parts(head)]
    assert loss(logits, tokens).tolist() == pytest.approx(expected, rel=1e-9)


def test_what_stands_in_for_a_label_is_not_learned(case: Case) -> None:
    """Only these rows have logits without a gradient at alpha=0."""
    tokens = case.tokens()
    logits = logits_of(tokens, case)
    loss_of(case, alpha=0.0)(logits, tokens).sum().backward()
    assert logits.grad is not None
    labelled = tokens.take(np.arange(ROWS // 2))
    lines = len(labelled.ids) if case.task.is_token_level else len(labelled.window_lengths)
    assert logits.grad[:lines].abs().sum() > 0
    assert logits.grad[lines:].abs().sum() == 0


def test_every_part_is_finite_and_adds_up_over_passes(case: Case) -> None:
    tokens, loss = case.tokens(), loss_of(case)
    logits = logits_of(tokens, case)
    full = loss(logits, tokens)
    [gradient] = torch.autograd.grad(full.sum(), [logits])
    assert torch.isfinite(full).all()
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).any()
    total, counted = torch.zeros_like(full), np.zeros(loss.num_parts)
    for passed, (windows, ids) in halves(tokens):
        lines = ids if case.task.is_token_level else windows
        total = total + loss(logits[torch.from_numpy(lines)], passed)
        counted += np.array(loss.count_targets(passed))
    assert total.tolist() == pytest.approx(full.tolist(), rel=1e-9)
    assert counted.tolist() == loss.count_targets(tokens)


def test_a_pass_of_rows_without_labels_alone(case: Case) -> None:
    tokens = case.tokens().take(np.arange(ROWS // 2, ROWS))
    logits, head = logits_of(tokens, case), case.labelled.manifest.head
    soft = case.task.distillation_loss(logits, tokens, head, 2.0)
    expected = [0.7 * soft[name].item() for name in case.task.loss_parts(head)]
    assert loss_of(case)(logits, tokens).tolist() == pytest.approx(expected, rel=1e-9)


def test_words_of_a_vocabulary_are_not_taught() -> None:
    nothing = collate([])
    with pytest.raises(UserError):
        base.get_task("masked_lm").distillation_loss(torch.zeros(0, 3), nothing, Head(), 1.0)


# ------------------------------------------------------------------------------------------------------- inside models

BERT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}
DISTILBERT: dict[str, Any] = {
    "vocab_size": 60,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "initializer_range": 0.3,
}
STUDENTS: dict[str, dict[str, Any]] = {
    "bert": {**BERT, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20},
    "roberta": {**BERT, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 20},
    "electra": {**BERT, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 20},
    "distilbert": {**DISTILBERT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20},
}
TEACHER: dict[str, Any] = {
    **BERT,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 20,
}
LENGTHS = (7, 3, 11, 3, 5, 1)


def network_of(folder: Path, kind: str, settings: dict[str, Any], packs: bool = True) -> Any:
    """In float64 and without dropout, so that sums are equal to rounding."""
    if not folder.is_dir():
        torch.manual_seed(len(kind))
        context = transformers.AutoConfig.for_model(kind, num_labels=3, **settings)
        transformers.AutoModelForSequenceClassification.from_config(context).save_pretrained(folder)
    task = base.get_task("classification")
    return (
        builder.build_network(folder, task, ("a", "b", "c"), 0, ModelConfig(pooling="own"), pack=packs).double().train()
    )


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> TokenBatch:
    sizes, samples = np.array(lengths, dtype=np.int32), np.random.default_rng(3)
    all_ones, answers = np.ones(len(sizes), dtype=np.int32), samples.normal(size=(len(sizes), 3)).astype(np.float32)
    ids = samples.integers(3, 60, sizes.sum()).astype(np.int32)
    targets = samples.integers(0, 3, len(sizes)).astype(np.float32)
    return TokenBatch(ids, sizes, sizes, all_ones, targets, all_ones, np.arange(len(sizes), dtype=np.uint64), answers)


def student_of(folder: Path, kind: str, packs: bool = True, **settings: Any) -> tuple[Any, Any, losses.RunLoss]:
    """(student, teacher, the student's loss)."""
    student = network_of(folder / kind, kind, STUDENTS[kind], packs)
    teacher = network_of(folder / "teacher", "bert", TEACHER, packs).requires_grad_(False).eval()
    distill = DistillConfig(teacher="v1", **{"relation_heads": 4, **settings})
    within = losses.FeatureDistillationLoss(student, teacher, distill, 0, "fp64")
    return student, teacher, losses.make_loss(base.get_task("classification"), distill, feature_loss=within)


BOTH: dict[str, Any] = {"relation_loss_weight": 0.5, "hidden_loss_weight": 0.25}


def by_hand(student: Any, teacher: Any, tokens: TokenBatch, heads: int, layer: int) -> float:
    """Relations as the paper has them, row by row, from Transformers' own padded forward passes."""
    total, ends = 0.0, np.cumsum(tokens.window_lengths)
    for end, length in zip(ends, tokens.window_lengths, strict=True):
        ids = torch.from_numpy(tokens.ids[end - length : end].astype(np.int64))[None]
        entry = []
        for network, place in ((teacher, layer), (student, -1)):
            result = network.base_model(ids, output_hidden_states=True).hidden_states
            part = losses.encoder_layers(network)[place]
            before = result[: len(losses.encoder_layers(network))][place]
            names = losses.PROJECTION_NAMES[network.config.model_type]
            vectors = [part.get_submodule(name)(before)[0] for name in names]
            cut = [item.reshape(int(length), heads, -1).transpose(0, 1) for item in vectors]
            entry.append([item @ item.transpose(1, 2) / item.shape[-1] ** 0.5 for item in cut])
        for context, mine in zip(*entry, strict=True):
            shares, logs = torch.softmax(context, -1), torch.log_softmax(mine, -1)
            total += float((shares * (shares.log() - logs)).sum()) / heads
    return total


@pytest.mark.parametrize("kind", STUDENTS)
@pytest.mark.parametrize("layer", [None, 2])
def test_relations_are_those_of_the_paper(kind: str, layer: int | None, tmp_path: Path) -> None:
    tokens = rows_of()
    student, _, loss = student_of(tmp_path, kind, relation_loss_weight=1.0, relation_layer=layer)
    logits = step.forward(student, tokens, 0, "fp64")
    result = loss(logits, tokens)[-1].item()
    plain = network_of(tmp_path / kind, kind, STUDENTS[kind], packs=False).eval()
    other = network_of(tmp_path / "teacher", "bert", TEACHER, packs=False).eval()
    with torch.no_grad():
        expected = by_hand(plain, other, tokens, 4, -1 if layer is None else layer - 1)
    assert result == pytest.approx(expected, rel=1e-9)
    assert loss.count_targets(tokens) == [len(LENGTHS), sum(LENGTHS)]


@pytest.mark.parametrize("kind", STUDENTS)
def test_passes_and_padding_change_no_sum(kind: str, tmp_path: Path) -> None:
    tokens = rows_of()
    student, _, loss = student_of(tmp_path, kind, **BOTH)
    full = loss(step.forward(student, tokens, 0, "fp64"), tokens)
    cut = sum(loss(step.forward(student, part, 0, "fp64"), part) for part, _ in halves(tokens))
    assert isinstance(cut, torch.Tensor)
    assert cut.tolist() == pytest.approx(full.tolist(), rel=1e-9)
    padded, _, separate = student_of(tmp_path, kind, packs=False, **BOTH)
    assert separate(step.forward(padded, tokens, 0, "fp64"), tokens).tolist() == pytest.approx(full.tolist(), rel=1e-9)


def test_a_student_that_is_its_teacher_is_nowhere_apart(tmp_path: Path) -> None:
    """Its map begins as the identity."""
    twin = network_of(tmp_path / "teacher", "bert", TEACHER)
    teacher = network_of(tmp_path / "teacher", "bert", TEACHER).requires_grad_(False).eval()
    distill = DistillConfig(teacher="v1", relation_heads=6, **BOTH)
    tokens, within = rows_of(), losses.FeatureDistillationLoss(twin, teacher, distill, 0, "fp64")
    step.forward(twin, tokens, 0, "fp64")
    assert within(tokens).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_gradients_reach_the_student_and_the_map_alone(tmp_path: Path) -> None:
    tokens = rows_of()
    student, teacher, loss = student_of(tmp_path, "bert", alpha=0.0, **BOTH)
    loss(step.forward(student, tokens, 0, "fp64"), tokens)[1:].sum().backward()
    [linear] = network_parts.auxiliary_parameters(student)
    assert linear.shape == (24, 16)
    assert linear.grad is not None
    assert linear.grad.abs().sum() > 0
    changed = {name for name, item in student.named_parameters() if item.grad is not None and item.grad.abs().sum() > 0}
    assert {name.split(".")[3] for name in changed if "encoder.layer" in name} == {"0", "1"}
    assert not any(name.startswith("classifier") for name in changed)
    assert all(item.grad is None for item in teacher.parameters())


def test_a_teacher_reads_its_own_numbers_of_the_pieces(tmp_path: Path) -> None:
    """A trimmed student has other ids for the same pieces."""
    tokens = rows_of()
    student = network_of(tmp_path / "bert", "bert", STUDENTS["bert"])
    teacher = network_of(tmp_path / "teacher", "bert", TEACHER).requires_grad_(False).eval()
    numbers = np.random.default_rng(5).permutation(60)
    within = losses.FeatureDistillationLoss(
        student, teacher, DistillConfig(teacher="v1", relation_heads=4, **BOTH), 0, "fp64", numbers
    )
    step.forward(student, tokens, 0, "fp64")
    result = within(tokens).tolist()
    seen: list[Any] = []
    teacher.base_model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    step.forward(student, tokens, 0, "fp64")
    assert within(tokens).tolist() == result
    order = make_layout(tokens, 1, torch.device("cpu")).order
    assert seen[0][0].tolist() == numbers[tokens.ids][order].tolist()


def test_an_update_in_two_passes_moves_the_weights_as_one_does(tmp_path: Path) -> None:
    """A run with unlabeled rows, the learned map and clipping."""
    tokens = replace(rows_of(), is_unlabeled=np.array([False, True, False, True, True, False]))
    ends = []
    for passes in ([tokens], [part for part, _ in halves(tokens)]):
        student, _, loss = student_of(tmp_path, "bert", **BOTH)
        before = copy.deepcopy(student.state_dict())
        optimizer = optimizers.build_optimizer(student, with_lr())
        done = step.StepRunner(
            DDPStrategy(student), optimizer, loss, pad_id=0, precision="fp64", max_grad_norm=1.0
        ).run_step(passes)
        ends.append((done.loss, {name: value - before[name] for name, value in student.state_dict().items()}))
    (item, first), (other, second) = ends
    assert item == pytest.approx(other, rel=1e-9)
    changed = torch.cat([value.flatten() for value in first.values()])
    separate = torch.cat([(first[name] - second[name]).flatten() for name in first])
    assert separate.norm() <= 1e-8 * changed.norm()
    assert first[f"{network_parts.MODULE_NAME}.weight"].abs().sum() > 0


def with_lr() -> Any:
    from rtrain.config import OptimConfig

    return OptimConfig(lr=1e-2)


def test_a_worker_without_rows_touches_the_map_too(tmp_path: Path) -> None:
    """Else the exchange of the others would wait for its gradient."""
    student, _, loss = student_of(tmp_path, "bert", **BOTH)
    strategy, optimizer = DDPStrategy(student), optimizers.build_optimizer(student, with_lr())
    step.StepRunner(strategy, optimizer, loss, pad_id=0, precision="fp64").run_step([])
    assert {name for name, item in student.named_parameters() if item.grad is None} <= {"bert.pooler.dense.weight"}
    assert all(item.grad.abs().sum() == 0 for item in student.parameters() if item.grad is not None)
