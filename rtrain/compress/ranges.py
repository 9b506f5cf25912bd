"""Where the quantizers of a network that is trained to be int8 begin: measured on training rows by the float network.

They stand where post-training quantization puts them: before each linear layer, one for all that read a tensor, and
after queries and keys, whose products attention computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain import drafts, engines
from rtrain.batch import Floats
from rtrain.compress.export_check import SPLIT, evenly
from rtrain.config import Recipe
from rtrain.data.stores.store import Store
from rtrain.errors import Problem
from rtrain.network import model
from rtrain.network.rounding import LEVELS, SMALLEST, Quantizer, Quantizers, Side
from rtrain.runs.preparing import Prepared
from rtrain.tasks import base
from rtrain.training.inner import LINEARS
from rtrain.training.step import forward

if TYPE_CHECKING:
    import torch

SMOOTHING = 0.5
"""Share of the unevenness of an input's channels that moves into the weights: its authors' own."""
FAINTEST = 1e-5
"""Least magnitude of a channel that is evened out: those that are nearly always 0 would become large."""


def problems(recipe: Recipe, weights: Path) -> list[Problem]:
    """Why a student that starts from the model folder `weights` cannot be trained as it will be rounded."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(weights, local_files_only=True, trust_remote_code=False).model_type
    task = base.get(recipe.task)
    reasons = {
        f"{task.name} answers by the word table itself, of which no graph is made that rounds it in two ways": (
            task.output == "tokens"
        ),
        f"{kind} has other attention than {', '.join(LINEARS)}": kind not in LINEARS,
        "distill.hidden learns the states of a student that does not round": recipe.distill.hidden > 0,
        f"{recipe.quantize.engine} makes no graph of it": not engines.get(recipe.quantize.engine).learns,
    }
    return [
        Problem("distill.quantization_aware", True, reason, "write false, or change the other")
        for reason, holds in reasons.items()
        if holds
    ]


def begin(prepared: Prepared) -> None:
    """Measure what a student begins to round by, once for its run."""
    path, recipe, store = prepared.run.quantizers, prepared.config.recipe, prepared.store
    if path.is_file():
        return
    task, labels = base.get(recipe.task), store.manifest.labels
    network = model.build(prepared.model, task, labels, recipe.train.seed, recipe.model, pack=False)
    found = measure(network, store, model.pad_id(prepared.model), recipe.quantize.calibration_rows)
    with drafts.replacement(path) as draft:
        found.write(draft)


def measure(network: Any, store: Store, pad_id: int, most_rows: int) -> Quantizers:
    """Quantizers of a float network by at most `most_rows` training rows: their levels reach as far as the rows'
    numbers do, and training learns how far is best. Rows are asked one at a time, so that padding sets no level."""
    import torch

    seen, queries_and_keys = _Seen(), LINEARS[network.config.model_type][:2]
    hooks = []
    for name, part in network.named_modules():
        if isinstance(part, torch.nn.Embedding):
            hooks.append(part.register_forward_hook(partial(seen.table, name)))
        elif isinstance(part, torch.nn.Linear):
            hooks.append(part.register_forward_pre_hook(partial(seen.read, name)))
            if name.endswith(queries_and_keys):
                hooks.append(part.register_forward_hook(partial(seen.written, name)))
    training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            for row in evenly(store.rows(SPLIT), most_rows):
                forward(network, store.read(SPLIT, np.array([row])), pad_id, "fp32")
                seen.next_row()
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    found = []
    for layers in seen.groups.values():
        own = seen.inputs[layers[0]]
        weights = torch.cat([network.get_submodule(name).weight.detach() for name in layers])
        found.append(quantizer("input", layers, own, smoothing(own.reach, weights.abs().amax(dim=0).numpy())))
    found += [quantizer("output", [name], own) for name, own in seen.outputs.items()]
    return Quantizers(tuple(found), tuple(seen.tables))


@dataclass
class Range:
    """The least and the greatest number of each channel of a tensor, 0 among them."""

    least: Floats
    greatest: Floats

    @classmethod
    def of(cls, values: "torch.Tensor") -> "Range":
        flat = values.flatten(0, -2)
        return cls(flat.amin(dim=0).clamp(max=0).numpy(), flat.amax(dim=0).clamp(min=0).numpy())

    def joined(self, other: "Range") -> "Range":
        return Range(np.minimum(self.least, other.least), np.maximum(self.greatest, other.greatest))

    @property
    def reach(self) -> Floats:
        return np.maximum(-self.least, self.greatest)


def quantizer(side: Side, layers: Sequence[str], found: Range, smooth: Floats | None = None) -> Quantizer:
    """By one range for all channels, each of them multiplied by its `smooth`."""
    by: Any = 1.0 if smooth is None else smooth
    least, greatest = float((found.least * by).min()), float((found.greatest * by).max())
    step = max(greatest - least, SMALLEST) / (LEVELS - 1)
    return Quantizer(side, tuple(layers), step, round(-least / step), smooth)


def smoothing(reach: Floats, of_weights: Floats) -> Floats:
    """What channels are multiplied by, by the greatest magnitude of each and of the weights that it meets: both come to
    the same where `SMOOTHING` is a half (Xiao et al. 2023, arXiv:2211.10438)."""
    one, other = (np.maximum(side, FAINTEST) for side in (reach, of_weights))
    found: Floats = (other ** (1 - SMOOTHING) / one**SMOOTHING).astype(np.float32)
    return found


class _Seen:
    """What went through a network's layers."""

    def __init__(self) -> None:
        self.groups: dict[int, list[str]] = {}
        """For the first row, identity of a tensor -> the layers that read it."""
        self.inputs: dict[str, Range] = {}
        self.outputs: dict[str, Range] = {}
        self.tables: list[str] = []
        self._first, self._held = True, list["torch.Tensor"]()

    def next_row(self) -> None:
        self._first = False
        self._held.clear()

    def table(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        if name not in self.tables:
            self.tables.append(name)

    def read(self, name: str, module: Any, inputs: "tuple[torch.Tensor, ...]") -> None:
        if self._first:
            # While it is held, no other tensor has its identity.
            self._held.append(inputs[0])
            self.groups.setdefault(id(inputs[0]), []).append(name)
        _add(self.inputs, name, inputs[0])

    def written(self, name: str, module: Any, inputs: Any, output: "torch.Tensor") -> None:
        _add(self.outputs, name, output)


def _add(known: dict[str, Range], name: str, values: "torch.Tensor") -> None:
    found = Range.of(values)
    known[name] = known[name].joined(found) if name in known else found
