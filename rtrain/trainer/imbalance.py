"""Rare labels: weights of targets in the loss, and the first bias of a head of independent labels.

The loss of a step is the weighted sum over its targets divided by their total weight. A target's weight is the product
of its label's weight (`train.class_weights`) and its row's (`data.weight_column`), in float64.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.config import Recipe, TrainConfig
from rtrain.config.recipe import LOSSES
from rtrain.core.errors import Problem
from rtrain.core.ragged import Head, Ints, TokenBatch
from rtrain.data.store.store import Store
from rtrain.models import network_parts
from rtrain.tasks.base import LabelLoss, Losses, Task, get_task
from rtrain.tasks.encode import canonical_name
from rtrain.tasks.label_losses import get_label_loss

if TYPE_CHECKING:
    import torch

EFFECTIVE_BETA = 0.999
"""Of `train.class_weights=effective`. Cui et al. 2019 tried 0.9 to 0.9999: it is near the rows of a label from which
further ones add little."""
BLOCK_ROWS = 1 << 16
"""Rows whose targets are counted at a time."""
Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TargetWeighting:
    """The weighted loss of a run's labels, part by part."""

    task: Task
    head: Head
    label_loss: LabelLoss
    class_weights: Mapping[str, Weights] = field(default_factory=dict)
    """Weights by part of the loss, one for each of `TargetClasses.classes`. Empty: all weigh 1."""

    def target_weights(self, tokens: TokenBatch) -> dict[str, Weights]:
        """The weight of each target, by part."""
        weights = {}
        for part, (rows, classes) in self.task.target_classes(tokens, self.head).items():
            weights[part] = self.class_weights[part][classes] if self.class_weights else np.ones(len(classes))
            if tokens.row_weights is not None:
                weights[part] = weights[part] * tokens.row_weights[rows]
        return weights

    def total_weights(self, tokens: TokenBatch) -> dict[str, float]:
        """The divisor of the loss sums, by part."""
        return {part: float(weights.sum()) for part, weights in self.target_weights(tokens).items()}

    def sum_losses(self, logits: "torch.Tensor", tokens: TokenBatch) -> Losses:
        """The weighted sum of the losses over the targets, by part."""
        import torch

        weights = self.target_weights(tokens)
        losses = self.task.target_losses(logits, tokens, self.head, self.label_loss)
        return {part: (losses[part] * torch.from_numpy(weights[part]).to(losses[part])).sum() for part in losses}


def make_weighting(recipe: Recipe, task: Task, store: Store) -> TargetWeighting | None:
    """The weighting of a run; None if its loss is the plain mean. A student's is: its teacher has learned by it."""
    if not recipe.has_weighted_loss or recipe.distill.teacher is not None:
        return None
    class_weights = compute_class_weights(recipe.train, task, store)
    return TargetWeighting(task, store.manifest.head, get_label_loss(recipe.train), class_weights)


def compute_class_weights(train: TrainConfig, task: Task, store: Store) -> dict[str, Weights]:
    """`TargetWeighting.class_weights` from the labels of all training rows; empty without class weights."""
    if train.class_weights == "none":
        return {}
    head, weights = store.manifest.head, {}
    counts_by_part = {} if isinstance(train.class_weights, dict) else count_classes(task, store)
    for part, names in task.label_names(head).items():
        if isinstance(train.class_weights, dict):
            weight_by_label = {canonical_name(label): weight for label, weight in train.class_weights.items()}
            values = np.array([weight_by_label.get(name, 1.0) for name in names], dtype=np.float64)
        else:
            values = _weigh_by_counts(train.class_weights, counts_by_part[part], task.has_independent_labels)
        weights[part] = np.append(values, 1.0)
    return weights


def _weigh_by_counts(rule: str, counts: Ints, are_independent: bool) -> Weights:
    """Weights of labels that occur so often; the last of `counts` is of all absent labels, if they are independent."""
    sizes, total = np.maximum(counts[:-1].astype(np.float64), 1.0), float(counts.sum())
    if are_independent:  # against the rows without the label, which weigh 1
        absent = np.maximum(total / len(sizes) - sizes, 1.0)
        return absent / sizes if rule == "balanced" else _effective_number(absent) / _effective_number(sizes)
    if rule == "balanced":
        return total / (len(sizes) * sizes)
    inverse: Weights = 1.0 / _effective_number(sizes)
    weights: Weights = inverse * (len(sizes) / inverse.sum())
    return weights


def _effective_number(rows: Weights) -> Weights:
    effective: Weights = -np.expm1(rows * np.log(EFFECTIVE_BETA)) / (1 - EFFECTIVE_BETA)
    return effective


def count_classes(task: Task, store: Store) -> dict[str, Ints]:
    """How many training targets each of `TargetClasses.classes` has, by part of the loss; augmented copies count."""
    head = store.manifest.head
    counts = {part: np.zeros(len(names) + 1, dtype=np.int64) for part, names in task.label_names(head).items()}
    for tokens in _iter_targets(store):
        for part, (_, classes) in task.target_classes(tokens, head).items():
            counts[part] += np.bincount(classes, minlength=len(counts[part]))
    return counts


def _iter_targets(store: Store) -> Iterator[TokenBatch]:
    for first in range(0, store.num_labeled("train"), BLOCK_ROWS):
        yield store.read_targets("train", np.arange(first, min(first + BLOCK_ROWS, store.num_labeled("train"))))


def initialize_output_bias(network: Any, recipe: Recipe, task: Task, store: Store) -> None:
    """Start a new head of independent labels at the labels' prior log-odds, log((rows with it + 1) / (others + 1)),
    with the weights of the loss.

    From zeros, a model first has to learn that most labels are rare. With a high learning rate it stops there: it gives
    every text the same answer. The prior of a rare class is the same remedy in Lin et al. 2017 (arXiv:1708.02002).
    """
    if not task.has_independent_labels or not network_parts.has_new_output(network):
        return
    weighting = TargetWeighting(
        task, store.manifest.head, get_label_loss(recipe.train), compute_class_weights(recipe.train, task, store)
    )
    labels = len(store.manifest.labels)
    present, absent = np.ones(labels), np.ones(labels)
    for tokens in _iter_targets(store):
        [weights] = weighting.target_weights(tokens).values()
        has_label = tokens.targets.reshape(-1, labels) > 0
        present += (weights.reshape(has_label.shape) * has_label).sum(axis=0)
        absent += (weights.reshape(has_label.shape) * ~has_label).sum(axis=0)
    network_parts.set_output_bias(network, np.log(present / absent))


def check_weighting(recipe: Recipe) -> list[Problem]:
    """Settings of weights and losses that the recipe's task cannot use."""
    task, train, data = get_task(recipe.task), recipe.train, recipe.data
    problems = []
    if train.class_weights != "none" and task.weighting != "classes":
        reason, fix = f"the targets of {task.name} are not labels", "write none"
        problems.append(Problem("train.class_weights", train.class_weights, reason, fix, code="unsupported"))
    if train.loss in LOSSES[1:] and task.weighting != "classes":
        reason, fix = f"the targets of {task.name} are not labels", "write cross_entropy"
        problems.append(Problem("train.loss", train.loss, reason, fix, code="unsupported"))
    elif train.loss == "asymmetric" and not task.has_independent_labels:
        reason, fix = f"{task.name} chooses one label out of several", "write focal or cross_entropy"
        problems.append(Problem("train.loss", train.loss, reason, fix, code="unsupported"))
    if data.weight_column is not None and task.weighting == "nothing":
        reason = f"the loss of {task.name} has no weights of rows"
        problems.append(Problem("data.weight_column", data.weight_column, reason, "write null", code="unsupported"))
    if data.sampling is not None and task.packs_text:
        reason = f"{task.name} trains on blocks of text, which have no value of a column"
        problems.append(Problem("data.sampling", data.sampling.column, reason, "write null", code="unsupported"))
    return problems


def check_class_weight_labels(recipe: Recipe, labels: Sequence[str]) -> list[Problem]:
    """Labels of `train.class_weights` that no training row has."""
    if not isinstance(recipe.train.class_weights, dict):
        return []
    fix = f"write one of {', '.join(labels[:10])}" + (", ..." if len(labels) > 10 else "")
    return [
        Problem(f"train.class_weights.{label}", weight, "no training row has this label", fix, code="unknown_name")
        for label, weight in recipe.train.class_weights.items()
        if canonical_name(label) not in labels
    ]
