"""Workers in a grid: replicas along one axis, and along the others the workers that share one replica."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS, TENSOR, PIPELINE, CONTEXT = "replicas", "tensor", "pipeline", "context"
WITHIN = (PIPELINE, CONTEXT, TENSOR)
"""Along what the workers of a replica are told apart, in the order of the grid's axes; the settings that say how many
they are have these names."""


def grid(sizes: Mapping[str, int], device: str) -> "DeviceMesh":
    """All workers as [replicas, along each of `WITHIN` of which there are several]; those of a replica have
    neighbouring ranks. Called on every worker. `sizes`: how many there are along each, by name.

    Its groups are new ones: through the group of all workers, ranks tell each other at any time that they go on.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    workers = dist.get_world_size() if dist.is_initialized() else 1
    within = {name: sizes[name] for name in WITHIN if sizes.get(name, 1) > 1}
    if workers % (whole := math.prod(within.values())):  # fewer workers than asked for: there were fewer GPUs
        (name, size), *_ = within.items()
        reason = f"{whole} workers share a replica, and there are {workers}"
        raise ConfigError([Problem(f"train.{name}", size, reason, "write 1", code="not_divisible")])
    ranks = torch.arange(workers).view(-1, *within.values())
    groups = [_own(_along(ranks, axis)) for axis in range(ranks.dim())]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(REPLICAS, *within))


def replica(grid: "DeviceMesh") -> "dist.ProcessGroup | None":
    """All workers of this worker's replica; None where it has one alone. Called on every worker."""
    if grid.ndim < 3:
        return grid.get_group(1) if grid.ndim == 2 else None
    return _own(grid.mesh.flatten(1).tolist())


def ends(grid: "DeviceMesh") -> "dist.ProcessGroup | None":
    """The workers of this worker's line that have the first stage and the last; None for one between. Called on every
    worker."""
    names = grid.mesh_dim_names
    assert names is not None
    lines = _along(grid.mesh, names.index(PIPELINE))
    return _made([[line[0], line[-1]] for line in lines]).get(True)


def _along(ranks: "torch.Tensor", axis: int) -> list[list[int]]:
    """The lines of a grid along an axis."""
    found: list[list[int]] = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    return found


def _own(lines: list[list[int]]) -> "dist.ProcessGroup":
    """The group of this worker's line."""
    return _made(lines)[True]


def _made(lines: list[list[int]]) -> "dict[bool, dist.ProcessGroup]":
    """The group of this worker's line, if it is in any, as True; every worker makes all groups."""
    import torch.distributed as dist

    return {dist.get_rank() in line: dist.new_group(line) for line in lines}
