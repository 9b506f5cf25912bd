"""What a pass keeps in memory, told by computing it with tensors that have shapes and no numbers.

The network is the run's own, with its packed forward pass, dropout, precision and recomputed layers; only its weights
are not read. What torch counts is every tensor that is alive at a time, as no formula over layers and widths does.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rtrain import torch_internals
from rtrain.config import Model, Recipe
from rtrain.core.errors import UserError
from rtrain.core.ragged import Tokens, single
from rtrain.models import builder, dropout, layerwise_lr, precision as formats, tp_plan
from rtrain.models.device import standing_for_gpu
from rtrain.parallel import dtensor_utils, zero
from rtrain.parallel.sparse_embedding import TouchedRows, table_of
from rtrain.tasks.base import Task
from rtrain.tasks.masked_lm import SHARE
from rtrain.trainer import batch_size, step

if TYPE_CHECKING:
    import torch


class Untraceable(UserError):
    """The memory of this network cannot be told without its numbers."""

    code = "unsupported_model"


@dataclass(frozen=True)
class Traced:
    """Bytes on a worker that is alone, by what they are for, at the moment of a pass when they are most."""

    tokens: int
    weights: int
    gradients: int
    activations: int
    """All else that is alive then: of the forward pass what the backward pass needs, and what that makes meanwhile."""
    trained: tuple[int, ...]
    """Bytes of each weight that is trained, in the model's order."""
    layers: tuple[int, ...]
    """Bytes of the weights of each of the encoder's layers; none where it tells none."""
    table: int
    """Bytes of the word embedding where its gradient is exchanged by touched rows, else 0."""
    checkpoint: int = 0
    """Bytes of what a checkpoint holds: all workers' weights and moments."""

    @property
    def of_trained(self) -> int:
        return sum(self.trained)


def of_pass(
    folder: Path,
    task: Task,
    chosen: Model,
    lengths: Sequence[int],
    *,
    device: str = "cpu",
    outputs: int = 2,
    precision: str = "fp32",
    recomputed: bool = False,
    more_passes: bool = True,
    tensor: int = 1,
) -> Traced:
    """The memory of a forward and backward pass over windows of these lengths.

    `folder`: the model's; of it config.json alone is read. `device`: whose memory, `cpu` or `gpu`, since their kernels
    keep different things; the network is traced on a processor in both cases. `outputs`: numbers that the head answers
    with, per window or token. `recomputed`: `train.gradient_checkpointing`. `more_passes`: the gradients of an earlier
    pass are there already, as they are in exchanges between workers; else they come to be in this one. `tensor`: of
    workers that share the layers, one. Raises `Untraceable`.
    """
    import torch

    gpu = device == "gpu"
    with torch_internals.fake_tensors(), standing_for_gpu() if gpu else contextlib.nullcontext():
        network: Any = builder.shaped(folder, task, outputs, chosen).train()
        formats.widen(network, precision)
        if gpu:
            dropout.replace_by_native(network)
        if recomputed:
            builder.keep_inputs_alone(network)
        found, moments = table_of(network), len(zero.MOMENTS)
        saved = sum(one.nbytes * (1 + moments * one.requires_grad) for one in network.parameters())
        if tensor > 1:
            layers = layerwise_lr.layers(network.base_model)
            assert layers is not None  # `strategies.allowed` knows the architectures
            tp_plan.keep_share(network, layers, found and found[1], tensor)
        rows = TouchedRows(found[1]) if found and tensor == 1 else None
        if rows is not None:
            rows.gathers = True
        trained = [one for one in network.parameters() if one.requires_grad and dtensor_utils.here(one)]
        for one in trained:
            if more_passes and (rows is None or one is not rows.weight):
                one.grad = torch.zeros_like(one)
        tokens = _tokens(lengths)
        wanted = np.arange(0, len(tokens.ids), round(1 / SHARE)) if task.packs else None

        def run() -> None:
            logits = step.forward(network, tokens, 0, precision, wanted)
            (-torch.log_softmax(logits.float().flatten(0, -2), -1)[:, 0].sum()).backward()

        try:
            peak = torch_internals.peak_bytes(network, run)
        except torch_internals.asks_for_numbers() as error:
            kind = type(network).__name__
            raise Untraceable(f"model.name: {kind} computes what depends on its numbers ({error})") from None
        table = 0 if rows is None else rows.weight.nbytes
        weights = peak["Parameter"] + peak["Buffer"]
        return Traced(
            tokens=len(tokens.ids),
            weights=weights,
            gradients=peak["Gradient"] + table,
            activations=peak["Total"] - weights - peak["Gradient"],
            trained=tuple(one.nbytes for one in trained),
            layers=_layers(network),
            table=table,
            checkpoint=saved,
        )


def _tokens(lengths: Sequence[int]) -> Tokens:
    """Windows of one and the same token."""
    sizes = np.asarray(lengths, dtype=np.int32)
    ids = np.ones(int(sizes.sum()), dtype=np.int32)
    return single(ids, sizes, sizes, np.zeros(len(sizes)), np.arange(len(sizes), dtype=np.uint64))


def _layers(network: "torch.nn.Module") -> tuple[int, ...]:
    """The network's longest list of modules: encoders keep their layers in one."""
    import torch

    lists = [one for one in network.modules() if isinstance(one, torch.nn.ModuleList)]
    longest = max(lists, key=len, default=())
    return tuple(sum(weight.nbytes for weight in one.parameters() if dtensor_utils.here(weight)) for one in longest)


# ------------------------------------------------------------------------- where a GPU is measured for its passes


FORETOLD: Final = (512, 2048)
"""Fewest tokens of the two passes that are traced: what a pass takes is a line in its tokens."""


def tried(
    network: "torch.nn.Module", folder: Path, task: Task, recipe: Recipe, longest: int, precision: str
) -> tuple[int, int]:
    """Fewest tokens of the two passes to measure on the network's GPU. `longest`: tokens of the longest row.

    What cannot be traced is measured at fixed sizes.
    """
    room = batch_size.room(network)
    try:
        small, large = (_peak(folder, task, recipe, longest, tokens, precision) for tokens in FORETOLD)
    except Untraceable:
        return batch_size.TRIED
    return batch_size.guessed(small, large, room)


def _peak(folder: Path, task: Task, recipe: Recipe, longest: int, tokens: int, precision: str) -> batch_size.Peak:
    """What is there in a pass: weights and gradients included, as when it is measured."""
    window = min(longest, recipe.data.window_tokens)
    lengths = [window] * -(-tokens // window)
    again = recipe.train.gradient_checkpointing
    found = of_pass(folder, task, recipe.model, lengths, device="gpu", precision=precision, recomputed=again)
    return batch_size.Peak(found.tokens, found.weights + found.gradients + found.activations)
