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

from rtrain.config import Config, Distill, Model, with_overrides
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, Tokens, pack
from rtrain.data import unlabeled
from rtrain.data.store.store import Store
from rtrain.models import auxiliary_params, builder
from rtrain.models.pack_layout import layout_of
from rtrain.parallel.ddp import Replicated
from rtrain.tasks import base
from rtrain.trainer import feature_distillation, losses, optimizers, step
from tests import test_runs_tasks as tasks
from tests.tiny import make_store

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
        return base.get(self.config.recipe.task)

    def tokens(self) -> Tokens:
        """Rows of both stores, as a joined store gives them, with a teacher's answers that were drawn."""
        task, head, half = self.task, self.labelled.manifest.head, np.arange(ROWS // 2)
        first, other = self.labelled.read("train", half), self.rows.read("train", half)
        names = ("ids", "lengths", "second", "windows", "targets", "counts", "row_ids")
        both = {name: np.concatenate([getattr(first, name), getattr(other, name)]) for name in names}
        lines = len(both["ids"]) if task.by_token else ROWS
        answers = np.random.default_rng(0).normal(size=(lines, len(head.labels))).astype(np.float32)
        return Tokens(**both, teacher=answers, unlabelled=np.arange(ROWS) >= ROWS // 2)


@pytest.fixture(scope="module", params=TASKS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    config = tasks.settings("multi_head" if request.param == "classification" else request.param, folder)
    if request.param == "classification":
        config = with_overrides(config, {"task": "classification", "data.label": "intent", "data.separator": None})
    recipe = with_overrides(config, {"distill.unlabelled": config.recipe.data.path}).recipe
    encoder = Path(recipe.model.name)
    labelled = make_store(recipe, encoder, folder)
    rows = make_store(unlabeled.recipe_of(recipe), encoder, folder, labelled.manifest.head)
    return Case(config, labelled, rows)


def logits_of(tokens: Tokens, case: Case, seed: int = 1) -> torch.Tensor:
    lines = len(tokens.ids) if case.task.by_token else len(tokens.lengths)
    drawn = np.random.default_rng(seed).normal(size=(lines, len(case.labelled.manifest.labels)))
    return torch.tensor(drawn, dtype=torch.float64, requires_grad=True)


def loss_of(case: Case, **settings: Any) -> losses.RunLoss:
    return losses.for_run(case.task, Distill(teacher="v1", **settings), case.labelled.manifest.head)


def halves(tokens: Tokens) -> Iterator[tuple[Tokens, Any]]:
    """Passes over every second row, and their lines of a matrix over the windows or tokens of all."""
    for start in (0, 1):
        rows = np.arange(start, len(tokens), 2)
        windows = np.flatnonzero(np.isin(np.repeat(np.arange(len(tokens)), tokens.windows), rows))
        ids = np.flatnonzero(np.isin(np.repeat(np.arange(len(tokens.lengths)), tokens.lengths), windows))
        yield tokens.pick(rows), (windows, ids)


def test_rows_without_labels_become_rows_of_their_task(case: Case) -> None:
    """None is set aside for the label that it lacks, and it asks of the student what its text asks."""
    assert case.rows.manifest.quarantined <= case.labelled.manifest.quarantined + case.rows.rows("train") // 10
    every = sum(case.labelled.rows(split) for split in ("train", "valid", "test"))
    assert case.rows.rows("train") >= every
    assert case.rows.manifest.labels == case.labelled.manifest.labels
    tokens = case.rows.read("train", np.arange(case.rows.rows("train")))
    assert all(count > 0 for count in case.task.counts(tokens, case.rows.manifest.head).values())


def test_a_row_without_label_has_the_teacher_s_part_alone(case: Case) -> None:
    tokens, head = case.tokens(), case.labelled.manifest.head
    logits, loss, alpha = logits_of(tokens, case), loss_of(case, alpha=0.7), 0.7
    labelled = tokens.pick(np.arange(ROWS // 2))
    lines = len(labelled.ids) if case.task.by_token else len(labelled.lengths)
    hard = case.task.loss(logits[:lines], labelled, head)
    soft = case.task.imitation(logits, tokens, head, 2.0)
    expected = [(1 - alpha) * hard[name].item() + alpha * soft[name].item() for name in case.task.parts(head)]
    assert loss(logits, tokens).tolist() == pytest.approx(expected, rel=1e-9)


def test_what_stands_in_for_a_label_is_not_learned(case: Case) -> None:
    """With alpha 0 no logit of such a row has a gradient, and all others have."""
    tokens = case.tokens()
    logits = logits_of(tokens, case)
    loss_of(case, alpha=0.0)(logits, tokens).sum().backward()
    assert logits.grad is not None
    labelled = tokens.pick(np.arange(ROWS // 2))
    lines = len(labelled.ids) if case.task.by_token else len(labelled.lengths)
    assert logits.grad[:lines].abs().sum() > 0
    assert logits.grad[lines:].abs().sum() == 0


def test_every_part_is_finite_and_adds_up_over_passes(case: Case) -> None:
    tokens, loss = case.tokens(), loss_of(case)
    logits = logits_of(tokens, case)
    whole = loss(logits, tokens)
    [gradient] = torch.autograd.grad(whole.sum(), [logits])
    assert torch.isfinite(whole).all()
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).any()
    total, counted = torch.zeros_like(whole), np.zeros(loss.parts, dtype=np.int64)
    for passed, (windows, ids) in halves(tokens):
        lines = ids if case.task.by_token else windows
        total = total + loss(logits[torch.from_numpy(lines)], passed)
        counted += loss.counts(passed)
    assert total.tolist() == pytest.approx(whole.tolist(), rel=1e-9)
    assert counted.tolist() == loss.counts(tokens)


def test_a_pass_of_rows_without_labels_alone(case: Case) -> None:
    tokens = case.tokens().pick(np.arange(ROWS // 2, ROWS))
    logits, head = logits_of(tokens, case), case.labelled.manifest.head
    soft = case.task.imitation(logits, tokens, head, 2.0)
    expected = [0.7 * soft[name].item() for name in case.task.parts(head)]
    assert loss_of(case)(logits, tokens).tolist() == pytest.approx(expected, rel=1e-9)


def test_words_of_a_vocabulary_are_not_taught() -> None:
    nothing = pack([])
    with pytest.raises(UserError):
        base.get("masked_lm").imitation(torch.zeros(0, 3), nothing, Head(), 1.0)


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
        known = transformers.AutoConfig.for_model(kind, num_labels=3, **settings)
        transformers.AutoModelForSequenceClassification.from_config(known).save_pretrained(folder)
    task = base.get("classification")
    return builder.build(folder, task, ("a", "b", "c"), 0, Model(pooling="own"), pack=packs).double().train()


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> Tokens:
    sizes, drawn = np.array(lengths, dtype=np.int32), np.random.default_rng(3)
    ones, answers = np.ones(len(sizes), dtype=np.int32), drawn.normal(size=(len(sizes), 3)).astype(np.float32)
    ids = drawn.integers(3, 60, sizes.sum()).astype(np.int32)
    targets = drawn.integers(0, 3, len(sizes)).astype(np.float32)
    return Tokens(ids, sizes, sizes, ones, targets, ones, np.arange(len(sizes), dtype=np.uint64), answers)


def student_of(folder: Path, kind: str, packs: bool = True, **settings: Any) -> tuple[Any, Any, losses.RunLoss]:
    """(student, teacher, the student's loss)."""
    student = network_of(folder / kind, kind, STUDENTS[kind], packs)
    teacher = network_of(folder / "teacher", "bert", TEACHER, packs).requires_grad_(False).eval()
    distill = Distill(teacher="v1", **{"relation_heads": 4, **settings})
    within = feature_distillation.Inner(student, teacher, distill, 0, "fp64")
    return student, teacher, losses.for_run(base.get("classification"), distill, inner=within)


BOTH: dict[str, Any] = {"relations": 0.5, "hidden": 0.25}


def by_hand(student: Any, teacher: Any, tokens: Tokens, heads: int, layer: int) -> float:
    """Relations as the paper has them, row by row, from Transformers' own padded forward passes."""
    total, ends = 0.0, np.cumsum(tokens.lengths)
    for end, length in zip(ends, tokens.lengths, strict=True):
        ids = torch.from_numpy(tokens.ids[end - length : end].astype(np.int64))[None]
        each = []
        for network, place in ((teacher, layer), (student, -1)):
            found = network.base_model(ids, output_hidden_states=True).hidden_states
            part = feature_distillation.layers_of(network)[place]
            before = found[: len(feature_distillation.layers_of(network))][place]
            names = feature_distillation.LINEARS[network.config.model_type]
            vectors = [part.get_submodule(name)(before)[0] for name in names]
            cut = [one.reshape(int(length), heads, -1).transpose(0, 1) for one in vectors]
            each.append([one @ one.transpose(1, 2) / one.shape[-1] ** 0.5 for one in cut])
        for known, mine in zip(*each, strict=True):
            shares, logs = torch.softmax(known, -1), torch.log_softmax(mine, -1)
            total += float((shares * (shares.log() - logs)).sum()) / heads
    return total


@pytest.mark.parametrize("kind", STUDENTS)
@pytest.mark.parametrize("layer", [None, 2])
def test_relations_are_those_of_the_paper(kind: str, layer: int | None, tmp_path: Path) -> None:
    tokens = rows_of()
    student, _, loss = student_of(tmp_path, kind, relations=1.0, relation_layer=layer)
    logits = step.forward(student, tokens, 0, "fp64")
    found = loss(logits, tokens)[-1].item()
    plain = network_of(tmp_path / kind, kind, STUDENTS[kind], packs=False).eval()
    other = network_of(tmp_path / "teacher", "bert", TEACHER, packs=False).eval()
    with torch.no_grad():
        expected = by_hand(plain, other, tokens, 4, -1 if layer is None else layer - 1)
    assert found == pytest.approx(expected, rel=1e-9)
    assert loss.counts(tokens) == [len(LENGTHS), sum(LENGTHS)]


@pytest.mark.parametrize("kind", STUDENTS)
def test_passes_and_padding_change_no_sum(kind: str, tmp_path: Path) -> None:
    tokens = rows_of()
    student, _, loss = student_of(tmp_path, kind, **BOTH)
    whole = loss(step.forward(student, tokens, 0, "fp64"), tokens)
    cut = sum(loss(step.forward(student, part, 0, "fp64"), part) for part, _ in halves(tokens))
    assert isinstance(cut, torch.Tensor)
    assert cut.tolist() == pytest.approx(whole.tolist(), rel=1e-9)
    padded, _, apart = student_of(tmp_path, kind, packs=False, **BOTH)
    assert apart(step.forward(padded, tokens, 0, "fp64"), tokens).tolist() == pytest.approx(whole.tolist(), rel=1e-9)


def test_a_student_that_is_its_teacher_is_nowhere_apart(tmp_path: Path) -> None:
    """Its map begins as the identity."""
    twin = network_of(tmp_path / "teacher", "bert", TEACHER)
    teacher = network_of(tmp_path / "teacher", "bert", TEACHER).requires_grad_(False).eval()
    distill = Distill(teacher="v1", relation_heads=6, **BOTH)
    tokens, within = rows_of(), feature_distillation.Inner(twin, teacher, distill, 0, "fp64")
    step.forward(twin, tokens, 0, "fp64")
    assert within(tokens).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_gradients_reach_the_student_and_the_map_alone(tmp_path: Path) -> None:
    tokens = rows_of()
    student, teacher, loss = student_of(tmp_path, "bert", alpha=0.0, **BOTH)
    loss(step.forward(student, tokens, 0, "fp64"), tokens)[1:].sum().backward()
    [linear] = auxiliary_params.parameters(student)
    assert linear.shape == (24, 16)
    assert linear.grad is not None
    assert linear.grad.abs().sum() > 0
    moved = {name for name, one in student.named_parameters() if one.grad is not None and one.grad.abs().sum() > 0}
    assert {name.split(".")[3] for name in moved if "encoder.layer" in name} == {"0", "1"}
    assert not any(name.startswith("classifier") for name in moved)
    assert all(one.grad is None for one in teacher.parameters())


def test_a_teacher_reads_its_own_numbers_of_the_pieces(tmp_path: Path) -> None:
    """A trimmed student has other ids for the same pieces."""
    tokens = rows_of()
    student = network_of(tmp_path / "bert", "bert", STUDENTS["bert"])
    teacher = network_of(tmp_path / "teacher", "bert", TEACHER).requires_grad_(False).eval()
    numbers = np.random.default_rng(5).permutation(60)
    within = feature_distillation.Inner(
        student, teacher, Distill(teacher="v1", relation_heads=4, **BOTH), 0, "fp64", numbers
    )
    step.forward(student, tokens, 0, "fp64")
    found = within(tokens).tolist()
    seen: list[Any] = []
    teacher.base_model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    step.forward(student, tokens, 0, "fp64")
    assert within(tokens).tolist() == found
    order = layout_of(tokens, 1, torch.device("cpu")).order
    assert seen[0][0].tolist() == numbers[tokens.ids][order].tolist()


def test_an_update_in_two_passes_moves_the_weights_as_one_does(tmp_path: Path) -> None:
    """With rows without labels, the learned map, and clipping."""
    tokens = replace(rows_of(), unlabelled=np.array([False, True, False, True, True, False]))
    ends = []
    for passes in ([tokens], [part for part, _ in halves(tokens)]):
        student, _, loss = student_of(tmp_path, "bert", **BOTH)
        before = copy.deepcopy(student.state_dict())
        optimizer = optimizers.build(student, with_lr())
        done = step.run_update(Replicated(student), optimizer, loss, passes, pad_id=0, precision="fp64", clip_norm=1.0)
        ends.append((done.loss, {name: value - before[name] for name, value in student.state_dict().items()}))
    (one, first), (other, second) = ends
    assert one == pytest.approx(other, rel=1e-9)
    moved = torch.cat([value.flatten() for value in first.values()])
    apart = torch.cat([(first[name] - second[name]).flatten() for name in first])
    assert apart.norm() <= 1e-8 * moved.norm()
    assert first[f"{auxiliary_params.NAME}.weight"].abs().sum() > 0


def with_lr() -> Any:
    from rtrain.config import Optim

    return Optim(lr=1e-2)


def test_a_worker_without_rows_touches_the_map_too(tmp_path: Path) -> None:
    """Else the exchange of the others would wait for its gradient."""
    student, _, loss = student_of(tmp_path, "bert", **BOTH)
    Replicated(student).run([], step.Passes(student, 0, "fp64", loss, torch.ones(loss.parts)))
    assert {name for name, one in student.named_parameters() if one.grad is None} <= {"bert.pooler.dense.weight"}
    assert all(one.grad.abs().sum() == 0 for one in student.parameters() if one.grad is not None)
