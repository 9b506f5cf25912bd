"""Worker groups: Ray Train's TorchTrainer as rtrain starts it, for one start of a run or for many."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rtrain import ray_internals
from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.models.device import backend
from rtrain.runs import resource_leases, worker
from rtrain.runs.worker import Start

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

JOIN_S = 120
"""Seconds that workers wait for each other, at least: when they start, one may import torch on a busy machine."""
PLACEMENT_S = 15.0
"""Seconds that an elastic worker group waits for its CPUs; starting its processes is not counted."""


@dataclass(frozen=True)
class Layout:
    """What a worker group is made of."""

    workers: int
    device: str = "cpu"
    """`gpu`: each worker has a GPU; else each has a CPU."""
    stall_s: float = 300.0
    """Seconds after which a worker process that does not answer is taken for dead."""
    elastic: bool = False
    """A group that cannot be placed ends with an error after Ray's own minute; an elastic one sooner, for its number of
    workers to be chosen anew: a node that has just vanished is still counted for some seconds."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Those that a node must have to get workers."""
    asked: bool = False
    """The run itself asks an autoscaler for the workers, and Ray Train does not."""
    share: float = 1.0
    """The part of a GPU that each worker has."""


class Workers(Protocol):
    """Worker processes for the starts of runs."""

    def taken(self, run: Run) -> None:
        """The starts that come are those of `run`: the CPUs or GPUs that are held are its own."""
        ...

    def train(self, start: Start, layout: Layout) -> None:
        """Make one start of a run, to its end. Raises what Ray Train raises where a worker fails."""
        ...

    def lost(self, run: Run) -> None:
        """The last start of `run` failed, or nodes go or come: the next start gets new processes."""
        ...

    def left(self, run: Run) -> None:
        """No further start of `run` is made now."""
        ...


class Fresh:
    """New worker processes for each start."""

    def taken(self, run: Run) -> None:
        pass

    def train(self, start: Start, layout: Layout) -> None:
        run = Run(start.run)
        trainer(partial(worker.run, start), layout, run.ray, callbacks=[resource_leases.remember(run)]).fit()

    def lost(self, run: Run) -> None:
        resource_leases.release(run)

    def left(self, run: Run) -> None:
        resource_leases.release(run)


def trainer(
    train_function: Callable[[], None], layout: Layout, storage: Path, *, callbacks: Sequence[Any] = ()
) -> "TorchTrainer":
    """A worker group that runs `train_function`, each worker with a CPU or a GPU. `callbacks` are Ray Train's own."""
    import ray.train

    env.set_limits(layout.stall_s, PLACEMENT_S if layout.elastic else None)
    asks = not layout.asked and not ray_internals.is_private()
    number = len(list(storage.iterdir())) if storage.is_dir() else 0
    trainer: TorchTrainer = ray_internals.torch_trainer(asks=asks)(
        train_function,
        torch_config=ray_internals.torch_config(backend(layout.device), int(max(layout.stall_s, JOIN_S))),
        scaling_config=ray.train.ScalingConfig(
            num_workers=layout.workers,
            use_gpu=layout.device == "gpu",
            resources_per_worker={"GPU": layout.share} if layout.device == "gpu" and layout.share < 1 else None,
            label_selector=dict(layout.labels) or None,  # type: ignore[call-arg]
        ),
        # A new name per start: Ray would otherwise load its own snapshot of the last one, which rtrain does not use.
        run_config=ray.train.RunConfig(
            name=f"{number:03d}",
            storage_path=str(storage),
            callbacks=list(callbacks),
            # Ray's controller would try again for ever, and say nothing, whatever kept a group from starting.
            failure_config=ray.train.FailureConfig(controller_failure_limit=0),  # type: ignore[call-arg]
        ),
    )
    return trainer
