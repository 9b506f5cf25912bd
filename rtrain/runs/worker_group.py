"""Worker groups: Ray Train's TorchTrainer with rtrain's settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rtrain import ray_internals
from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.models.device import process_group_backend
from rtrain.runs import resource_leases, worker
from rtrain.runs.worker import WorkerArgs

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

MIN_JOIN_TIMEOUT_S = 120
"""Minimum seconds that starting workers wait for each other: one may import torch on a busy machine."""
ELASTIC_PLACEMENT_TIMEOUT_S = 15.0
"""Seconds that an elastic worker group waits for its placement, without the start of its processes."""


@dataclass(frozen=True)
class WorkerGroupSpec:
    """Size and resources of a worker group."""

    workers: int
    device: str = "cpu"
    """`gpu`: each worker has a GPU; else each has a CPU."""
    hang_timeout_s: float = 300.0
    """Seconds after which an unresponsive worker process counts as dead."""
    is_elastic: bool = False
    """A group that cannot be placed fails after Ray's own minute; an elastic one fails sooner, so that its size is
    chosen again: a lost node is still counted for some seconds."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node needs to get workers."""
    requests_own_nodes: bool = False
    """The run requests the workers from the autoscaler, not Ray Train."""
    gpu_share: float = 1.0
    """The share of a GPU per worker."""


class BaseWorkerGroup(Protocol):
    """Worker processes for the attempts of runs."""

    def acquire(self, run: Run) -> None:
        """Assign the group to `run`: its placement group counts as the run's."""
        ...

    def run_attempt(self, worker_args: WorkerArgs, group_spec: WorkerGroupSpec) -> None:
        """Run one attempt to its end. Raises Ray Train's error if a worker fails."""
        ...

    def discard(self, run: Run) -> None:
        """Drop the processes after a failure or a change of nodes: the next attempt gets new ones."""
        ...

    def release(self, run: Run) -> None:
        """End the assignment to `run`."""
        ...


class FreshWorkerGroup:
    """New worker processes for each attempt."""

    def acquire(self, run: Run) -> None:
        pass

    def run_attempt(self, worker_args: WorkerArgs, group_spec: WorkerGroupSpec) -> None:
        run = Run(worker_args.run)
        make_trainer(
            partial(worker.run_worker, worker_args),
            group_spec,
            run.ray_storage,
            callbacks=[resource_leases.placement_callback(run)],
        ).fit()

    def discard(self, run: Run) -> None:
        resource_leases.release_group(run)

    def release(self, run: Run) -> None:
        resource_leases.release_group(run)


def make_trainer(
    train_function: Callable[[], None], group_spec: WorkerGroupSpec, storage: Path, *, callbacks: Sequence[Any] = ()
) -> "TorchTrainer":
    """Build a trainer that runs `train_function` on each worker. `callbacks`: Ray Train callbacks."""
    import ray.train

    env.set_ray_train_timeouts(
        group_spec.hang_timeout_s, ELASTIC_PLACEMENT_TIMEOUT_S if group_spec.is_elastic else None
    )
    requests_resources = not group_spec.requests_own_nodes and not ray_internals.is_private()
    attempt_number = len(list(storage.iterdir())) if storage.is_dir() else 0
    trainer: TorchTrainer = ray_internals.make_trainer_class(requests_resources=requests_resources)(
        train_function,
        torch_config=ray_internals.make_torch_config(
            process_group_backend(group_spec.device), int(max(group_spec.hang_timeout_s, MIN_JOIN_TIMEOUT_S))
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=group_spec.workers,
            use_gpu=group_spec.device == "gpu",
            resources_per_worker={"GPU": group_spec.gpu_share}
            if group_spec.device == "gpu" and group_spec.gpu_share < 1
            else None,
            label_selector=dict(group_spec.node_labels) or None,  # type: ignore[call-arg]
        ),
        # A new name per attempt: otherwise Ray loads its snapshot of the last one, which rtrain does not use.
        run_config=ray.train.RunConfig(
            name=f"{attempt_number:03d}",
            storage_path=str(storage),
            callbacks=list(callbacks),
            # Ray's controller would retry a failing start for ever, without a message.
            failure_config=ray.train.FailureConfig(controller_failure_limit=0),  # type: ignore[call-arg]
        ),
    )
    return trainer
