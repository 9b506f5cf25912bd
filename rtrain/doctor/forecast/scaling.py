"""How long an update takes on any number of workers, and what share of their time computes. Pure.

An update is k passes on each worker, the exchange of the gradients, and the optimizer's step. The exchange begins in
the last backward pass, as soon as the gradients of the upper layers are there: what is hidden behind it costs nothing,
but the last bucket, of the lowest layers, never is. Then the workers wait for the slowest of them.

Workers that have a core each still share the memory of their machine, and workers of which there are more than cores
take turns on them: whatever needs a processor, the exchange by sockets included, then takes as many times as long.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from rtrain.doctor.forecast.links import Fabric

BACKWARD: Final = 2 / 3
"""The backward pass's share of a pass: it has two matrix products for each one of the forward pass."""
FIRST_BUCKET: Final = 1 << 20
BUCKET: Final = 25 * (1 << 20)
"""Bytes of DistributedDataParallel's buckets, by which it sends a gradient from the upper layers to the lowest."""

STEP: Final = 7
"""Bytes that AdamW's step moves for each of the weights' own: it reads weight, gradient and two moments, and writes all
but the gradient."""


@dataclass(frozen=True)
class Compute:
    """One worker's own work, of one model, one precision and one kind of processor."""

    step_s: float
    """Seconds of an update whatever its rows: the optimizer, and what surrounds it."""
    pass_s: float
    """Seconds of a pass of `micro_batch` rows, of the rows' mean length."""
    spread: float = 0.0
    """Standard deviation of a pass's logarithm, from pass to pass and worker to worker."""
    calls_s: float = 0.0
    """Those seconds of a pass that its tokens do not change: operators are called, whatever they compute."""

    def seconds(self, passes: float) -> float:
        """Seconds of an update of so many passes, without any exchange."""
        return self.step_s + passes * self.pass_s


def between(first: tuple[float, float], second: tuple[float, float], spread: float = 0.0) -> Compute:
    """The work by which two updates, of (passes, seconds), took as long as they did."""
    (few, short), (many, long) = sorted([first, second])
    pass_s = max(0.0, (long - short) / (many - few))
    return Compute(max(0.0, short - few * pass_s), pass_s, spread)


def by_length(compute: Compute, was: "Work", other: "Work", passes: int, seconds: float) -> Compute:
    """The same work, of whose passes it is told what their tokens do not change: by an update of so many passes of
    `other` rows, which took so many seconds."""
    a_pass = (seconds - compute.step_s) / passes
    rate = (compute.pass_s - a_pass) / (was.flops - other.flops)
    return replace(compute, calls_s=min(max(0.0, compute.pass_s - rate * was.flops), compute.pass_s))


@dataclass(frozen=True)
class Work:
    """What is the same of a model wherever it is trained."""

    flops: float
    """Operations of a forward and backward pass of `micro_batch` rows."""
    gradient: float
    """Bytes that are exchanged in an update."""
    weights: float
    """Bytes of the weights that the optimizer steps."""
    messages: int = 1
    """Sums of which an exchange is made, one after another: each has its latency."""
    layers: int = 1


@dataclass(frozen=True)
class Parted:
    """How a model lies on workers, as far as an update's time goes. This one is the whole model on each worker."""

    parts: int = 1
    """Workers of a replica."""
    step_shares: int = 1
    """Workers that share the optimizer's step."""
    summed: float | None = None
    """Bytes that each worker sums at an update's end with its like in other replicas; None for `Work.gradient`."""
    beside_s: float = 0.0
    """Seconds of an update in which weights are gathered and gradients shared out: on a GPU beside the passes."""
    still_s: float = 0.0
    """Seconds of an update for which a worker stands still for what else is sent."""
    bubble: float = 0.0
    """Seconds for which a stage waits for an update's first and last passes, over those in which it computes."""


WHOLE: Final = Parted()


@dataclass(frozen=True)
class Host:
    """The processor that the workers of a machine share."""

    cores: int
    full: Compute
    """A worker's own work while as many workers as cores train together. They share the memory's bandwidth and a cache,
    and an update that is exchanged is laid out in buckets first."""
    eviction: float = 0.0
    """By what share an update takes longer for each further worker of a core: they evict each other's caches."""

    def shared(self, workers: int) -> float:
        """How many times as long all takes that needs a core, which workers take in turns."""
        turns = max(1.0, workers / self.cores)
        return turns * (1.0 + self.eviction * (turns - 1.0))

    def evicting(self, workers: int, foretold: float, seconds: float) -> "Host":
        """The same, by an update of more workers than cores that took so many seconds, where so many were foretold."""
        return replace(self, eviction=max(0.0, seconds / foretold - 1.0) / (workers / self.cores - 1.0))

    def compute(self, alone: Compute, workers: int) -> Compute:
        """The work of one of so many workers, of which one that is alone has `alone`: between both in proportion to the
        cores that are taken, and as many times as long as a core has workers."""
        others = (min(workers, self.cores) - 1) / max(1, self.cores - 1)
        turns = self.shared(workers)
        step_s, pass_s = (
            turns * (few + others * (many - few))
            for few, many in ((alone.step_s, self.full.step_s), (alone.pass_s, self.full.pass_s))
        )
        # Workers that take turns on a core wait for nobody: another one computes meanwhile.
        return Compute(step_s, pass_s, alone.spread if turns == 1.0 else 0.0)


def carried(compute: Compute, was: Work, new: Work) -> Compute:
    """The work of another model or of rows of another length on the same processor: passes follow the products, and
    what these do not change the layers; the step follows the weights."""
    calls_s = compute.calls_s * new.layers / was.layers
    pass_s = calls_s + (compute.pass_s - compute.calls_s) * new.flops / was.flops
    return Compute(compute.step_s * new.weights / was.weights, pass_s, compute.spread, calls_s)


@dataclass(frozen=True)
class Update:
    """Seconds of an update."""

    workers: int
    passes: float
    compute_s: float
    """The work of one worker that waits for nobody."""
    exchange_s: float
    exposed_s: float
    """Seconds of the exchange for which nothing is computed."""
    waiting_s: float
    """Seconds for which a worker waits for the slowest one, on average, and a stage of a pipeline for the others."""

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exposed_s + self.waiting_s

    @property
    def efficiency(self) -> float:
        """The share of the workers' time in which they compute."""
        return self.compute_s / self.seconds


def update(
    compute: Compute,
    work: Work,
    fabric: Fabric,
    workers: int,
    passes: float = 1.0,
    *,
    hides: bool = True,
    host: Host | None = None,
    parted: Parted = WHOLE,
) -> Update:
    """An update of `passes` on each replica, on so many `workers`. `hides`: the exchange goes on beside the last
    backward pass; on the CPUs that also compute, as with Gloo, it does not. `host`: the one machine that all workers
    share; without it each computes as one that is alone. `parted`: how the model lies on them."""
    own, shared = (host.compute(compute, workers), host.shared(workers)) if host else (compute, 1.0)
    own = Compute(own.step_s / parted.step_shares, own.pass_s / parted.parts, own.spread)
    replicas, size = workers // parted.parts, work.gradient if parted.summed is None else parted.summed
    computing = own.pass_s * passes
    messages = (work.messages - 1) * fabric.seconds(0.0, workers)
    summed = shared * (fabric.seconds(size, replicas, parted.parts) + messages)
    last = shared * fabric.seconds(last_bucket(size), replicas, parted.parts)
    hidden = BACKWARD * own.pass_s * min(1.0, passes) if hides else 0.0
    exposed = min(summed, max(last, summed - hidden))
    exposed += shared * parted.still_s + max(0.0, shared * parted.beside_s - (computing if hides else 0.0))
    exchange = summed + shared * (parted.still_s + parted.beside_s)
    waiting = computing * (slowest(workers, max(1, round(passes)), own.spread) - 1.0 + parted.bubble)
    return Update(workers, passes, own.seconds(passes), exchange, exposed, waiting)


def last_bucket(size: float) -> float:
    """Bytes of the last bucket of a gradient of so many: what the full ones before it leave."""
    if size <= FIRST_BUCKET:
        return size
    return (size - FIRST_BUCKET) % BUCKET or float(BUCKET)


def curve(
    compute: Compute,
    work: Work,
    fabric: Fabric,
    workers: Iterable[int],
    passes: float = 1.0,
    *,
    hides: bool = True,
    parted: Callable[[int], Parted] = lambda workers: WHOLE,
) -> list[Update]:
    """An update by number of workers, each of which does as much as ever: more workers, more rows. `parted`: how the
    model lies on so many."""
    return [update(compute, work, fabric, number, passes, hides=hides, parted=parted(number)) for number in workers]


# ------------------------------------------------------------------------------------------------------- the slowest


MOST_NUMBERS: Final = 1 << 22
"""Numbers that are drawn at most: fewer rounds for more workers."""
ROUNDS: Final = 2000


@lru_cache(maxsize=256)
def slowest(workers: int, passes: int, spread: float, seed: int = 0) -> float:
    """Mean over updates of the slowest worker's seconds, divided by the mean of a worker's.

    A worker's update is the sum of `passes`, each of which is drawn by itself: its logarithm is normal, with the
    standard deviation `spread`. What makes one worker slower for good is none of it.
    """
    if workers < 2 or spread <= 0:
        return 1.0
    generator = np.random.Generator(np.random.SFC64(seed))
    passes = min(passes, 64)  # more hardly spread
    rounds = max(20, min(ROUNDS, MOST_NUMBERS // (workers * passes)))
    mean = math.exp(spread * spread / 2)
    found = 0.0
    for _ in range(rounds):
        sums = np.exp(spread * generator.standard_normal((workers, passes), dtype=np.float32)).sum(axis=1)
        found += float(sums.max())
    return max(1.0, found / rounds / (passes * mean))


# ------------------------------------------------------------------------------------------------- a published table


@dataclass(frozen=True)
class Epochs:
    """A training told by its minutes alone: an epoch of 1 and of 2 workers gives the work and what exchanges cost."""

    compute: float
    """Minutes of one worker."""
    exchanges: float
    """Exchanges of one worker's epoch; n workers make 1/n as many, each of as many bytes."""
    bytes_min: float
    """Minutes in which the gradients of one exchange pass through the wires once."""
    step_min: float
    """Minutes of a step of the ring."""

    def minutes(self, workers: int) -> float:
        steps = 2 * (workers - 1)
        each = steps * (self.step_min + self.bytes_min / workers)
        return self.compute / workers + self.exchanges / workers * each


def of_epochs(one: float, two: float, exchanges: float, step_s: float) -> Epochs:
    """The model that gives these minutes on one worker and on two, where a ring's step takes `step_s`, which is known
    beforehand. Raises `ValueError` where two workers lose less than that."""
    step_min = step_s / 60
    each = (two - one / 2) / (exchanges / 2)  # of an exchange of two: 2 steps, of half the bytes each
    bytes_min = each - 2 * step_min
    if bytes_min < 0:
        raise ValueError(f"two workers lose {each * 60:.6f} s an exchange, less than the steps alone take")
    return Epochs(one, exchanges, bytes_min, step_min)
