"""The first way to hold a model that fits into the workers' memory. What a way needs is traced and computed when it is
asked for; which one is taken, and why, is pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from rtrain.cluster import capacity
from rtrain.config import Recipe, Train
from rtrain.core.errors import ConfigError, Problem
from rtrain.parallel.layout import Way, gives_back
from rtrain.planning import memory_needs, memory_trace
from rtrain.planning.memory_needs import Need
from rtrain.planning.throughput import PEAK
from rtrain.tasks import base
from rtrain.trainer import batch_size

USABLE: Final = 0.9
"""Share that workers may take of what Ray counts as a node's memory, which is that beside its object store: the driver
and the data tasks have the rest."""
USABLE_GPU: Final = 0.85


@dataclass(frozen=True)
class Pass:
    """The passes of a run's updates."""

    lengths: tuple[int, ...]
    """Tokens of each window of one that takes the most memory."""
    precision: str = "fp32"
    outputs: int = 2
    """Numbers that the head answers with."""
    tokens_of_update: float = 0.0
    """Tokens of all workers' passes in an update."""

    def several(self, replicas: int) -> bool:
        """Whether a replica makes more than one in an update."""
        return self.tokens_of_update / replicas > sum(self.lengths)


def lengths(recipe: Recipe, device: str, longest: int) -> tuple[int, ...]:
    """The windows of a pass that takes the most memory; `longest`: tokens of the longest window."""
    tokens = recipe.train.tokens_per_pass or (batch_size.ON_CPU if device == "cpu" else 4 * batch_size.ON_CPU)
    return (longest,) * max(1, tokens // longest)


def needs(
    recipe: Recipe, folder: Path, ways: Iterable[Way], passes: Pass, workers: int, device: str
) -> Iterator[tuple[Way, Need]]:
    """What each way takes of a worker of its fullest node; one of a pipeline is counted as if it had all layers. Ways
    that the network in `folder` cannot go are left out, unless the recipe asks for them. Raises `Untraceable`."""

    @cache
    def traced(tensor: int, recomputed: bool, more: bool) -> memory_trace.Traced:
        return of_pass(tensor=tensor, recomputed=recomputed, more_passes=more)

    task, own = base.get(recipe.task), recipe.train.gradient_checkpointing
    traced_pass = partial(
        memory_trace.of_pass,
        *(folder, task, recipe.model),
        device=device,
        outputs=passes.outputs,
        precision=passes.precision,
    )
    of_pass = partial(traced_pass, passes.lengths)
    for way in ways:
        replicas = workers // way.within
        several = passes.several(replicas)
        # DistributedDataParallel's buckets have the gradients' memory from the first pass on.
        more = several or (way.within == 1 and workers > 1)
        try:
            found = traced(way.tensor, way.gradient_checkpointing, more)
        except ConfigError:  # a network that cannot compute its layers again
            if own == way.gradient_checkpointing:
                raise
            continue
        settings = way.of(recipe.train, workers)
        need = memory_needs.needed(
            *(found, replicas, way.strategy if replicas > 1 else "ddp"),
            saves=device == "cpu",
            several=several,
            buckets=way.within == 1,
            kept=held(settings, device),
        )
        yield way, need


def held(train: Train, device: str) -> float:
    """What a worker holds for its activations, over those that are alive; see `memory.KEPT`."""
    if device == "gpu":
        return 1.0
    return memory_needs.RETURNED if gives_back(train) else memory_needs.KEPT


@dataclass(frozen=True)
class Room:
    """Memory, where a worker has least of it."""

    bytes: float
    """Those of a node that workers may take, or those of a GPU."""
    workers: int
    """Those that share it; 1 on a GPU."""
    device: str = "cpu"

    def fits(self, need: Need) -> bool:
        return self.taken(need) <= self.bytes

    def taken(self, need: Need) -> float:
        """Bytes of what is there that the workers need; the processes themselves are not on a GPU."""
        return need.total - need.process if self.device == "gpu" else need.of(self.workers)


def room(nodes: Sequence[Mapping[str, float]], device: str, workers: int) -> Room | None:
    """The memory of a node, or of a GPU, by what Ray knows of the nodes; None where it knows nothing of any. A node is
    filled with as many of the workers as it has places for."""
    places = [(node, min(workers, capacity.count([node], device))) for node in nodes]
    found = [one for node, here in places if here for one in _of_node(node, device, here)]
    return min(found, key=lambda one: one.bytes / one.workers, default=None)


def _of_node(node: Mapping[str, float], device: str, workers: int) -> Iterator[Room]:
    if device == "cpu" and "memory" in node:
        yield Room(USABLE * node["memory"], workers)
    if device == "gpu":
        known = [PEAK[kind].gigabytes for kind in capacity.accelerators(node) if kind in PEAK]
        if known:
            yield Room(USABLE_GPU * max(known) * 1e9, 1, device)


@dataclass(frozen=True)
class Choice:
    """A way that fits, and why it is the one."""

    way: Way
    need: Need
    why: str


def first(needs: Iterable[tuple[Way, Need]], room: Room) -> Choice:
    """The first way that fits; no later one is asked for. Raises `ConfigError` where none does."""
    before: tuple[Way, Need] | None = None
    for way, need in needs:
        if room.fits(need):
            why = f"{way}, with which {_told(room, need)}"
            if before is not None:
                why += f"; with {before[0]} it would be {room.taken(before[1]) / 1e6:,.0f}"
            return Choice(way, need, why)
        before = way, need
    assert before is not None  # the whole model on each worker is always a way
    reason = f"even with {before[0]} {_told(room, before[1])}"
    fix = "have fewer workers on a node, or write --set train.tokens_per_pass=512"
    raise ConfigError([Problem("train.strategy", "auto", reason, fix, code="out_of_memory")])


def _told(room: Room, need: Need) -> str:
    who = "a worker takes" if room.workers == 1 else f"a node's {room.workers} workers take"
    return f"{who} {room.taken(need) / 1e6:,.0f} MB of {room.bytes / 1e6:,.0f}"
