"""Parallel layouts of a model on a run's workers, the cheapest in communication and computation first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rtrain.config import Recipe, TrainConfig
from rtrain.parallel import constraints

STRATEGIES: Final[Mapping[str, str]] = {
    "ddp": "each worker has all weights, gradients and moments",
    "zero1": "each worker has the moments of its share of the weights",
    "zero2": "each worker has the moments and gradients of its share of the weights",
    "zero3": "each worker has the moments, gradients and weights of its share, and gathers those of layer after layer",
}
"""Descriptions of `train.zero_stage`, by strategy name."""
STRATEGY_NAMES: Final = tuple(STRATEGIES)


@dataclass(frozen=True)
class ParallelLayout:
    """A parallel layout; the fields have the names of the settings."""

    zero_stage: int = 0
    tensor_parallel_size: int = 1
    gradient_checkpointing: bool = False
    pipeline_parallel_size: int = 1

    @property
    def workers_per_replica(self) -> int:
        """Workers of a replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def strategy(self) -> str:
        """The sharding between replicas: one of `STRATEGIES`."""
        return STRATEGY_NAMES[self.zero_stage]

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe settings of the layout, by dotted name."""
        split_settings = {f"train.{name}": size for name, size in self._split_sizes.items()}
        return {
            "train.zero_stage": self.zero_stage,
            **split_settings,
            "train.gradient_checkpointing": self.gradient_checkpointing,
        }

    @property
    def _split_sizes(self) -> dict[str, int]:
        return {
            name: size
            for name in ("tensor_parallel_size", "pipeline_parallel_size")
            if (size := getattr(self, name)) > 1
        }

    def __str__(self) -> str:
        split_text = "".join(f" and {name}={size}" for name, size in self._split_sizes.items())
        recompute_text = " with recomputed layers" if self.gradient_checkpointing else ""
        return f"zero_stage={self.zero_stage}{split_text}{recompute_text}"

    def apply_to(self, train: TrainConfig, workers: int) -> TrainConfig:
        """The section with these settings, for `workers` workers."""
        min_workers = None if train.min_workers is None else min(train.min_workers, workers)
        settings_by_field = {name.removeprefix("train."): value for name, value in self.settings.items()}
        return train.model_copy(
            update={
                **{
                    "strategy": "manual",
                    "tensor_parallel_size": self.tensor_parallel_size,
                    "pipeline_parallel_size": self.pipeline_parallel_size,
                },
                **{**settings_by_field, "workers": workers, "min_workers": min_workers},
            }
        )


def merge_layouts(layouts: Sequence[ParallelLayout]) -> ParallelLayout:
    """The layout that takes no more memory than any of these: the largest sharding, with recomputed layers if any has
    them."""
    recomputes, tensor_parallel_size = (
        any(way.gradient_checkpointing for way in layouts),
        max(way.tensor_parallel_size for way in layouts),
    )
    return ParallelLayout(max(way.zero_stage for way in layouts), tensor_parallel_size, recomputes)


def layout_from_config(train: TrainConfig, workers: int) -> ParallelLayout:
    """The layout that the settings request."""
    return ParallelLayout(
        train.zero_stage if workers > 1 else 0,
        train.tensor_parallel_size,
        train.gradient_checkpointing,
        train.pipeline_parallel_size,
    )


def should_trim_malloc(train: TrainConfig) -> bool:
    """Whether a step allocates blocks of many sizes, as gathered weights, sharded layers and recomputed layers do. A
    worker then returns freed memory (`env.trim_malloc`), which would otherwise fragment."""
    is_split = train.tensor_parallel_size > 1 or train.pipeline_parallel_size > 1 or train.gradient_checkpointing
    return is_split or (train.zero_stage > 1 and train.workers > 1)


def iter_layouts(workers: int) -> Iterator[ParallelLayout]:
    """Iterate over layouts by cost. ZeRO stages 2 and 3 add a collective to each micro-batch, recomputed layers a third
    of a forward and backward pass, tensor parallelism collectives within each layer. A pipeline is used only if a
    recipe requests it."""
    zero_stages = range(len(STRATEGY_NAMES)) if workers > 1 else (0,)
    for recomputes in (False, True):
        yield from (ParallelLayout(shard, gradient_checkpointing=recomputes) for shard in zero_stages)
    for tensor_parallel_size in range(2, workers + 1):
        if workers % tensor_parallel_size == 0:
            for recomputes in (False, True):
                yield from (
                    ParallelLayout(shard, tensor_parallel_size, recomputes)
                    for shard in ((0, 3) if workers > tensor_parallel_size else (0,))
                )


def iter_valid_layouts(recipe: Recipe, folder: Path, workers: int) -> Iterator[ParallelLayout]:
    """Layouts of `iter_layouts` that the recipe and the model in `folder` allow. All recompute layers if the recipe
    says so."""
    for layout in iter_layouts(workers):
        candidate = recipe.model_copy(update={"train": layout.apply_to(recipe.train, workers)})
        is_allowed_recompute = layout.gradient_checkpointing or not recipe.train.gradient_checkpointing
        if is_allowed_recompute and not constraints.check_parallelism(candidate, folder):
            yield layout


def start_from(layout: ParallelLayout, layouts: Iterator[ParallelLayout]) -> Iterator[ParallelLayout]:
    """`layout`, and the layouts after it."""
    yield layout
    all_layouts = list(layouts)
    yield from all_layouts[all_layouts.index(layout) + 1 :] if layout in all_layouts else all_layouts
