"""Device mesh: replicas along one axis, and the workers of a replica along the others."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS, TENSOR, PIPELINE, CONTEXT = (
    "replicas",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)
REPLICA_AXES = (PIPELINE, CONTEXT, TENSOR)
"""Axes within a replica, in the order of the mesh; they have the names of the settings of their sizes."""


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
    if workers % (
        replica_size := math.prod(replica_sizes.values())
    ):  # fewer workers than requested, because there were fewer GPUs
        (name, size), *_ = replica_sizes.items()
        reason = f"{replica_size} workers share a replica, and there are {workers}"
        raise ConfigError([Problem(f"train.{name}", size, reason, "write 1", code="not_divisible")])
    ranks = torch.arange(workers).view(-1, *replica_sizes.values())
    groups = [_local_group(_lines_along(ranks, axis)) for axis in range(ranks.dim())]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(REPLICAS, *replica_sizes))


def replica_group(device_mesh: "DeviceMesh") -> "dist.ProcessGroup | None":
    """All workers of this worker's replica; None for a replica of one worker. Called on every worker."""
    if device_mesh.ndim < 3:
        return device_mesh.get_group(1) if device_mesh.ndim == 2 else None
    return _local_group(device_mesh.mesh.flatten(1).tolist())


def first_and_last_group(device_mesh: "DeviceMesh") -> "dist.ProcessGroup | None":
    """The workers with the first and the last stage of this worker's pipeline; None for other stages. Called on every
    worker."""
    names = device_mesh.mesh_dim_names
    assert names is not None
    lines = _lines_along(device_mesh.mesh, names.index(PIPELINE))
    return _make_groups([[line[0], line[-1]] for line in lines]).get(True)


def _lines_along(ranks: "torch.Tensor", axis: int) -> list[list[int]]:
    """The lines of a mesh along an axis."""
    lines: list[list[int]] = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    return lines


def _local_group(lines: list[list[int]]) -> "dist.ProcessGroup":
    """The group of this worker's line."""
    return _make_groups(lines)[True]


def _make_groups(lines: list[list[int]]) -> "dict[bool, dist.ProcessGroup]":
    """The group of this worker's line, if it is in any, under the key True; every worker makes all groups."""
    import torch.distributed as dist

    return {dist.get_rank() in line: dist.new_group(line) for line in lines}
