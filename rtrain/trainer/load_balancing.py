"""Relative speeds of workers, timed by a few micro-batches before the first step. Equal shares would make fast workers
wait on nodes of several types, or if a core is shared with other work."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtrain.core.ragged import TokenBatch
from rtrain.trainer import batch_size, step

if TYPE_CHECKING:
    import torch

TIMED_MICRO_BATCHES = 3
"""Number of timed micro-batches. A micro-batch of a second is long compared with the time slices of a shared core."""
SPEED_LEVELS = 16
"""Speeds are rounded to multiples of the fastest speed over this number, so equal workers stay equal."""


def time_micro_batches(
    network: "torch.nn.Module",
    loss: step.Loss,
    tokens: TokenBatch,
    pad_id: int,
    precision: str,
    count: int = TIMED_MICRO_BATCHES,
) -> float:
    """Median seconds of some micro-batches, forward and backward. The network has no gradients before and after."""
    import torch

    device, durations = next(network.parameters()).device, []
    network.train()
    for _ in range(count):
        start = time.perf_counter()
        batch_size.forward_backward(network, loss, tokens, pad_id, precision)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    network.zero_grad(set_to_none=True)
    return statistics.median(durations)


def relative_speeds(seconds: Sequence[float]) -> list[float]:
    """Relative speeds from the seconds of equal work: the fastest is 1, the others are rounded and positive."""
    fastest = min(seconds)
    return [max(1, round(SPEED_LEVELS * fastest / value)) / SPEED_LEVELS for value in seconds]
