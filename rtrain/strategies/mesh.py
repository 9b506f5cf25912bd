"""Workers in a grid: replicas one way, and the workers that share one replica the other way."""

from typing import TYPE_CHECKING

from rtrain.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS, TENSOR, PIPELINE = "replicas", "tensor", "pipeline"
WITHIN = (TENSOR, PIPELINE)
"""By what the workers of a replica are told apart; the settings that say how many they are have these names."""


def grid(size: int, device: str, along: str = TENSOR) -> "DeviceMesh":
    """All workers as [replicas, `along`], `size` of them each; those of a replica have neighbouring ranks. Called on
    every worker.

    Its groups are new ones: through the group of all workers, ranks tell each other at any time that they go on.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    workers = dist.get_world_size()
    if workers % size:  # fewer workers than asked for: there were fewer GPUs
        raise ConfigError([Problem(f"train.{along}", size, f"it does not divide the {workers} workers", "write 1")])
    ranks = torch.arange(workers).view(-1, size)
    groups = [_own(lines.tolist()) for lines in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(REPLICAS, along))


def ends(grid: "DeviceMesh") -> "dist.ProcessGroup | None":
    """The first and the last worker of this worker's replica; None for one between. Called on every worker."""
    return _made([[line[0], line[-1]] for line in grid.mesh.tolist()]).get(True)


def _own(lines: list[list[int]]) -> "dist.ProcessGroup":
    """The group of this worker's line."""
    return _made(lines)[True]


def _made(lines: list[list[int]]) -> "dict[bool, dist.ProcessGroup]":
    """The group of this worker's line, if it is in any, as True; every worker makes all groups."""
    import torch.distributed as dist

    return {dist.get_rank() in line: dist.new_group(line) for line in lines}
