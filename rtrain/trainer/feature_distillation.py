"""Feature distillation: relations between tokens, and hidden states, as further parts of a run's loss.

A teacher's logits are computed once and stored. Its features cannot be stored: they have a number for each pair of
tokens, or hundreds for each token. So the frozen teacher runs beside the student on each micro-batch. The loss sums
over tokens, so it does not depend on the split into micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.config import DistillConfig, Recipe
from rtrain.core.errors import Problem
from rtrain.core.ragged import Ints, TokenBatch, pad_batch
from rtrain.models import auxiliary_params, layerwise_lr, unpadded
from rtrain.models.device import to_device
from rtrain.models.pack_layout import PackLayout, make_layout
from rtrain.parallel import dtensor_utils
from rtrain.trainer.step import forward

if TYPE_CHECKING:
    import torch

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
    if unsupported := [
        model_config.model_type for model_config in configs if model_config.model_type not in PROJECTION_NAMES
    ]:
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
        reason = f"it keeps no activations, which {' and '.join(setting_names)} compares"
        problems.append(
            Problem("train.gradient_checkpointing", True, reason, "set it to false", code="conflicting_settings")
        )
    return problems


class FeatureDistillationLoss:
    """See `losses.FeatureLoss`. The parts: `distill.relation_loss_weight`, then `distill.hidden_loss_weight`, each if
    nonzero."""

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
        the map between the two widths; see `rtrain.models.auxiliary_params`."""
        import torch

        self._student, self._teacher, self._distill = student, teacher, distill
        self._pad_id, self._precision, self._teacher_ids = pad_id, precision, teacher_ids
        depths = [len(encoder_layers(network)) for network in (student, teacher)]
        self._layer_pairs = (
            list(enumerate(layerwise_lr.spaced_layers(depths[1], depths[0]))) if distill.hidden_loss_weight else []
        )
        relation_layers = (
            (depths[0] - 1, (distill.relation_layer or depths[1]) - 1) if distill.relation_loss_weight else (None, None)
        )
        self._student_hooks = _ActivationHooks(student, [pair[0] for pair in self._layer_pairs], relation_layers[0])
        self._teacher_hooks = _ActivationHooks(teacher, [pair[1] for pair in self._layer_pairs], relation_layers[1])
        self.num_parts = sum(getattr(distill, name) > 0 for name in WEIGHT_SETTINGS)
        # The teacher's logits are unused, and a language model's head would compute 30,000 numbers for each token.
        is_language_model = getattr(teacher, "get_output_embeddings", lambda: None)() is not None
        self._logit_positions = np.zeros(1, dtype=np.int64) if is_language_model else None
        if distill.hidden_loss_weight:
            student_width, teacher_width = (_hidden_size(network) for network in (student, teacher))
            reference = next(student.parameters())
            linear = torch.nn.Linear(
                student_width, teacher_width, bias=False, device=reference.device, dtype=reference.dtype
            )
            with torch.no_grad():
                torch.nn.init.eye_(linear.weight)
            auxiliary_params.attach_auxiliary(student, linear)

    def count_targets(self, tokens: TokenBatch) -> list[int]:
        return [len(tokens.ids)] * self.num_parts

    def __call__(self, tokens: TokenBatch) -> "torch.Tensor":
        import torch

        teacher_tokens = (
            tokens if self._teacher_ids is None else replace(tokens, ids=self._teacher_ids[tokens.ids].astype(np.int32))
        )
        with torch.no_grad():
            forward(self._teacher, teacher_tokens, self._pad_id, self._precision, self._logit_positions)
        layout = make_layout(tokens, self._distill.relation_heads, dtensor_utils.module_device(self._student))
        student_states, teacher_states = (
            self._student_hooks.pop(tokens, layout),
            self._teacher_hooks.pop(tokens, layout),
        )
        sums = []
        if self._distill.relation_loss_weight:
            pairs = zip(student_states.projections, teacher_states.projections, strict=True)
            divergences = torch.stack(
                [relation_divergence(student, teacher, layout) for student, teacher in pairs]
            ).sum()
            sums.append(self._distill.relation_loss_weight * divergences)
        if self._distill.hidden_loss_weight:
            linear: Any = getattr(self._student, auxiliary_params.MODULE_NAME)
            hidden_losses = [
                (
                    (
                        linear(student_states.hidden[student_layer].to(linear.weight.dtype))
                        - teacher_states.hidden[teacher_layer]
                    )
                    ** 2
                )
                .mean(dim=1)
                .sum()
                for student_layer, teacher_layer in self._layer_pairs
            ]
            sums.append(self._distill.hidden_loss_weight * torch.stack(hidden_losses).mean())
        return torch.stack(sums)


def relation_divergence(student: "torch.Tensor", teacher: "torch.Tensor", layout: PackLayout) -> "torch.Tensor":
    """KL(teacher, student) of the attention that each token gives to the tokens of its window, by scaled products of
    vectors [tokens, width] in the order of the pack; the mean over `layout.num_heads` parts of the vectors, summed over
    tokens."""
    total = student.new_zeros(())
    for group in layout.groups:
        teacher_log_probs, student_log_probs = (
            _log_relations(side, group, layout.num_heads) for side in (teacher, student)
        )
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


def _hidden_size(network: Any) -> int:
    return int(network.config.hidden_size)


def encoder_layers(network: Any) -> "torch.nn.ModuleList":
    layers = layerwise_lr.find_layers(getattr(network, "base_model", network))
    assert layers is not None  # `check_feature_distillation` has checked the architectures
    return layers


class _Activations:
    """Activations of a forward pass, [tokens, width] each, in the order of the pack, at least in fp32."""

    def __init__(self, projections: "list[torch.Tensor]", hidden: "dict[int, torch.Tensor]"):
        self.projections, self.hidden = projections, hidden


class _ActivationHooks:
    """Keeps the outputs of some modules between forward passes."""

    def __init__(self, network: Any, hidden_layers: Sequence[int], relation_layer: int | None):
        self._network, self._outputs = network, dict[Any, Any]()
        self._is_frozen = not any(parameter.requires_grad for parameter in network.parameters())
        self._hidden_layers, self._projections = (
            list(hidden_layers),
            () if relation_layer is None else PROJECTION_NAMES[network.config.model_type],
        )
        layers = encoder_layers(network)
        submodules: dict[Any, Any] = {number: layers[number] for number in self._hidden_layers}
        submodules |= (
            {name: layers[relation_layer].get_submodule(name) for name in self._projections}
            if relation_layer is not None
            else {}
        )
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
        return _Activations(
            [activations[name] for name in self._projections],
            {number: activations[number] for number in self._hidden_layers},
        )

    def _to_pack_order(self, value: "torch.Tensor", tokens: TokenBatch, layout: PackLayout) -> "torch.Tensor":
        import torch

        if unpadded.is_packed(self._network):
            vectors = value[0]
        else:
            token_indices = np.flatnonzero(pad_batch(tokens, pad_id=0)["attention_mask"])
            vectors = value.flatten(0, 1)[to_device(token_indices[layout.order], value.device)]
        return vectors.to(torch.promote_types(vectors.dtype, torch.float32))
