"""Memory of a worker before it starts: traced, estimated for each parallel layout, and compared with the nodes.

The peak of a micro-batch is traced with fake tensors, which have shapes and no data. The network is the run's own, with
its packed forward pass, dropout, precision and activation checkpointing; only its weights are not read. torch counts
every live tensor, which no formula over layers and widths does. Layouts are traced lazily, one at a time.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rtrain import torch_internals
from rtrain.cluster import capacity
from rtrain.config import ModelConfig, Recipe
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import single_window_batch
from rtrain.models import builder, dropout, network_parts, precision as formats, tp_plan
from rtrain.models.device import pretend_cuda
from rtrain.parallel import dtensor_utils, zero
from rtrain.parallel.ddp import TouchedRows, find_embedding
from rtrain.parallel.layout import STRATEGIES, ParallelLayout, should_trim_malloc
from rtrain.planning.throughput import GPU_SPECS
from rtrain.tasks import base
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
            weight.nbytes * (1 + num_moments * weight.requires_grad) for weight in network.parameters()
        )
        if tensor > 1:
            layers = network_parts.find_layers(network.base_model)
            assert layers is not None  # `strategies.allowed` knows the architectures
            tp_plan.keep_tp_shard(network, layers, embedding and embedding[1], tensor)
        touched_rows = TouchedRows(embedding[1]) if embedding and tensor == 1 else None
        if touched_rows is not None:
            touched_rows.is_recording = True
        materialized = [weight for weight in network.parameters() if dtensor_utils.is_materialized(weight)]
        trained_weights = [weight for weight in materialized if weight.requires_grad]
        for weight in trained_weights:
            if has_gradients and (touched_rows is None or weight is not touched_rows.weight):
                weight.grad = torch.zeros_like(weight)
        sizes = np.asarray(window_lengths, dtype=np.int32)  # windows that repeat one token
        ids, row_ids = np.ones(int(sizes.sum()), dtype=np.int32), np.arange(len(sizes), dtype=np.uint64)
        tokens = single_window_batch(ids, sizes, sizes, np.zeros(len(sizes)), row_ids)
        logit_positions = np.arange(0, len(tokens.ids), round(1 / MASKED_SHARE)) if task.packs_text else None

        def run_micro_batch() -> None:
            logits = step.forward(network, tokens, 0, precision, logit_positions)
            (-torch.log_softmax(logits.float().flatten(0, -2), -1)[:, 0].sum()).backward()

        try:
            peak = torch_internals.measure_peak_bytes(network, run_micro_batch)
        except torch_internals.fake_tensor_errors() as error:
            reason = f"the memory of {type(network).__name__} depends on the values of its tensors ({error})"
            raise UntraceableModel(f"model.name: {reason}") from None
        embedding_bytes = 0 if touched_rows is None else touched_rows.weight.nbytes
        weights = peak["Parameter"] + peak["Buffer"]
        return TracedMemory(
            tokens=len(tokens.ids),
            weights=weights,
            gradients=peak["Gradient"] + embedding_bytes,
            activations=peak["Total"] - weights - peak["Gradient"],
            trained_sizes=tuple(weight.nbytes for weight in trained_weights),
            layer_sizes=_layer_bytes(network),
            embedding_bytes=embedding_bytes,
            checkpoint=checkpoint_bytes,
        )


def _layer_bytes(network: "torch.nn.Module") -> tuple[int, ...]:
    """Bytes per layer of the network's longest module list: encoders keep their layers in one."""
    import torch

    lists = [module for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=len, default=())
    return tuple(
        sum(weight.nbytes for weight in layer.parameters() if dtensor_utils.is_materialized(weight)) for layer in layers
    )


PROBE_TOKENS: Final = (512, 2048)
"""Minimum tokens of the two traced micro-batches: memory is linear in the tokens."""


def initial_probe_sizes(
    network: "torch.nn.Module", folder: Path, task: Task, recipe: Recipe, max_tokens: int, precision: str
) -> tuple[int, int]:
    """Minimum tokens of the two micro-batches to measure on the network's GPU. `max_tokens`: tokens of the longest row.

    An untraceable model is measured at fixed sizes.
    """

    def trace_peak(tokens: int) -> batch_size.MemoryPeak:
        """Peak memory of a micro-batch, weights and gradients included, as in the measurement."""
        window_tokens = min(max_tokens, recipe.data.window_tokens)
        traced = trace_micro_batch(
            *(folder, task, recipe.model, [window_tokens] * -(-tokens // window_tokens)),
            device="gpu",
            precision=precision,
            recomputes_layers=recipe.train.gradient_checkpointing,
        )
        return batch_size.MemoryPeak(traced.tokens, traced.weights + traced.gradients + traced.activations)

    available_bytes = batch_size.available_bytes(network)
    try:
        small_peak, large_peak = map(trace_peak, PROBE_TOKENS)
    except UntraceableModel:
        return batch_size.PROBE_TOKENS
    return batch_size.probe_sizes(small_peak, large_peak, available_bytes)


PROCESS_BYTES: Final = 440_000_000
"""Bytes of a worker process without a model: Python, torch, Transformers and Ray, measured on Linux with CPUs (torch
2.13, Ray 2.60). With CUDA a process takes two to three times as much, none of it on the GPU."""
ALLOCATOR_OVERHEAD: Final = 1.3
"""Ratio of allocated to live activation memory. The C library is set (`env.ENV_DEFAULTS`) to keep freed blocks of up to
64 MB for the next micro-batch, and they leave holes: 1.11 to 1.46 in six trainings of five models. 1.3 has the smallest
relative error over them."""
TRIMMED_ALLOCATOR_OVERHEAD: Final = 1.02
"""The same ratio if freed blocks are returned to the system (`env.trim_malloc`)."""


@dataclass(frozen=True)
class WorkerMemory:
    """Peak bytes of one worker."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0
    """Gathered weights of other workers, and gradients before they are sharded."""
    checkpoint: float = 0.0
    """Copy of weights and moments while a thread writes it; on the first worker only."""
    process: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def tensor_bytes(self) -> float:
        """Bytes without the process."""
        return self.total - self.process

    def total_of(self, workers: int) -> float:
        """Bytes of `workers` workers; one of them writes the checkpoints."""
        return workers * (self.total - self.checkpoint) + self.checkpoint


def optimizer_bytes(trained_sizes: tuple[int, ...], workers: int, strategy: str) -> float:
    """Bytes of moments on the worker with the most."""
    moments = len(zero.MOMENT_KEYS)
    if strategy == "ddp":
        return moments * sum(trained_sizes)
    if strategy == "zero1":
        loads = [0] * workers
        for owner, size in zip(zero.assign_owners(trained_sizes, workers), trained_sizes, strict=True):
            loads[owner] += moments * size
        return max(loads)
    return moments * sum(trained_sizes) / workers


def estimate_memory(
    traced: TracedMemory,
    replicas: int,
    strategy: str = "ddp",
    *,
    writes_checkpoints: bool = False,
    has_several: bool = False,
    uses_buckets: bool = True,
    overhead: float = ALLOCATOR_OVERHEAD,
) -> WorkerMemory:
    """Estimate the peak memory of a worker in a step; `traced` is one worker's share under tensor parallelism.

    Args:
        writes_checkpoints: This worker writes checkpoints.
        has_several: A worker runs several micro-batches per step.
        uses_buckets: Replicas synchronize gradients with the buckets of DistributedDataParallel.
        overhead: See `ALLOCATOR_OVERHEAD`; 1 on a GPU, which does not use the C library's allocator.

    Raises `KeyError` for a strategy that is not in `STRATEGIES`.
    """
    STRATEGIES[strategy]
    trained_bytes = traced.trained_bytes
    moments = optimizer_bytes(traced.trained_sizes, replicas, strategy)
    activations = overhead * traced.activations
    weights, gradients, gathered = float(traced.weights), float(traced.gradients), 0.0
    if strategy in ("ddp", "zero1"):
        # At the optimizer step all gradients exist and no activations. DistributedDataParallel rebuilds its buckets
        # before the second all-reduce: each gradient then exists twice.
        activations = max(
            activations,
            trained_bytes - gradients,
            trained_bytes - traced.embedding_bytes if replicas > 1 and uses_buckets else 0,
        )
    else:
        largest_layer, other_weights = max(traced.layer_sizes, default=0), weights - sum(traced.layer_sizes)
        # Weights outside the layers stay gathered, plus the current and the next layer, and the last gradients.
        gathered = weights + largest_layer if strategy == "zero2" else other_weights + 3 * largest_layer
        # At the end of a micro-batch there are no activations, but the shard of all gradients, and two full copies of
        # the last part's gradients. Stage 2 keeps all weights until the last micro-batch of a step.
        after_backward = (weights if strategy == "zero2" and has_several else other_weights + largest_layer) + 2 * max(
            largest_layer, other_weights
        )
        weights, gradients = weights / replicas, trained_bytes / replicas if has_several else 0.0
        activations = max(activations, after_backward + trained_bytes / replicas - gradients - gathered)
    checkpoint_copy = traced.checkpoint if writes_checkpoints else 0.0
    return WorkerMemory(weights, gradients, moments, activations, gathered, checkpoint_copy, PROCESS_BYTES)


USABLE_MEMORY_SHARE: Final = 0.9
"""Share of a node's `memory` resource (Ray: memory minus the object store) that workers may use. The driver and the
data tasks use the rest."""
USABLE_GPU_SHARE: Final = 0.85


@dataclass(frozen=True)
class MicroBatchShape:
    """Micro-batches of a run's steps."""

    window_lengths: tuple[int, ...]
    """Tokens of each window in the largest micro-batch."""
    precision: str = "fp32"
    num_outputs: int = 2
    """Outputs of the head per window or token."""
    tokens_per_step: float = 0.0
    """Tokens per step, summed over all workers."""

    def has_several(self, replicas: int) -> bool:
        """Whether a replica runs more than one micro-batch per step."""
        return self.tokens_per_step / replicas > sum(self.window_lengths)


def largest_micro_batch(recipe: Recipe, device: str, max_tokens: int) -> tuple[int, ...]:
    """Window lengths of the largest micro-batch. `max_tokens`: tokens of the longest window."""
    tokens = recipe.train.max_tokens_per_micro_batch or (
        batch_size.CPU_TOKENS if device == "cpu" else 4 * batch_size.CPU_TOKENS
    )
    return (max_tokens,) * max(1, tokens // max_tokens)


def memory_of_layouts(
    recipe: Recipe,
    folder: Path,
    layouts: Iterable[ParallelLayout],
    micro_batch: MicroBatchShape,
    workers: int,
    device: str,
) -> Iterator[tuple[ParallelLayout, WorkerMemory]]:
    """Estimate the memory per worker for each layout, on the fullest node. A pipeline stage is counted as if it had all
    layers.

    Layouts that the network in `folder` does not support are skipped, unless the recipe requests them. Raises
    `UntraceableModel`.
    """

    @cache
    def trace_cached(tensor: int, recomputes_layers: bool, has_gradients: bool) -> TracedMemory:
        return trace_micro_batch(
            *(folder, task, recipe.model, micro_batch.window_lengths),
            device=device,
            num_outputs=micro_batch.num_outputs,
            precision=micro_batch.precision,
            tensor=tensor,
            recomputes_layers=recomputes_layers,
            has_gradients=has_gradients,
        )

    task, recipe_checkpointing = base.get_task(recipe.task), recipe.train.gradient_checkpointing
    for layout in layouts:
        replicas = workers // layout.workers_per_replica
        has_several = micro_batch.has_several(replicas)
        # DistributedDataParallel's buckets hold the gradients' memory from the first micro-batch on.
        has_gradients = has_several or (layout.workers_per_replica == 1 and workers > 1)
        try:
            traced_memory = trace_cached(layout.tensor_parallel_size, layout.gradient_checkpointing, has_gradients)
        except ConfigError:  # a network without activation checkpointing
            if recipe_checkpointing == layout.gradient_checkpointing:
                raise
            continue
        is_trimmed = should_trim_malloc(layout.apply_to(recipe.train, workers))
        cpu_overhead = TRIMMED_ALLOCATOR_OVERHEAD if is_trimmed else ALLOCATOR_OVERHEAD
        yield (
            layout,
            estimate_memory(
                *(traced_memory, replicas, layout.strategy if replicas > 1 else "ddp"),
                writes_checkpoints=device == "cpu",
                has_several=has_several,
                uses_buckets=layout.workers_per_replica == 1,
                overhead=1.0 if device == "gpu" else cpu_overhead,
            ),
        )


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit of the tightest node or GPU."""

    limit_bytes: float
    """Bytes that workers may use on the node, or bytes of the GPU."""
    sharing_workers: int
    """Number of workers that share the memory; 1 on a GPU."""
    device: str = "cpu"

    def fits(self, worker_memory: WorkerMemory) -> bool:
        return self.used_bytes(worker_memory) <= self.limit_bytes

    def used_bytes(self, worker_memory: WorkerMemory) -> float:
        """Bytes that the workers use; on a GPU without the process memory."""
        if self.device == "gpu":
            return worker_memory.tensor_bytes
        return worker_memory.total_of(self.sharing_workers)


def tightest_memory_limit(nodes: Sequence[Mapping[str, float]], device: str, workers: int) -> MemoryLimit | None:
    """Find the node or GPU with the least memory per worker, from Ray's node resources; None if Ray reports none. Each
    node is filled with as many workers as it has slots for."""
    workers_by_node = [(node, min(workers, capacity.count_worker_slots([node], device))) for node in nodes]
    limits = [limit for node, count in workers_by_node if count for limit in _node_memory_limits(node, device, count)]
    return min(limits, key=lambda limit: limit.limit_bytes / limit.sharing_workers, default=None)


def _node_memory_limits(node: Mapping[str, float], device: str, workers: int) -> Iterator[MemoryLimit]:
    if device == "cpu" and "memory" in node:
        yield MemoryLimit(USABLE_MEMORY_SHARE * node["memory"], workers)
    gpu_sizes = [GPU_SPECS[kind].memory_gb for kind in capacity.list_gpu_types(node) if kind in GPU_SPECS]
    if device == "gpu" and gpu_sizes:
        yield MemoryLimit(USABLE_GPU_SHARE * max(gpu_sizes) * 1e9, 1, device)


@dataclass(frozen=True)
class LayoutChoice:
    """A layout that fits, and the reason for the choice."""

    layout: ParallelLayout
    worker_memory: WorkerMemory
    reason: str


def first_fitting_layout(candidates: Iterable[tuple[ParallelLayout, WorkerMemory]], limit: MemoryLimit) -> LayoutChoice:
    """Return the first layout that fits; later candidates are not evaluated. Raises `ConfigError` if none fits."""
    previous: tuple[ParallelLayout, WorkerMemory] | None = None
    for layout, worker_memory in candidates:
        if limit.fits(worker_memory):
            explanation = f"{layout}: {_describe_usage(limit, worker_memory)}"
            if previous is not None:
                explanation += f"; with {previous[0]} it would be {limit.used_bytes(previous[1]) / 1e6:,.0f}"
            return LayoutChoice(layout, worker_memory, explanation)
        previous = layout, worker_memory
    assert previous is not None  # DDP is always a candidate
    reason = f"even with {previous[0]} {_describe_usage(limit, previous[1])}"
    fix = "use fewer workers per node, or write --set train.max_tokens_per_micro_batch=512"
    raise ConfigError([Problem("train.strategy", "auto", reason, fix, code="out_of_memory")])


def _describe_usage(limit: MemoryLimit, worker_memory: WorkerMemory) -> str:
    subject = "a worker takes" if limit.sharing_workers == 1 else f"a node's {limit.sharing_workers} workers take"
    return f"{subject} {limit.used_bytes(worker_memory) / 1e6:,.0f} MB of {limit.limit_bytes / 1e6:,.0f}"
