"""The ways in which a model may lie on a run's workers, the cheapest first: those that exchange and compute least."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rtrain.config import Recipe, Train
from rtrain.parallel import constraints

STRATEGIES: Final[Mapping[str, str]] = {
    "ddp": "each worker has all weights, gradients and moments",
    "zero1": "each worker has the moments of its share of the weights",
    "zero2": "each worker has the moments and gradients of its share of the weights",
    "zero3": "each worker has the moments, gradients and weights of its share, and gathers those of layer after layer",
}
"""What the replicas share, by `train.shard`."""
NAMES: Final = tuple(STRATEGIES)


@dataclass(frozen=True)
class Way:
    """A way to hold a model; the names are those of the settings."""

    shard: int = 0
    tensor: int = 1
    gradient_checkpointing: bool = False
    pipeline: int = 1

    @property
    def within(self) -> int:
        """Workers of a replica."""
        return self.tensor * self.pipeline

    @property
    def strategy(self) -> str:
        """What the replicas share: one of `STRATEGIES`."""
        return NAMES[self.shard]

    @property
    def settings(self) -> dict[str, Any]:
        """What of a recipe asks for it, by dotted name."""
        cut = {f"train.{name}": size for name, size in self._cut.items()}
        return {"train.shard": self.shard, **cut, "train.gradient_checkpointing": self.gradient_checkpointing}

    @property
    def _cut(self) -> dict[str, int]:
        return {name: size for name in ("tensor", "pipeline") if (size := getattr(self, name)) > 1}

    def __str__(self) -> str:
        cut = "".join(f" and {name}={size}" for name, size in self._cut.items())
        return f"shard={self.shard}{cut}{' with recomputed layers' if self.gradient_checkpointing else ''}"

    def of(self, train: Train, workers: int) -> Train:
        """The section with these settings, for so many workers."""
        least = None if train.min_workers is None else min(train.min_workers, workers)
        told = {name.removeprefix("train."): value for name, value in self.settings.items()}
        return train.model_copy(
            update={
                **{"strategy": "manual", "tensor": self.tensor, "pipeline": self.pipeline},
                **{**told, "workers": workers, "min_workers": least},
            }
        )


def joined(ways: Sequence[Way]) -> Way:
    """The way that takes no more memory than any of these: as many shares as the most, layers recomputed where one
    does."""
    again, tensor = any(way.gradient_checkpointing for way in ways), max(way.tensor for way in ways)
    return Way(max(way.shard for way in ways), tensor, again)


def own(train: Train, workers: int) -> Way:
    """The way that the settings ask for."""
    return Way(train.shard if workers > 1 else 0, train.tensor, train.gradient_checkpointing, train.pipeline)


def gives_back(train: Train) -> bool:
    """Whether blocks of many sizes come and go in an update, as gathered weights, cut layers and layers that are
    computed again do: then a worker returns what it has freed (`env.freed_goes_back`), which would else be holes."""
    cut = train.tensor > 1 or train.pipeline > 1 or train.gradient_checkpointing
    return cut or (train.shard > 1 and train.workers > 1)


def ordered(workers: int) -> Iterator[Way]:
    """Shares cost exchanges in each pass from the second stage on; layers that are computed again, a third of a pass;
    layers that are cut, exchanges within each of them. A pipeline is a recipe's own choice alone."""
    shards = range(len(NAMES)) if workers > 1 else (0,)
    for again in (False, True):
        yield from (Way(shard, gradient_checkpointing=again) for shard in shards)
    for tensor in range(2, workers + 1):
        if workers % tensor == 0:
            for again in (False, True):
                yield from (Way(shard, tensor, again) for shard in ((0, 3) if workers > tensor else (0,)))


def possible(recipe: Recipe, folder: Path, workers: int) -> Iterator[Way]:
    """Those of `ordered` that neither the recipe nor the model in `folder` forbids. Layers are computed again in all of
    them where the recipe says so."""
    for way in ordered(workers):
        asked = recipe.model_copy(update={"train": way.of(recipe.train, workers)})
        again = way.gradient_checkpointing or not recipe.train.gradient_checkpointing
        if again and not constraints.problems(asked, folder):
            yield way


def beginning_with(chosen: Way, ways: Iterator[Way]) -> Iterator[Way]:
    """`chosen`, and those that come after it."""
    yield chosen
    found = list(ways)
    yield from found[found.index(chosen) + 1 :] if chosen in found else found
