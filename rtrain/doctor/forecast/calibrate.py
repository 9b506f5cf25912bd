"""What this machine's workers come to, measured: seconds of exchanges by their size, and of updates by their passes.

The one module here that starts processes and looks at clocks. Each figure is the least of its rounds: whatever else
the machine does only adds to it. The processor's clock counts a process's own work alone, whatever else its core does.
"""

import datetime
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from rtrain.doctor.forecast.links import Link
from rtrain.errors import UserError

SIZES: Final = (1 << 10, 1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
"""Bytes of the exchanges that alpha and the bandwidth are fitted to."""
ROUNDS: Final = 12
LIMIT_S: Final = 120.0


@dataclass(frozen=True)
class Exchanged:
    """Seconds of an exchange of so many bytes, the least of its rounds."""

    size: int
    seconds: float
    processor_s: float = 0.0
    """Those of one worker's processor, over all of its threads."""


def exchanges(
    workers: int, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS, transport: str = "stock"
) -> list[Exchanged]:
    """Means of vectors between processes of this machine: by Gloo, or through `shared_memory` (`exchange.transport`).
    Raises `UserError` where they cannot share any."""
    slowest = on_workers(workers, partial(_exchanges, tuple(sizes), rounds, transport))
    return [
        Exchanged(size, *(max(of[clock] for of in each) for clock in (0, 1)))
        for size, *each in zip(sizes, *slowest, strict=True)
    ]


def _exchanges(sizes: tuple[int, ...], rounds: int, transport: str, rank: int) -> list[tuple[float, float]]:
    import torch
    import torch.distributed as dist

    from rtrain.exchange.transport import Stock, share

    torch.set_num_threads(1)
    world, vectors = dist.get_world_size(), [torch.zeros(size // 4) for size in sizes]
    by = share([max(vectors, key=len)], rank, world, None) if transport == "shared_memory" else Stock(world)
    if isinstance(by, str):
        raise UserError(f"train.transport=shared_memory: {by}")
    least = [(math.inf, math.inf)] * len(sizes)
    for turn in range(rounds + 1):
        for place, vector in enumerate(vectors):
            dist.barrier()
            start, begun = time.perf_counter(), time.process_time()
            by.mean(vector)
            taken, spent = time.perf_counter() - start, time.process_time() - begun
            if turn:  # the first opens connections
                least[place] = min(least[place][0], taken), min(least[place][1], spent)
    return least


def on_workers(workers: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns in each of so many new processes, which are a process group of Gloo. Raises what any of
    them raises."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context) as pool:
            started = [pool.submit(_joined, Path(folder) / "store", rank, workers, work) for rank in range(workers)]
            done, _ = wait(started, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
            return [one.result() for one in started]


def _joined(store: Path, rank: int, workers: int, work: Callable[[int], Any]) -> Any:
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers, timeout=limit)
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()


def by_processor(found: Sequence[Exchanged]) -> list[Exchanged]:
    """The same exchanges as long as a worker's processor has worked for them."""
    return [Exchanged(one.size, one.processor_s, one.processor_s) for one in found]


def fitted(found: Sequence[Exchanged], workers: int, name: str = "measured") -> Link:
    """The link by which a ring of so many workers takes about as long as was measured: a line, seconds over bytes,
    whose relative errors are the least squares. Raises `ValueError` for fewer than two sizes."""
    if len({one.size for one in found}) < 2:
        raise ValueError("a line needs exchanges of two sizes or more")
    # Each point counts by 1 / seconds^2: small exchanges and large ones are as important.
    weights = [1 / one.seconds**2 for one in found]
    total = sum(weights)
    mean_x = sum(weight * one.size for weight, one in zip(weights, found, strict=True)) / total
    mean_y = sum(weight * one.seconds for weight, one in zip(weights, found, strict=True)) / total
    spread = sum(weight * (one.size - mean_x) ** 2 for weight, one in zip(weights, found, strict=True))
    both = sum(
        weight * (one.size - mean_x) * (one.seconds - mean_y) for weight, one in zip(weights, found, strict=True)
    )
    slope = max(both / spread, 1e-15)
    latency = max(mean_y - slope * mean_x, 0.0)
    steps = 2 * (workers - 1)
    return Link(name, 0.0, latency / steps, latency / steps, steps / workers / slope)
