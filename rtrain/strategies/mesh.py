"""Workers in a grid: replicas one way, and the workers that share one replica the other way."""

from typing import TYPE_CHECKING

from rtrain.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS, TENSOR = "replicas", "tensor"


def grid(tensor: int, device: str) -> "DeviceMesh":
    """All workers as [replicas, tensor]; the workers of a replica have neighbouring ranks. Called on every worker.

    Its groups are new ones: through the group of all workers, ranks tell each other at any time that they go on.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    workers = dist.get_world_size()
    if workers % tensor:  # fewer workers than asked for: there were fewer GPUs
        raise ConfigError([Problem("train.tensor", tensor, f"it does not divide the {workers} workers", "write 1")])
    ranks = torch.arange(workers).view(-1, tensor)
    groups = [_own(lines.tolist()) for lines in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(REPLICAS, TENSOR))


def _own(lines: list[list[int]]) -> "dist.ProcessGroup":
    """The group of this worker's line; every worker makes all of them."""
    import torch.distributed as dist

    made: dict[bool, dist.ProcessGroup] = {dist.get_rank() in line: dist.new_group(line) for line in lines}
    return made[True]
