"""Memory per worker, by purpose and strategy. Pure.

Sharding follows ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): stage 1 shards the optimizer's moments, stage 2 also
the gradients, stage 3 also the weights.
"""

from dataclasses import dataclass, fields
from typing import Final

from rtrain.parallel import zero
from rtrain.parallel.layout import STRATEGIES
from rtrain.planning.memory_trace import TracedMemory

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
    process_bytes: float = PROCESS_BYTES,
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
    return WorkerMemory(weights, gradients, moments, activations, gathered, checkpoint_copy, process_bytes)
