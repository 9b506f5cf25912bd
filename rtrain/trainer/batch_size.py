"""How many tokens a pass may have on a GPU: measured by two passes before the first update, and decided once.

It changes speed alone: the rows of an update are the same in any number of passes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rtrain.core.ragged import Tokens
from rtrain.data.store.store import Store
from rtrain.tasks.base import Task
from rtrain.trainer import step

if TYPE_CHECKING:
    import torch

ON_CPU = 2048
"""Tokens of a pass on a CPU. Measured (MiniLM, bf16, one thread), in thousand tokens a second: passes of 500 tokens
1.55, 1,000 1.72, 2,000 1.83, 3,000 1.9, 6,000 1.73."""
IN_PARTS = 4 * ON_CPU
"""Tokens of a pass on a GPU that has a part of the network, where nothing is measured: no GPU holds the whole of it."""
TRIED = (2048, 8192)
"""Fewest tokens of each of the two passes, where nothing is foretold of them."""
LEAST, MOST, MULTIPLE = 256, 65_536, 256
"""Most tokens of a pass: more do not make a GPU's matrix products any faster."""
SHARE = 0.8
"""The share of the free memory that passes may take; rows of other lengths leave holes in the rest."""
MOMENTS = 2
"""Tensors of a parameter's size that the optimizer makes at the first update, after these passes."""


@dataclass(frozen=True)
class Peak:
    """What a forward and backward pass took."""

    tokens: int
    bytes: int | None
    """Most bytes that were allocated, weights and gradients included; None where the pass did not fit."""


def fitting(small: Peak, large: Peak, usable: float) -> int:
    """Tokens of the largest pass that fits into so many bytes, by the line through both peaks. Pure."""
    if small.bytes is None:
        return max(LEAST, small.tokens // 4 // MULTIPLE * MULTIPLE)
    if large.bytes is None:
        return min(MOST, max(LEAST, small.tokens // MULTIPLE * MULTIPLE))
    if large.tokens > small.tokens and large.bytes > small.bytes:
        slope = (large.bytes - small.bytes) / (large.tokens - small.tokens)
        found = large.tokens + (usable - large.bytes) / slope
    else:  # rows of which one alone is as long as both: as if all of it were the tokens'
        found = large.tokens * usable / large.bytes
    return int(min(MOST, max(LEAST, found // MULTIPLE * MULTIPLE)))


def dealt(most: int, tokens: float, passes: int) -> int:
    """Most tokens of a pass, `most` or fewer, where so many tokens of an update should make so many passes."""
    return min(most, max(LEAST, math.ceil(tokens / passes))) if passes > 1 else most


def longest_rows(store: Store, task: Task, tokens: int, teacher: str | None = None) -> Tokens:
    """The longest training rows that together have so many tokens, again and again where all have fewer: with padding
    inside attention they take the most memory."""
    lengths = store.column("train", "length")
    most = min(tokens, len(lengths))  # a row has a token at least; all rows would take seconds to sort, of 10^8
    longest = np.argpartition(lengths, len(lengths) - most)[len(lengths) - most :]
    order = longest[np.argsort(-lengths[longest], kind="stable")]
    sums = np.cumsum(lengths[order], dtype=np.int64)
    rounds, rest = divmod(tokens, int(sums[-1]))
    count = int(np.searchsorted(sums, rest)) + 1 if rest else 0
    positions = np.tile(order, rounds + 1)[: rounds * len(order) + count]
    rows = store.read("train", positions)
    if teacher is not None:
        rows = replace(rows, teacher=store.taught(teacher, positions))
    return task.prepare(rows, store.manifest.head, 0, 0)


def guessed(small: Peak, large: Peak, usable: float) -> tuple[int, int]:
    """Fewest tokens of each of the two passes that are to be measured, where those of two other passes are foretold:
    an eighth and a half of what would fit, so that a forecast that is half of the truth still fits. Pure."""
    fits = fitting(small, large, usable)
    few = max(LEAST, fits // 8)
    return few, max(2 * few, fits // 2)


def room(network: "torch.nn.Module") -> float:
    """Bytes that passes may take of the network's GPU, or of this process's share of it, beside what is there and what
    the optimizer will take; the network's own weights are among what is there."""
    import torch

    device = next(network.parameters()).device
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    usable = SHARE * min(free + reserved, share * total)
    return usable - MOMENTS * sum(one.numel() * one.element_size() for one in network.parameters() if one.requires_grad)


def measured(
    network: "torch.nn.Module",
    loss: step.Loss,
    made: Callable[[int], Tokens],
    pad_id: int,
    precision: str,
    tried: tuple[int, int] = TRIED,
) -> int:
    """Tokens of a pass that fits on the network's GPU.

    `made` gives the rows of a pass of so many tokens; `tried`: fewest tokens of the two passes that are measured. The
    network's gradients are none before and after.
    """
    import torch

    device, usable = next(network.parameters()).device, room(network)
    network.train()

    def peak(tokens: Tokens) -> Peak:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            one_pass(network, loss, tokens, pad_id, precision)
        except torch.OutOfMemoryError:
            return Peak(int(tokens.lengths.sum()), None)
        return Peak(int(tokens.lengths.sum()), torch.cuda.max_memory_allocated(device))

    small, large = (made(tokens) for tokens in tried)
    peak(small)  # so that gradients and the libraries' own memory are there when the next pass is measured
    found = fitting(peak(small), peak(large), usable)
    network.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return found


def one_pass(network: "torch.nn.Module", loss: step.Loss, tokens: Tokens, pad_id: int, precision: str) -> None:
    """A forward and backward pass as an update's, for the memory that it takes."""
    loss(step.forward(network, tokens, pad_id, precision, loss.wanted(tokens)), tokens).sum().backward()
