"""Device mesh, and model parallelism on it: a replica on several workers, which all have its rows and a part of its
weights.

The mesh has the replicas along one axis, and the workers of a replica along the others.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.config import TrainConfig
from rtrain.core.errors import ConfigError, Problem
from rtrain.parallel import collectives, dtensor_utils, fsdp, tensor
from rtrain.parallel.base import EventLogger, Strategy, ignore_event
from rtrain.parallel.profiler import COMM_WAIT
from rtrain.parallel.watchdog import Watchdog
from rtrain.parallel.zero import MOMENT_KEYS, STEP_BYTES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS = "replicas"
TENSOR, PIPELINE, CONTEXT = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
REPLICA_AXES = (PIPELINE, CONTEXT, TENSOR)
"""Axes within a replica, in the order of the mesh; they have the names of the settings of their sizes."""


class ModelParallelStrategy(Strategy):
    """A part of the weights on each worker: tensor parallelism within a replica, ZeRO stages 2 and 3 between replicas.

    All workers of a replica compute the same rows. Weights that they all have, such as normalizations, get the same
    gradient on all of them. So gradients are synchronized between the workers of other replicas that have the same
    part.
    """

    def __init__(
        self,
        module: "torch.nn.Module",
        train: TrainConfig,
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        device: "torch.device | None" = None,
    ):
        """Initialize the strategy.

        Args:
            log_event: Logs the size of the optimizer's state on each worker.
            device: The training device, if the network is not on it; its parts are moved once they are sharded.
        """
        self._device = device or dtensor_utils.module_device(module)
        self._mesh = make_mesh({name: getattr(train, name) for name in REPLICA_AXES}, self._device.type)
        super().__init__(module, watchdog, log_event, self._mesh.get_group(REPLICAS))
        self._replica_group = replica_group(self._mesh)
        self._has_tensor_axis = train.tensor_parallel_size > 1
        self.drop_absent_layers(module)
        if self._has_tensor_axis:
            tensor.parallelize_layers(module, self._mesh[TENSOR], train.sequence_parallel)
        self._shards: fsdp.ShardedModules | None = None
        if train.zero_stage > 1 and self.is_distributed:
            self._shards = fsdp.ShardedModules(
                module, self._mesh[REPLICAS], self.timeline, shard_weights=train.zero_stage == 3
            )
        elif device is not None:  # `fully_shard` moves the shards
            dtensor_utils.move_module(module, device)

    def drop_absent_layers(self, module: Any) -> None:
        """Drop the parts of the network that other workers of the replica have, before the rest is sharded."""

    def make_optimizer(self, build: Any) -> "torch.optim.Optimizer":
        import torch
        import torch.distributed as dist

        local_tensors = [
            dtensor_utils.local_tensor(parameter)
            for parameter in self.module.parameters()
            if parameter.requires_grad and dtensor_utils.is_materialized(parameter)
        ]
        sizes = torch.zeros(self.num_workers, dtype=torch.int64)
        sizes[dist.get_rank()] = sum(len(MOMENT_KEYS) * local.nbytes + STEP_BYTES for local in local_tensors)
        dist.all_reduce(sizes)
        self._log_event("optimizer_sharding", state_bytes=sizes.tolist())
        return super().make_optimizer(build)

    def count_micro_batches(self, num_filled: int) -> int:
        return super().count_micro_batches(self.max_in_lockstep(num_filled))

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        if self._shards is not None:
            self._shards.start_micro_batch(is_last)
        # The timeline shows the waits for the collectives of this worker's replica.
        with (
            torch_internals.wrap_collective_waits(lambda: self.timeline.span(COMM_WAIT))
            if self._has_tensor_axis
            else contextlib.nullcontext()
        ):
            yield
            if is_last and self.is_distributed and self._shards is None:
                with self.timeline.span(COMM_WAIT):
                    collectives.all_reduce_sum(
                        [dtensor_utils.local_tensor(gradient) for gradient in self.local_gradients()], self._group
                    )
                self.scale_gradients(1.0 / self.num_replicas)

    def replica_max(self, value: int) -> int:
        return value if self._replica_group is None else collectives.all_reduce_max(value, self._replica_group)

    def max_in_lockstep(self, value: int) -> int:
        """The maximum over all replicas if each micro-batch is a collective of them; otherwise the value itself."""
        return value if self._shards is None else collectives.all_reduce_max(value, self._group)

    @contextlib.contextmanager
    def evaluation_micro_batches(self, num_micro_batches: int) -> Iterator[int]:
        try:
            yield self.max_in_lockstep(num_micro_batches) - num_micro_batches
        finally:
            if self._shards is not None:
                self._shards.reshard()

    def any_failed(self, has_failed: bool) -> bool:
        return bool(self.max_in_lockstep(self.replica_max(int(has_failed))))

    def gather_full_tensors(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        for name, sharded in tensors.items():
            self.watchdog.heartbeat()
            full = dtensor_utils.full_tensor(sharded)
            if collectives.is_rank_zero():
                yield name, full


def make_mesh(sizes: Mapping[str, int], device: str) -> "DeviceMesh":
    """Make the mesh of all workers: [replicas, each of `REPLICA_AXES` with a size above 1]; workers of a replica have
    neighboring ranks. Called on every worker. `sizes`: the size of each axis, by name.

    The process groups are new ones, because ranks send heartbeats through the group of all workers at any time.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    workers = dist.get_world_size() if dist.is_initialized() else 1
    replica_sizes = {name: sizes[name] for name in REPLICA_AXES if sizes.get(name, 1) > 1}
    replica_size = math.prod(replica_sizes.values())
    if workers % replica_size:  # fewer workers than requested, because there were fewer GPUs
        (name, size), *_ = replica_sizes.items()
        reason = f"{replica_size} workers share a replica, and there are {workers}"
        raise ConfigError([Problem(f"train.{name}", size, reason, "write 1", code="not_divisible")])
    ranks = torch.arange(workers).view(-1, *replica_sizes.values())
    groups = [_make_groups(_lines_along(ranks, axis))[True] for axis in range(ranks.dim())]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(REPLICAS, *replica_sizes))


def replica_group(device_mesh: "DeviceMesh") -> "dist.ProcessGroup | None":
    """All workers of this worker's replica; None for a replica of one worker. Called on every worker."""
    if device_mesh.ndim < 3:
        return device_mesh.get_group(1) if device_mesh.ndim == 2 else None
    return _make_groups(device_mesh.mesh.flatten(1).tolist())[True]


def first_and_last_group(device_mesh: "DeviceMesh") -> "dist.ProcessGroup | None":
    """The workers with the first and the last stage of this worker's pipeline; None for other stages. Called on every
    worker."""
    names = device_mesh.mesh_dim_names
    assert names is not None
    lines = _lines_along(device_mesh.mesh, names.index(PIPELINE))
    return _make_groups([[line[0], line[-1]] for line in lines]).get(True)


def _lines_along(ranks: "torch.Tensor", axis: int) -> list[list[int]]:
    lines: list[list[int]] = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    return lines


def _make_groups(lines: list[list[int]]) -> "dict[bool, dist.ProcessGroup]":
    """The group of this worker's line, if it is in any, under the key True; every worker makes all groups."""
    import torch.distributed as dist

    return {dist.get_rank() in line: dist.new_group(line) for line in lines}
