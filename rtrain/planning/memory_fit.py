"""Choose the first parallel layout whose memory fits the workers. Memory is traced lazily, one layout at a time; the
choice itself is pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from rtrain.cluster import capacity
from rtrain.config import Recipe, TrainConfig
from rtrain.core.errors import ConfigError, Problem
from rtrain.parallel.layout import ParallelLayout, should_trim_malloc
from rtrain.planning import memory_needs, memory_trace
from rtrain.planning.memory_needs import WorkerMemory
from rtrain.planning.throughput import GPU_SPECS
from rtrain.tasks import base
from rtrain.trainer import batch_size

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
    def trace_cached(tensor: int, recomputes_layers: bool, has_gradients: bool) -> memory_trace.TracedMemory:
        return trace_micro_batch(tensor=tensor, recomputes_layers=recomputes_layers, has_gradients=has_gradients)

    task, recipe_checkpointing = base.get_task(recipe.task), recipe.train.gradient_checkpointing
    trace_lengths = partial(
        memory_trace.trace_micro_batch,
        *(folder, task, recipe.model),
        device=device,
        num_outputs=micro_batch.num_outputs,
        precision=micro_batch.precision,
    )
    trace_micro_batch = partial(trace_lengths, micro_batch.window_lengths)
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
        settings = layout.apply_to(recipe.train, workers)
        worker_memory = memory_needs.estimate_memory(
            *(traced_memory, replicas, layout.strategy if replicas > 1 else "ddp"),
            writes_checkpoints=device == "cpu",
            has_several=has_several,
            uses_buckets=layout.workers_per_replica == 1,
            overhead=activation_overhead(settings, device),
        )
        yield layout, worker_memory


def activation_overhead(train: TrainConfig, device: str) -> float:
    """Ratio of allocated to live activation memory; see `memory_needs.ALLOCATOR_OVERHEAD`."""
    if device == "gpu":
        return 1.0
    return memory_needs.TRIMMED_ALLOCATOR_OVERHEAD if should_trim_malloc(train) else memory_needs.ALLOCATOR_OVERHEAD


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
        return (
            worker_memory.total - worker_memory.process
            if self.device == "gpu"
            else worker_memory.total_of(self.sharing_workers)
        )


def tightest_memory_limit(nodes: Sequence[Mapping[str, float]], device: str, workers: int) -> MemoryLimit | None:
    """Find the node or GPU with the least memory per worker, from Ray's node resources; None if Ray reports none. Each
    node is filled with as many workers as it has slots for."""
    workers_by_node = [(node, min(workers, capacity.count_worker_slots([node], device))) for node in nodes]
    limits = [limit for node, count in workers_by_node if count for limit in _node_memory_limits(node, device, count)]
    return min(limits, key=lambda limit: limit.limit_bytes / limit.sharing_workers, default=None)


def _node_memory_limits(node: Mapping[str, float], device: str, workers: int) -> Iterator[MemoryLimit]:
    if device == "cpu" and "memory" in node:
        yield MemoryLimit(USABLE_MEMORY_SHARE * node["memory"], workers)
    if device == "gpu":
        gpu_sizes = [
            GPU_SPECS[gpu_type].memory_gb for gpu_type in capacity.list_gpu_types(node) if gpu_type in GPU_SPECS
        ]
        if gpu_sizes:
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
