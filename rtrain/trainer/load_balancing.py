"""How fast each worker is beside the others, by a few passes before the first update: where nodes are of several
types, or a core is shared with other work, equally many tokens for all would let the fast ones wait."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtrain.core.ragged import Tokens
from rtrain.trainer import batch_size, step

if TYPE_CHECKING:
    import torch

PASSES = 3
"""Passes that are timed. A pass of a second is long beside the slices in which a core is shared."""
STEPS = 16
"""Speeds are rounded to this part of the fastest: equal workers stay equal."""


def seconds(
    network: "torch.nn.Module", loss: step.Loss, tokens: Tokens, pad_id: int, precision: str, passes: int = PASSES
) -> float:
    """The median of some passes, forward and backward. The network's gradients are none before and after."""
    import torch

    device, found = next(network.parameters()).device, []
    network.train()
    for _ in range(passes):
        start = time.perf_counter()
        batch_size.one_pass(network, loss, tokens, pad_id, precision)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    network.zero_grad(set_to_none=True)
    return statistics.median(found)


def relative(seconds: Sequence[float]) -> list[float]:
    """Speeds of workers that took so long for the same: the fastest is 1, the others are rounded, and none is 0."""
    fastest = min(seconds)
    return [max(1, round(STEPS * fastest / one)) / STEPS for one in seconds]
