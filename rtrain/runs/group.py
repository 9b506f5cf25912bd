"""A worker group: Ray Train's TorchTrainer as rtrain starts it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain import env, ray_internals
from rtrain.network.device import backend

if TYPE_CHECKING:
    import ray.train

JOIN_S = 120
"""Seconds that workers wait for each other, at least: when they start, one may import torch on a busy machine."""
PLACEMENT_S = 15.0
"""Seconds that an elastic worker group waits for its CPUs; starting its processes is not counted."""


def trainer(
    train_function: Callable[[], None],
    workers: int,
    storage: Path,
    *,
    stall_s: float = 300.0,
    elastic: bool = False,
    device: str = "cpu",
    callbacks: Sequence[Any] = (),
) -> "ray.train.torch.TorchTrainer":
    """A worker group that runs `train_function`, each worker with a CPU or, where `device` is `gpu`, a GPU.

    `stall_s`: seconds after which a worker process that does not answer is taken for dead. A group that cannot be
    placed ends with an error after Ray's own minute; an `elastic` one sooner, for its number of workers to be chosen
    anew: a node that has just vanished is still counted for some seconds.
    """
    import ray.train
    import ray.train.torch

    env.set_limits(stall_s, PLACEMENT_S if elastic else None)
    number = len(list(storage.iterdir())) if storage.is_dir() else 0
    trainer: ray.train.torch.TorchTrainer = ray_internals.torch_trainer()(
        train_function,
        torch_config=ray.train.torch.TorchConfig(backend=backend(device), timeout_s=int(max(stall_s, JOIN_S))),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=device == "gpu"),
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
