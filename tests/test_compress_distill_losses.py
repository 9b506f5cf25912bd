"""The loss of a student, for every task, with rows without labels. Sums, whatever the passes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain.batch import Head, Tokens, pack
from rtrain.config import Config, Distill, with_overrides
from rtrain.data import unlabelled
from rtrain.data.stores.store import Store
from rtrain.errors import UserError
from rtrain.tasks import base
from rtrain.training import losses
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
    rows = make_store(unlabelled.recipe_of(recipe), encoder, folder, labelled.manifest.head)
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


def test_the_teacher_s_certainty_is_told_for_every_row(case: Case) -> None:
    """From its stored answers, as the report has it; a number has none."""
    rows, lines = case.rows, case.rows.manifest.tokens["train"] if case.task.by_token else case.rows.rows("train")
    answers = np.random.default_rng(2).normal(size=(lines, len(rows.manifest.labels))).astype(np.float32)
    np.save(rows.teacher_file("v2"), answers)
    sure = unlabelled._sure(rows, case.task, "v2", np.arange(rows.rows("train")))
    assert sure.shape == (rows.rows("train"),)
    if case.task.name == "regression":
        assert np.isnan(sure).all()
    else:
        assert ((sure >= 0) & (sure <= 1)).all()
    if case.task.name == "classification":
        powers = np.exp(answers - answers.max(axis=1, keepdims=True))
        assert sure == pytest.approx((powers / powers.sum(axis=1, keepdims=True)).max(axis=1), rel=1e-6)


def test_words_of_a_vocabulary_are_not_taught() -> None:
    nothing = pack([])
    with pytest.raises(UserError, match="a masked language model is not distilled"):
        base.get("masked_lm").imitation(torch.zeros(0, 3), nothing, Head(), 1.0)
