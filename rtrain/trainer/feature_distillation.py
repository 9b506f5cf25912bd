"""What a student learns inside its teacher: relations of tokens, and hidden states. Further parts of a run's loss.

A teacher's logits are computed once and stored. What this reads cannot be: it has a number for each pair of tokens, or
hundreds for each token. So the frozen teacher runs beside the student, on the rows of each pass. Sums are over tokens,
so that they do not depend on how an update is cut into passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.config import Distill, Recipe
from rtrain.core.errors import Problem
from rtrain.core.ragged import Ints, Tokens, padded
from rtrain.models import auxiliary_params, layerwise_lr, unpadded
from rtrain.models.device import moved
from rtrain.models.pack_layout import Layout, layout_of
from rtrain.parallel import dtensor_utils
from rtrain.trainer.step import forward

if TYPE_CHECKING:
    import torch

NAMES = ("relations", "hidden")
"""The settings that weigh the parts, which are off at 0."""
_SELF = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
LINEARS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("bert", "electra", "roberta", "xlm-roberta", "camembert"), _SELF),
    "distilbert": tuple(f"attention.{name}_lin" for name in "qkv"),
}
"""What makes the queries, keys and values of a layer, by architecture."""
NEVER = -1e4
"""In place of the score of padding: its share is 0, and 0 x NEVER is still 0."""


def active(distill: Distill) -> bool:
    return any(getattr(distill, name) for name in NAMES)


def problems(recipe: Recipe, student: Path, teacher: Path) -> list[Problem]:
    """Why the model folder `student` cannot learn inside the model folder `teacher`."""
    import transformers

    distill = recipe.distill
    known = [
        transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for folder in (student, teacher)
    ]
    asked = [f"distill.{name}" for name in NAMES if getattr(distill, name)]
    found = []
    if others := [one.model_type for one in known if one.model_type not in LINEARS]:
        reason = f"{others[0]} has other attention than {', '.join(LINEARS)}"
        return [
            Problem(name, getattr(distill, name.removeprefix("distill.")), reason, "write 0", code="unsupported")
            for name in asked
        ]
    widths = [one.hidden_size for one in known]
    if distill.relations and any(width % distill.relation_heads for width in widths):
        reason = f"it does not divide both widths, {widths[0]} and {widths[1]}"
        heads, fix = distill.relation_heads, "write a divisor of both"
        found.append(Problem("distill.relation_heads", heads, reason, fix, code="not_a_divisor"))
    depth = known[1].num_hidden_layers
    if distill.relation_layer is not None and distill.relation_layer > depth:
        reason, fix = f"the teacher has {depth} layers", f"write {depth} or less"
        found.append(Problem("distill.relation_layer", distill.relation_layer, reason, fix, code="out_of_range"))
    if recipe.train.gradient_checkpointing:
        reason = f"it keeps nothing of what {' and '.join(asked)} compares"
        found.append(
            Problem("train.gradient_checkpointing", True, reason, "set it to false", code="conflicting_settings")
        )
    return found


class Inner:
    """See `losses.Inner`. The parts: `distill.relations`, then `distill.hidden`, each if it is on."""

    def __init__(
        self,
        student: "torch.nn.Module",
        teacher: "torch.nn.Module",
        distill: Distill,
        pad_id: int,
        precision: str,
        ids: Ints | None = None,
    ) -> None:
        """`teacher` is frozen, on the student's device, and reads `ids[id]` where the student reads `id`. The student
        gets the map between the two widths; see `rtrain.models.auxiliary_params`."""
        import torch

        self._student, self._teacher, self._distill = student, teacher, distill
        self._pad_id, self._precision, self._ids = pad_id, precision, ids
        depths = [len(layers_of(network)) for network in (student, teacher)]
        self._pairs = list(enumerate(layerwise_lr.chosen_layers(depths[1], depths[0]))) if distill.hidden else []
        related = (depths[0] - 1, (distill.relation_layer or depths[1]) - 1) if distill.relations else (None, None)
        self._mine = _Watched(student, [pair[0] for pair in self._pairs], related[0])
        self._theirs = _Watched(teacher, [pair[1] for pair in self._pairs], related[1])
        self.parts = sum(getattr(distill, name) > 0 for name in NAMES)
        # Nothing asks for the teacher's answers. A language model's head would make 30,000 numbers for each token.
        speaks = getattr(teacher, "get_output_embeddings", lambda: None)() is not None
        self._wanted = np.zeros(1, dtype=np.int64) if speaks else None
        if distill.hidden:
            mine, theirs = (_width(network) for network in (student, teacher))
            like = next(student.parameters())
            linear = torch.nn.Linear(mine, theirs, bias=False, device=like.device, dtype=like.dtype)
            with torch.no_grad():
                torch.nn.init.eye_(linear.weight)
            auxiliary_params.attach(student, linear)

    def counts(self, tokens: Tokens) -> list[int]:
        return [len(tokens.ids)] * self.parts

    def __call__(self, tokens: Tokens) -> "torch.Tensor":
        import torch

        asked = tokens if self._ids is None else replace(tokens, ids=self._ids[tokens.ids].astype(np.int32))
        with torch.no_grad():
            forward(self._teacher, asked, self._pad_id, self._precision, self._wanted)
        layout = layout_of(tokens, self._distill.relation_heads, dtensor_utils.device(self._student))
        mine, theirs = self._mine.taken(tokens, layout), self._theirs.taken(tokens, layout)
        sums = []
        if self._distill.relations:
            pairs = zip(mine.projections, theirs.projections, strict=True)
            apart = torch.stack([divergence(one, other, layout) for one, other in pairs]).sum()
            sums.append(self._distill.relations * apart)
        if self._distill.hidden:
            linear: Any = getattr(self._student, auxiliary_params.NAME)
            each = [
                ((linear(mine.hidden[one].to(linear.weight.dtype)) - theirs.hidden[other]) ** 2).mean(dim=1).sum()
                for one, other in self._pairs
            ]
            sums.append(self._distill.hidden * torch.stack(each).mean())
        return torch.stack(sums)


def divergence(student: "torch.Tensor", teacher: "torch.Tensor", layout: Layout) -> "torch.Tensor":
    """KL(teacher, student) of the shares that each token gives to those of its window, by scaled products of vectors
    [tokens, width] in the order of the pack; the mean over `layout.heads` parts of the vectors, summed over tokens."""
    total = student.new_zeros(())
    for group in layout.groups:
        known, found = (_shares(side, group, layout.heads) for side in (teacher, student))
        apart = (known.exp() * (known - found)).sum(dim=-1, keepdim=True)
        total = total + (apart if group.real is None else apart * group.real).sum()
    return total / layout.heads


def _shares(vectors: "torch.Tensor", group: Any, heads: int) -> "torch.Tensor":
    """Logarithms [windows, heads, width, width]."""
    import torch

    size = vectors.shape[1] // heads
    flat = vectors[group.start : group.stop].reshape(-1, size).index_select(0, group.gather)
    parts = flat.view(group.windows, heads, group.width, size)
    scores = parts @ parts.transpose(2, 3) * size**-0.5
    if group.bias is not None:
        scores = scores + group.bias.clamp(min=NEVER).to(scores.dtype)
    return torch.log_softmax(scores, dim=-1)


def _width(network: Any) -> int:
    return int(network.config.hidden_size)


def layers_of(network: Any) -> "torch.nn.ModuleList":
    found = layerwise_lr.layers(getattr(network, "base_model", network))
    assert found is not None  # `problems` knows the architectures
    return found


class _Taken:
    """What a forward pass went through, [tokens, width] each, in the order of the pack, in fp32 or better."""

    def __init__(self, projections: "list[torch.Tensor]", hidden: "dict[int, torch.Tensor]"):
        self.projections, self.hidden = projections, hidden


class _Watched:
    """Keeps what some parts of a network answer, from one forward pass to the next."""

    def __init__(self, network: Any, hidden: Sequence[int], related: int | None):
        self._network, self._kept = network, dict[Any, Any]()
        self._frozen = not any(one.requires_grad for one in network.parameters())
        self._hidden, self._linears = list(hidden), () if related is None else LINEARS[network.config.model_type]
        layers = layers_of(network)
        parts: dict[Any, Any] = {number: layers[number] for number in self._hidden}
        parts |= {name: layers[related].get_submodule(name) for name in self._linears} if related is not None else {}
        for name, part in parts.items():
            part.register_forward_hook(lambda module, inputs, output, name=name: self._keep(name, output))

    def _keep(self, name: Any, output: Any) -> None:
        import torch

        # An evaluation's passes are large, and nobody reads what they went through.
        if self._frozen or torch.is_grad_enabled():
            self._kept[name] = output

    def taken(self, tokens: Tokens, layout: Layout) -> _Taken:
        """What was taken from the newest pass, which had these rows."""
        kept = {name: self._in_pack(value, tokens, layout) for name, value in self._kept.items()}
        self._kept.clear()
        return _Taken([kept[name] for name in self._linears], {number: kept[number] for number in self._hidden})

    def _in_pack(self, value: "torch.Tensor", tokens: Tokens, layout: Layout) -> "torch.Tensor":
        import torch

        if unpadded.enabled(self._network):
            found = value[0]
        else:
            real = np.flatnonzero(padded(tokens, pad_id=0)["attention_mask"])
            found = value.flatten(0, 1)[moved(real[layout.order], value.device)]
        return found.to(torch.promote_types(found.dtype, torch.float32))
