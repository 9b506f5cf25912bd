"""The memory that a worker needs, by what it is for and by how weights, gradients and moments are held. Pure.

Shares over the workers are those of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): its stage 1 shares the
optimizer's moments, stage 2 the gradients too, stage 3 the weights too.
"""

from dataclasses import dataclass, fields
from typing import Final

from rtrain.parallel import zero
from rtrain.parallel.layout import STRATEGIES
from rtrain.planning.memory_trace import Traced

PROCESS: Final = 440_000_000
"""Bytes of a worker's process without any model: Python, torch, Transformers and Ray with their own memory, as measured
on Linux with CPUs (torch 2.13, Ray 2.60). With CUDA it is two to three times as much, none of it on the GPU."""
KEPT: Final = 1.3
"""What a process holds for the activations, over what is alive of them at a time. By rtrain's settings (`env.SETTINGS`)
the C library keeps freed blocks of up to 64 MB, since the next pass wants them again, and they leave holes: 1.11 to
1.46 in six trainings of five models, of which this leaves the least relative error."""
RETURNED: Final = 1.02
"""The same where freed blocks go back to the system (`env.freed_goes_back`)."""


@dataclass(frozen=True)
class Need:
    """Bytes of one worker at the moment when they are most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0
    """Weights of others that are here for a while, and gradients before they are shared out."""
    checkpoint: float = 0.0
    """A copy of weights and moments while a thread writes it; on the first worker alone."""
    process: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, one.name) for one in fields(self)))

    def of(self, workers: int) -> float:
        """Bytes of so many workers, of which one writes the checkpoints."""
        return workers * (self.total - self.checkpoint) + self.checkpoint


def optimizer_bytes(trained: tuple[int, ...], workers: int, strategy: str) -> float:
    """Bytes of moments on the worker that has most of them."""
    moments = len(zero.MOMENTS)
    if strategy == "ddp":
        return moments * sum(trained)
    if strategy == "zero1":
        loads = [0] * workers
        for owner, size in zip(zero.owners(trained, workers), trained, strict=True):
            loads[owner] += moments * size
        return max(loads)
    return moments * sum(trained) / workers


def needed(
    traced: Traced,
    replicas: int,
    strategy: str = "ddp",
    *,
    saves: bool = False,
    several: bool = False,
    process: float = PROCESS,
    buckets: bool = True,
    kept: float = KEPT,
) -> Need:
    """The memory of a worker in an update; where several workers share a replica's layers, `traced` is of one of them.

    `saves`: this worker writes checkpoints; `several`: an update has several passes of a worker; `buckets`: replicas
    exchange by those of DistributedDataParallel; `kept`: see `KEPT`; 1 on a GPU, whose memory is not the C library's.
    Raises `KeyError` for a strategy that is none of `STRATEGIES`.
    """
    STRATEGIES[strategy]
    alone = traced.of_trained
    moments = optimizer_bytes(traced.trained, replicas, strategy)
    activations = kept * traced.activations
    weights, gradients, gathered = float(traced.weights), float(traced.gradients), 0.0
    if strategy in ("ddp", "zero1"):
        # When the optimizer steps, all gradients are there, and no activation; when DistributedDataParallel makes its
        # buckets anew, before the second exchange, there are two of each.
        activations = max(activations, alone - gradients, alone - traced.table if replicas > 1 and buckets else 0)
    else:
        layer, rest = max(traced.layers, default=0), weights - sum(traced.layers)
        # What is in no layer stays gathered; beside it the layer at work, the next one, and the gradients of the last.
        gathered = weights + layer if strategy == "zero2" else rest + 3 * layer
        # At a pass's end there is no activation, but a share of all gradients, and twice, whole and on their way, those
        # of the last part. Before an update's last pass, the second stage keeps all weights.
        ended = (weights if strategy == "zero2" and several else rest + layer) + 2 * max(layer, rest)
        weights, gradients = weights / replicas, alone / replicas if several else 0.0
        activations = max(activations, ended + alone / replicas - gradients - gathered)
    copied = traced.checkpoint if saves else 0.0
    return Need(weights, gradients, moments, activations, gathered, copied, process)
