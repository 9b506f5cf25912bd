"""The largest number of tokens in a micro-batch on a GPU, and the relative speeds of workers, measured by a few
micro-batches before the first step and decided once.

They change only the speed: a step has the same rows in any number of micro-batches. Equal shares would make fast
workers wait on nodes of several types, or if a core is shared with other work.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rtrain.core.ragged import TokenBatch
from rtrain.data.store.store import Store
from rtrain.tasks.base import Task
from rtrain.trainer import step

if TYPE_CHECKING:
    import torch

CPU_TOKENS = 2048
"""Tokens of a micro-batch on a CPU. Measured (MiniLM, bf16, one thread), in thousand tokens a second: 500 tokens 1.55,
1,000 1.72, 2,000 1.83, 3,000 1.9, 6,000 1.73."""
MODEL_PARALLEL_TOKENS = 4 * CPU_TOKENS
"""Tokens of a micro-batch on a GPU with a part of the network. Nothing is measured there, as no GPU holds the full
network."""
PROBE_TOKENS = (2048, 8192)
"""Tokens of the two probing micro-batches without an estimate."""
MIN_TOKENS, MAX_TOKENS, TOKEN_MULTIPLE = 256, 65_536, 256
"""Largest number of tokens in a micro-batch: more do not make a GPU's matrix products faster."""
MEMORY_FRACTION = 0.8
"""Fraction of the free memory for micro-batches; rows of other lengths fragment the rest."""
MOMENTS_PER_PARAMETER = 2
"""Tensors of a parameter's size that the optimizer allocates in the first step, after the probe."""


@dataclass(frozen=True)
class MemoryPeak:
    """Peak memory of a forward and backward pass."""

    tokens: int
    bytes: int | None
    """Peak of allocated bytes, with weights and gradients; None if the micro-batch did not fit."""


def tokens_from_peaks(small: MemoryPeak, large: MemoryPeak, usable_bytes: float) -> int:
    """Tokens of the largest micro-batch that fits into `usable_bytes`, by the line through both peaks. Pure."""
    tokens: float
    if small.bytes is None:
        tokens = small.tokens // 4
    elif large.bytes is None:
        tokens = small.tokens
    elif large.tokens > small.tokens and large.bytes > small.bytes:
        slope = (large.bytes - small.bytes) / (large.tokens - small.tokens)
        tokens = large.tokens + (usable_bytes - large.bytes) / slope
    else:  # a single row is as long as both: attribute all memory to its tokens
        tokens = large.tokens * usable_bytes / large.bytes
    return int(min(MAX_TOKENS, max(MIN_TOKENS, tokens // TOKEN_MULTIPLE * TOKEN_MULTIPLE)))


def cap_for_pipeline(max_tokens: int, tokens: float, num_micro_batches: int) -> int:
    """Largest number of tokens, at most `max_tokens`, that splits `tokens` of a step into `num_micro_batches`."""
    if num_micro_batches <= 1:
        return max_tokens
    return min(max_tokens, max(MIN_TOKENS, math.ceil(tokens / num_micro_batches)))


def longest_rows(store: Store, task: Task, tokens: int, teacher: str | None = None) -> TokenBatch:
    """The longest training rows with `tokens` tokens together, repeated if all have fewer: with padding inside
    attention they take the most memory."""
    lengths = store.column("train", "length")
    max_rows = min(tokens, len(lengths))  # a row has at least one token; sorting all of 10^8 rows would take seconds
    longest = np.argpartition(lengths, len(lengths) - max_rows)[len(lengths) - max_rows :]
    order = longest[np.argsort(-lengths[longest], kind="stable")]
    sums = np.cumsum(lengths[order], dtype=np.int64)
    rounds, rest = divmod(tokens, int(sums[-1]))
    count = int(np.searchsorted(sums, rest)) + 1 if rest else 0
    positions = np.tile(order, rounds + 1)[: rounds * len(order) + count]
    rows = store.read_tokens("train", positions)
    if teacher is not None:
        rows = replace(rows, teacher_logits=store.teacher_logits(teacher, positions))
    return task.prepare(rows, store.manifest.head, 0, 0)


def probe_sizes(small: MemoryPeak, large: MemoryPeak, usable_bytes: float) -> tuple[int, int]:
    """Tokens of the two probing micro-batches from the estimated peaks of two others: an eighth and a half of the
    tokens that would fit, so that an estimate of half of the truth still fits. Pure."""
    fitting_tokens = tokens_from_peaks(small, large, usable_bytes)
    small_tokens = max(MIN_TOKENS, fitting_tokens // 8)
    return small_tokens, max(2 * small_tokens, fitting_tokens // 2)


def available_bytes(network: "torch.nn.Module") -> float:
    """Bytes of the network's GPU, or of this process's share of it, that micro-batches may use: free memory without the
    future state of the optimizer. The network's weights are already allocated."""
    import torch

    device = next(network.parameters()).device
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    process_fraction = torch.cuda.get_per_process_memory_fraction(device)
    trained_bytes = sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)
    usable_bytes = MEMORY_FRACTION * min(free + reserved, process_fraction * total)
    return usable_bytes - MOMENTS_PER_PARAMETER * trained_bytes


def probe(
    network: "torch.nn.Module",
    loss: step.Loss,
    make_rows: Callable[[int], TokenBatch],
    pad_id: int,
    precision: str,
    probe_tokens: tuple[int, int] = PROBE_TOKENS,
) -> int:
    """Measure the tokens of a micro-batch that fits on the network's GPU. The network has no gradients before and
    after.

    Args:
        make_rows: Makes the rows of a micro-batch with a number of tokens.
        probe_tokens: Tokens of the two probing micro-batches.
    """
    import torch

    device, usable_bytes = next(network.parameters()).device, available_bytes(network)
    network.train()

    def measure_peak(tokens: TokenBatch) -> MemoryPeak:
        torch.cuda.reset_peak_memory_stats(device)
        num_tokens = int(tokens.window_lengths.sum())
        try:
            forward_backward(network, loss, tokens, pad_id, precision)
        except torch.OutOfMemoryError:
            return MemoryPeak(num_tokens, None)
        return MemoryPeak(num_tokens, torch.cuda.max_memory_allocated(device))

    small, large = (make_rows(tokens) for tokens in probe_tokens)
    measure_peak(small)  # so that gradients and library workspaces exist when the next micro-batch is measured
    max_tokens = tokens_from_peaks(measure_peak(small), measure_peak(large), usable_bytes)
    network.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return max_tokens


def forward_backward(
    network: "torch.nn.Module", loss: step.Loss, tokens: TokenBatch, pad_id: int, precision: str
) -> None:
    """A forward and backward pass like a step's, for its memory."""
    loss(step.forward(network, tokens, pad_id, precision, loss.logit_positions(tokens)), tokens).sum().backward()


TIMED_MICRO_BATCHES = 3
"""Number of timed micro-batches. A micro-batch of a second is long compared with the time slices of a shared core."""
SPEED_LEVELS = 16
"""Speeds are rounded to multiples of the fastest speed over this number, so equal workers stay equal."""


def time_micro_batches(
    network: "torch.nn.Module", loss: step.Loss, tokens: TokenBatch, pad_id: int, precision: str
) -> float:
    """Median seconds of some micro-batches, forward and backward. The network has no gradients before and after."""
    import torch

    device, durations = next(network.parameters()).device, []
    network.train()
    for _ in range(TIMED_MICRO_BATCHES):
        start = time.perf_counter()
        forward_backward(network, loss, tokens, pad_id, precision)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    network.zero_grad(set_to_none=True)
    return statistics.median(durations)


def relative_speeds(seconds: Sequence[float]) -> list[float]:
    """Relative speeds from the seconds of equal work: the fastest is 1, the others are rounded and positive."""
    fastest = min(seconds)
    return [max(1, round(SPEED_LEVELS * fastest / value)) / SPEED_LEVELS for value in seconds]
