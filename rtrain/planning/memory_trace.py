"""Peak memory of a micro-batch, traced with fake tensors, which have shapes and no data.

The network is the run's own, with its packed forward pass, dropout, precision and activation checkpointing; only its
weights are not read. torch counts every live tensor, which no formula over layers and widths does.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rtrain import torch_internals
from rtrain.config import ModelConfig, Recipe
from rtrain.core.errors import UserError
from rtrain.core.ragged import TokenBatch, single_window_batch
from rtrain.models import builder, dropout, layerwise_lr, precision as formats, tp_plan
from rtrain.models.device import pretend_cuda
from rtrain.parallel import dtensor_utils, zero
from rtrain.parallel.sparse_embedding import TouchedRows, find_embedding
from rtrain.tasks.base import Task
from rtrain.tasks.masked_lm import MASKED_SHARE
from rtrain.trainer import batch_size, step

if TYPE_CHECKING:
    import torch


class UntraceableModel(UserError):
    """The network's memory depends on its data."""

    code = "unsupported_model"


@dataclass(frozen=True)
class TracedMemory:
    """Peak bytes of a micro-batch on a single worker, by purpose."""

    tokens: int
    weights: int
    gradients: int
    activations: int
    """All other live tensors: the tensors that forward keeps for backward, and temporaries."""
    trained_sizes: tuple[int, ...]
    """Bytes of each trained weight, in the model's order."""
    layer_sizes: tuple[int, ...]
    """Bytes of the weights of each encoder layer; empty if the layers are unknown."""
    embedding_bytes: int
    """Bytes of the word embedding if its gradient is synchronized by touched rows, else 0."""
    checkpoint: int = 0
    """Bytes of a checkpoint: all workers' weights and moments."""

    @property
    def trained_bytes(self) -> int:
        return sum(self.trained_sizes)


def trace_micro_batch(
    folder: Path,
    task: Task,
    model_settings: ModelConfig,
    window_lengths: Sequence[int],
    *,
    device: str = "cpu",
    num_outputs: int = 2,
    precision: str = "fp32",
    recomputes_layers: bool = False,
    has_gradients: bool = True,
    tensor: int = 1,
) -> TracedMemory:
    """Trace the memory of forward and backward over windows of the given lengths.

    Args:
        folder: Model folder; only config.json is read.
        device: `cpu` or `gpu`, since their kernels keep different tensors; the trace itself runs on the CPU.
        num_outputs: Outputs of the head per window or token.
        recomputes_layers: `train.gradient_checkpointing`.
        has_gradients: Gradients of an earlier micro-batch exist already, as in DDP; else this one allocates them.
        tensor: Number of workers that share the layers; one of them is traced.

    Raises `UntraceableModel`.
    """
    import torch

    is_gpu = device == "gpu"
    with torch_internals.fake_tensor_mode(), pretend_cuda() if is_gpu else contextlib.nullcontext():
        network: Any = builder.build_fake(folder, task, num_outputs, model_settings).train()
        formats.to_fp64_(network, precision)
        if is_gpu:
            dropout.use_native_dropout(network)
        if recomputes_layers:
            builder.enable_activation_checkpointing(network)
        embedding, num_moments = find_embedding(network), len(zero.MOMENT_KEYS)
        checkpoint_bytes = sum(
            parameter.nbytes * (1 + num_moments * parameter.requires_grad) for parameter in network.parameters()
        )
        if tensor > 1:
            layers = layerwise_lr.find_layers(network.base_model)
            assert layers is not None  # `strategies.allowed` knows the architectures
            tp_plan.keep_tp_shard(network, layers, embedding and embedding[1], tensor)
        touched_rows = TouchedRows(embedding[1]) if embedding and tensor == 1 else None
        if touched_rows is not None:
            touched_rows.is_recording = True
        trained_weights = [
            parameter
            for parameter in network.parameters()
            if parameter.requires_grad and dtensor_utils.is_materialized(parameter)
        ]
        for weight in trained_weights:
            if has_gradients and (touched_rows is None or weight is not touched_rows.weight):
                weight.grad = torch.zeros_like(weight)
        tokens = _constant_tokens(window_lengths)
        logit_positions = np.arange(0, len(tokens.ids), round(1 / MASKED_SHARE)) if task.packs_text else None

        def run_micro_batch() -> None:
            logits = step.forward(network, tokens, 0, precision, logit_positions)
            (-torch.log_softmax(logits.float().flatten(0, -2), -1)[:, 0].sum()).backward()

        try:
            peak = torch_internals.measure_peak_bytes(network, run_micro_batch)
        except torch_internals.fake_tensor_errors() as error:
            kind = type(network).__name__
            raise UntraceableModel(
                f"model.name: the memory of {kind} depends on the values of its tensors ({error})"
            ) from None
        embedding_bytes = 0 if touched_rows is None else touched_rows.weight.nbytes
        weights = peak["Parameter"] + peak["Buffer"]
        return TracedMemory(
            tokens=len(tokens.ids),
            weights=weights,
            gradients=peak["Gradient"] + embedding_bytes,
            activations=peak["Total"] - weights - peak["Gradient"],
            trained_sizes=tuple(trained_weight.nbytes for trained_weight in trained_weights),
            layer_sizes=_layer_bytes(network),
            embedding_bytes=embedding_bytes,
            checkpoint=checkpoint_bytes,
        )


def _constant_tokens(window_lengths: Sequence[int]) -> TokenBatch:
    """Windows that repeat one token."""
    sizes = np.asarray(window_lengths, dtype=np.int32)
    ids = np.ones(int(sizes.sum()), dtype=np.int32)
    return single_window_batch(ids, sizes, sizes, np.zeros(len(sizes)), np.arange(len(sizes), dtype=np.uint64))


def _layer_bytes(network: "torch.nn.Module") -> tuple[int, ...]:
    """Bytes per layer of the network's longest module list: encoders keep their layers in one."""
    import torch

    lists = [module for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=len, default=())
    return tuple(
        sum(weight.nbytes for weight in layer.parameters() if dtensor_utils.is_materialized(weight)) for layer in layers
    )


# ------------------------------------------------------------------------- first guess of a GPU's batch size


PROBE_TOKENS: Final = (512, 2048)
"""Minimum tokens of the two traced micro-batches: memory is linear in the tokens."""


def initial_probe_sizes(
    network: "torch.nn.Module", folder: Path, task: Task, recipe: Recipe, max_tokens: int, precision: str
) -> tuple[int, int]:
    """Minimum tokens of the two micro-batches to measure on the network's GPU. `max_tokens`: tokens of the longest row.

    An untraceable model is measured at fixed sizes.
    """
    available_bytes = batch_size.available_bytes(network)
    try:
        small_peak, large_peak = (
            _trace_peak(folder, task, recipe, max_tokens, tokens, precision) for tokens in PROBE_TOKENS
        )
    except UntraceableModel:
        return batch_size.PROBE_TOKENS
    return batch_size.probe_sizes(small_peak, large_peak, available_bytes)


def _trace_peak(
    folder: Path, task: Task, recipe: Recipe, max_tokens: int, tokens: int, precision: str
) -> batch_size.MemoryPeak:
    """Peak memory of a micro-batch, weights and gradients included, as in the measurement."""
    window_tokens = min(max_tokens, recipe.data.window_tokens)
    window_lengths = [window_tokens] * -(-tokens // window_tokens)
    recomputes_layers = recipe.train.gradient_checkpointing
    traced = trace_micro_batch(
        folder,
        task,
        recipe.model,
        window_lengths,
        device="gpu",
        precision=precision,
        recomputes_layers=recomputes_layers,
    )
    return batch_size.MemoryPeak(traced.tokens, traced.weights + traced.gradients + traced.activations)
