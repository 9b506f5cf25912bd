"""Loss of a run as sums over a micro-batch's targets: the task's loss, or its mixture with a teacher's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtrain.config import DistillConfig, Recipe
from rtrain.config.recipe import LOSSES
from rtrain.core.errors import Problem
from rtrain.core.ragged import Head, Ints, TokenBatch, flat_indices, pad_batch
from rtrain.data.store.store import Store
from rtrain.models import network_parts, unpadded
from rtrain.models.device import to_device
from rtrain.models.pack_layout import PackLayout, make_layout
from rtrain.parallel import dtensor_utils
from rtrain.tasks.base import Task, get_task
from rtrain.trainer.imbalance import TargetWeighting, make_weighting
from rtrain.trainer.registered_loss import RegisteredLoss
from rtrain.trainer.step import Loss, forward

if TYPE_CHECKING:
    import torch


class RunLoss:
    """Loss of a run; see `step.Loss`. Distillation and smoothing change only this part of a run."""

    def __init__(
        self,
        task: Task,
        distill: DistillConfig,
        head: Head,
        smoothing: float = 0.0,
        feature_loss: "FeatureDistillationLoss | None" = None,
        weighting: TargetWeighting | None = None,
        registered_loss: RegisteredLoss | None = None,
    ) -> None:
        self._weighting, self._registered_loss = weighting, registered_loss
        self._task, self._distill, self._head = task, distill, head
        self._smoothing, self._feature_loss = smoothing, feature_loss
        self._part_names = task.loss_parts(head)
        self.num_parts = len(self._part_names) + (feature_loss.num_parts if feature_loss else 0)

    @property
    def is_planned(self) -> bool:
        """Whether the counts follow from the rows' stored targets."""
        return self._feature_loss is None and not self._task.prepares_targets

    def count_targets(self, tokens: TokenBatch) -> list[float]:
        """Number of targets of each part, or their total weight. Placeholder labels count too: the teacher answers
        them."""
        counts_by_part: Mapping[str, float]
        if self._registered_loss:
            counts_by_part = {self._part_names[0]: self._registered_loss.count_targets(tokens)}
        elif self._weighting:
            counts_by_part = self._weighting.total_weights(tokens)
        else:
            counts_by_part = self._task.count_targets(tokens, self._head)
        feature_counts = self._feature_loss.count_targets(tokens) if self._feature_loss else []
        return [counts_by_part[name] for name in self._part_names] + feature_counts

    def logit_positions(self, tokens: TokenBatch) -> Ints | None:
        """Tokens whose logits are needed; see `Task.logit_positions`."""
        return self._task.logit_positions(tokens, self._head)

    def __call__(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """Sums over the targets [parts]: (1 - alpha) x the task's loss + alpha x the distance to the teacher. The first
        is zero for a row without a label."""
        import torch

        sums = self._mixed_loss(logits, tokens)
        return sums if self._feature_loss is None else torch.cat([sums, self._feature_loss(tokens).to(sums)])

    def _mixed_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        if self._distill.teacher is None:
            return self._label_loss(logits, tokens)
        alpha, total = self._distill.alpha, logits.float().sum() * 0.0
        if alpha:
            distillation_sums = self._task.distillation_loss(logits, tokens, self._head, self._distill.temperature)
            total = total + alpha * self._stack_parts(distillation_sums)
        logits, tokens = self._select_labeled(logits, tokens)
        return total + (1 - alpha) * self._label_loss(logits, tokens) if len(tokens) else total

    def _label_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """The task's loss with label smoothing, the weighted loss, or a plug-in's."""
        if self._registered_loss is not None:
            return self._registered_loss(logits, tokens).reshape(1)
        if self._weighting is not None:
            return self._stack_parts(self._weighting.sum_losses(logits, tokens))
        sums = self._stack_parts(self._task.loss(logits, tokens, self._head))
        if not self._smoothing:
            return sums
        return (1 - self._smoothing) * sums + self._smoothing * self._smoothing_loss(logits, tokens)

    def _select_labeled(self, logits: "torch.Tensor", tokens: TokenBatch) -> "tuple[torch.Tensor, TokenBatch]":
        """Rows with a label, and their rows of the logits."""
        import torch

        if tokens.is_unlabeled is None or not tokens.is_unlabeled.any():
            return logits, tokens
        rows = np.flatnonzero(~tokens.is_unlabeled)
        logit_rows = flat_indices(tokens.windows_per_row, rows)
        if self._task.is_token_level:
            logit_rows = flat_indices(tokens.window_lengths, logit_rows)
        return logits[torch.from_numpy(logit_rows).to(logits.device)], tokens.take(rows)

    def _smoothing_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """Distance to a uniform distribution over the labels, which smoothing mixes in (Szegedy et al. 2016,
        arXiv:1512.00567), without the constant log(labels), which has no gradient."""
        num_logits = len(tokens.ids) if self._task.is_token_level else len(tokens)
        uniform = replace(tokens, teacher_logits=np.zeros((num_logits, logits.shape[1]), dtype=np.float32))
        return self._stack_parts(self._task.distillation_loss(logits, uniform, self._head, 1.0))

    def _stack_parts(self, sums: "dict[str, torch.Tensor]") -> "torch.Tensor":
        import torch

        return torch.stack([sums[name] for name in self._part_names])


def plan_target_counts(loss: Loss, store: Store, positions: Ints) -> list[float] | None:
    """`RunLoss.count_targets` of some training rows, from the store; None if the counts depend on more."""
    if not isinstance(loss, RunLoss) or not loss.is_planned:
        return None
    return loss.count_targets(store.read_targets("train", positions))


def check_label_smoothing(recipe: Recipe) -> list[Problem]:
    """Settings of the loss that the recipe's task cannot use."""
    smoothing, task = recipe.train.label_smoothing, get_task(recipe.task)
    if not smoothing or task.supports_label_smoothing:
        return []
    reason = f"{task.name} does not choose one label out of several"
    return [Problem("train.label_smoothing", smoothing, reason, "set it to 0", code="conflicting_settings")]


def make_loss(
    task: Task,
    distill: DistillConfig,
    head: Head | None = None,
    smoothing: float = 0.0,
    feature_loss: "FeatureDistillationLoss | None" = None,
) -> RunLoss:
    return RunLoss(task, distill, head or Head(), smoothing, feature_loss)


def make_run_loss(
    recipe: Recipe, task: Task, store: Store, feature_loss: "FeatureDistillationLoss | None" = None
) -> RunLoss:
    """The loss of a run on the rows of its store, with its weights."""
    head, name = store.manifest.head, recipe.train.loss
    if name in LOSSES or recipe.distill.teacher is not None:
        weighting, registered_loss = make_weighting(recipe, task, store), None
    else:
        weighting, registered_loss = None, RegisteredLoss(name, task, head)
    smoothing = recipe.train.label_smoothing
    return RunLoss(task, recipe.distill, head, smoothing, feature_loss, weighting, registered_loss)


WEIGHT_SETTINGS = ("relation_loss_weight", "hidden_loss_weight")
"""Settings that weigh the parts; 0 disables a part."""
_BERT_PROJECTIONS = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
PROJECTION_NAMES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("bert", "electra", "roberta", "xlm-roberta", "camembert"), _BERT_PROJECTIONS),
    "distilbert": tuple(f"attention.{name}_lin" for name in "qkv"),
}
"""Modules that compute the queries, keys and values of a layer, by architecture."""
MASKED_SCORE = -1e4
"""Score of padding: its probability is 0, and 0 x MASKED_SCORE is 0."""


def is_enabled(distill: DistillConfig) -> bool:
    return any(getattr(distill, name) for name in WEIGHT_SETTINGS)


def check_feature_distillation(recipe: Recipe, student: Path, teacher: Path) -> list[Problem]:
    """Reasons why the model folder `student` cannot learn features of the model folder `teacher`."""
    import transformers

    distill = recipe.distill
    configs = [
        transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for folder in (student, teacher)
    ]
    setting_names = [f"distill.{name}" for name in WEIGHT_SETTINGS if getattr(distill, name)]
    problems = []
    architectures = [model_config.model_type for model_config in configs]
    if unsupported := [name for name in architectures if name not in PROJECTION_NAMES]:
        reason = f"{unsupported[0]} has other attention than {', '.join(PROJECTION_NAMES)}"
        return [
            Problem(name, getattr(distill, name.removeprefix("distill.")), reason, "write 0", code="unsupported")
            for name in setting_names
        ]
    widths = [model_config.hidden_size for model_config in configs]
    if distill.relation_loss_weight and any(width % distill.relation_heads for width in widths):
        reason = f"it does not divide both widths, {widths[0]} and {widths[1]}"
        heads, fix = distill.relation_heads, "write a divisor of both"
        problems.append(Problem("distill.relation_heads", heads, reason, fix, code="not_a_divisor"))
    depth = configs[1].num_hidden_layers
    if distill.relation_layer is not None and distill.relation_layer > depth:
        reason, fix = f"the teacher has {depth} layers", f"write {depth} or less"
        problems.append(Problem("distill.relation_layer", distill.relation_layer, reason, fix, code="out_of_range"))
    if recipe.train.gradient_checkpointing:
        reason, fix = f"it keeps no activations, which {' and '.join(setting_names)} compares", "set it to false"
        problems.append(Problem("train.gradient_checkpointing", True, reason, fix, code="conflicting_settings"))
    return problems


class FeatureDistillationLoss:
    """Feature distillation: relations between tokens, and hidden states, as further parts of a run's loss
    (`distill.relation_loss_weight`, then `distill.hidden_loss_weight`, each if nonzero).

    A teacher's logits are computed once and stored. Its features cannot be stored: they have a number for each pair of
    tokens, or hundreds for each token. So the frozen teacher runs beside the student on each micro-batch. The loss sums
    over tokens, so it does not depend on the split into micro-batches.
    """

    def __init__(
        self,
        student: "torch.nn.Module",
        teacher: "torch.nn.Module",
        distill: DistillConfig,
        pad_id: int,
        precision: str,
        teacher_ids: Ints | None = None,
    ) -> None:
        """`teacher` is frozen, on the student's device, and reads `ids[id]` for the student's `id`. The student gets
        the map between the two widths; see `rtrain.models.network_parts`."""
        import torch

        self._student, self._teacher, self._distill = student, teacher, distill
        self._pad_id, self._precision, self._teacher_ids = pad_id, precision, teacher_ids
        depths = [len(encoder_layers(network)) for network in (student, teacher)]
        self._layer_pairs: list[tuple[int, int]] = []
        relation_layers: tuple[int | None, int | None] = None, None
        if distill.hidden_loss_weight:
            self._layer_pairs = list(enumerate(network_parts.spaced_layers(depths[1], depths[0])))
        if distill.relation_loss_weight:
            relation_layers = depths[0] - 1, (distill.relation_layer or depths[1]) - 1
        self._student_hooks = _ActivationHooks(student, [pair[0] for pair in self._layer_pairs], relation_layers[0])
        self._teacher_hooks = _ActivationHooks(teacher, [pair[1] for pair in self._layer_pairs], relation_layers[1])
        self.num_parts = sum(getattr(distill, name) > 0 for name in WEIGHT_SETTINGS)
        # The teacher's logits are unused, and a language model's head would compute 30,000 numbers for each token.
        is_language_model = getattr(teacher, "get_output_embeddings", lambda: None)() is not None
        self._logit_positions = np.zeros(1, dtype=np.int64) if is_language_model else None
        if distill.hidden_loss_weight:
            networks: Any = (student, teacher)
            student_width, teacher_width = (network.config.hidden_size for network in networks)
            kind: Any = {name: getattr(next(student.parameters()), name) for name in ("device", "dtype")}
            linear = torch.nn.Linear(student_width, teacher_width, bias=False, **kind)
            with torch.no_grad():
                torch.nn.init.eye_(linear.weight)
            network_parts.attach_auxiliary(student, linear)

    def count_targets(self, tokens: TokenBatch) -> list[int]:
        return [len(tokens.ids)] * self.num_parts

    def __call__(self, tokens: TokenBatch) -> "torch.Tensor":
        import torch

        teacher_tokens = tokens
        if self._teacher_ids is not None:
            teacher_tokens = replace(tokens, ids=self._teacher_ids[tokens.ids].astype(np.int32))
        with torch.no_grad():
            forward(self._teacher, teacher_tokens, self._pad_id, self._precision, self._logit_positions)
        layout = make_layout(tokens, self._distill.relation_heads, dtensor_utils.module_device(self._student))
        student_states = self._student_hooks.pop(tokens, layout)
        teacher_states = self._teacher_hooks.pop(tokens, layout)
        sums = []
        if self._distill.relation_loss_weight:
            pairs = zip(student_states.projections, teacher_states.projections, strict=True)
            divergences = [relation_divergence(student, teacher, layout) for student, teacher in pairs]
            sums.append(self._distill.relation_loss_weight * torch.stack(divergences).sum())
        if self._distill.hidden_loss_weight:
            linear: Any = getattr(self._student, network_parts.MODULE_NAME)
            hidden_losses = []
            for student_layer, teacher_layer in self._layer_pairs:
                mapped = linear(student_states.hidden[student_layer].to(linear.weight.dtype))
                squares = (mapped - teacher_states.hidden[teacher_layer]) ** 2
                hidden_losses.append(squares.mean(dim=1).sum())
            sums.append(self._distill.hidden_loss_weight * torch.stack(hidden_losses).mean())
        return torch.stack(sums)


def relation_divergence(student: "torch.Tensor", teacher: "torch.Tensor", layout: PackLayout) -> "torch.Tensor":
    """KL(teacher, student) of the attention that each token gives to the tokens of its window, by scaled products of
    vectors [tokens, width] in the order of the pack; the mean over `layout.num_heads` parts of the vectors, summed over
    tokens."""
    total = student.new_zeros(())
    for group in layout.groups:
        teacher_log_probs = _log_relations(teacher, group, layout.num_heads)
        student_log_probs = _log_relations(student, group, layout.num_heads)
        divergence = (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(dim=-1, keepdim=True)
        total = total + (divergence if group.token_mask is None else divergence * group.token_mask).sum()
    return total / layout.num_heads


def _log_relations(vectors: "torch.Tensor", group: Any, heads: int) -> "torch.Tensor":
    """Logarithms [windows, heads, width, width]."""
    import torch

    head_width = vectors.shape[1] // heads
    flat = vectors[group.start : group.stop].reshape(-1, head_width).index_select(0, group.gather)
    parts = flat.view(group.num_windows, heads, group.width, head_width)
    scores = parts @ parts.transpose(2, 3) * head_width**-0.5
    if group.bias is not None:
        scores = scores + group.bias.clamp(min=MASKED_SCORE).to(scores.dtype)
    return torch.log_softmax(scores, dim=-1)


def encoder_layers(network: Any) -> "torch.nn.ModuleList":
    layers = network_parts.find_layers(getattr(network, "base_model", network))
    assert layers is not None  # `check_feature_distillation` has checked the architectures
    return layers


class _Activations(NamedTuple):
    """Activations of a forward pass, [tokens, width] each, in the order of the pack, at least in fp32."""

    projections: "list[torch.Tensor]"
    hidden: "dict[int, torch.Tensor]"


class _ActivationHooks:
    """Keeps the outputs of some modules between forward passes."""

    def __init__(self, network: Any, hidden_layers: Sequence[int], relation_layer: int | None):
        self._network, self._outputs = network, dict[Any, Any]()
        self._is_frozen = not any(parameter.requires_grad for parameter in network.parameters())
        self._hidden_layers, self._projections = list(hidden_layers), tuple[str, ...]()
        layers = encoder_layers(network)
        submodules: dict[Any, Any] = {number: layers[number] for number in self._hidden_layers}
        if relation_layer is not None:
            self._projections = tuple(PROJECTION_NAMES[network.config.model_type])
            submodules |= {name: layers[relation_layer].get_submodule(name) for name in self._projections}
        for name, submodule in submodules.items():
            submodule.register_forward_hook(lambda module, inputs, output, name=name: self._store(name, output))

    def _store(self, name: Any, output: Any) -> None:
        import torch

        # Micro-batches of an evaluation are large, and their activations are unused.
        if self._is_frozen or torch.is_grad_enabled():
            self._outputs[name] = output

    def pop(self, tokens: TokenBatch, layout: PackLayout) -> _Activations:
        """Return the activations of the newest forward pass, which had these rows."""
        activations = {name: self._to_pack_order(value, tokens, layout) for name, value in self._outputs.items()}
        self._outputs.clear()
        hidden = {number: activations[number] for number in self._hidden_layers}
        return _Activations([activations[name] for name in self._projections], hidden)

    def _to_pack_order(self, value: "torch.Tensor", tokens: TokenBatch, layout: PackLayout) -> "torch.Tensor":
        import torch

        if unpadded.is_packed(self._network):
            vectors = value[0]
        else:
            token_indices = np.flatnonzero(pad_batch(tokens, pad_id=0)["attention_mask"])
            vectors = value.flatten(0, 1)[to_device(token_indices[layout.order], value.device)]
        return vectors.to(torch.promote_types(vectors.dtype, torch.float32))
