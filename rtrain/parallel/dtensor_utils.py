"""Utilities for sharded tensors (DTensor) and parameters on the meta device."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rtrain import torch_internals
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

TensorT = TypeVar("TensorT", bound="torch.Tensor")


def is_materialized(tensor: "torch.Tensor") -> bool:
    """Whether this worker has a shard of the tensor; tensors that only other workers have are on the meta device."""
    return tensor.device.type != "meta"


def module_device(module: "torch.nn.Module") -> "torch.device":
    """The device of the module's materialized weights; `meta` without any."""
    # Lazy: called before each micro-batch, and a walk through all parameters takes milliseconds.
    parameters = module.parameters()
    first = next(parameters)
    return next(
        (parameter.device for parameter in itertools.chain([first], parameters) if is_materialized(parameter)),
        first.device,
    )


def move_module(module: "torch.nn.Module", device: "torch.device") -> None:
    """Move this worker's part of a module to a device, one tensor after another."""
    for tensor in (*module.parameters(), *module.buffers()):
        if is_materialized(tensor):
            tensor.data = tensor.data.to(device)


def full_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """This worker's shard, sharing memory."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_from_file(module: "torch.nn.Module") -> None:
    """Copy a worker's part of `module` out of the memory-mapped file.

    Loaded tensors are views of one mapping of the whole file, which stays in memory while any of them does: a worker
    with a shard of the weights would hold all of them.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        share = torch_internals.raw_local_tensor(tensor)
        share.data = share.data.clone()


def distribute_like(value: "torch.Tensor", parameter: "torch.Tensor") -> "torch.Tensor":
    """Distribute a full tensor like `parameter`, on its device, without communication: every worker has the full
    tensor."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    distributed = value
    if isinstance(parameter, DTensor):
        distributed = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return distributed.to(parameter.device)


def copy_into(target: "torch.Tensor", value: "torch.Tensor") -> None:
    """Copy a full tensor's shard into `target`."""
    if target.shape != value.shape:
        raise ValueError(f"a tensor of {list(value.shape)} for one of {list(target.shape)}")
    local_tensor(target).copy_(local_tensor(distribute_like(value, target)))


def placement_key(tensor: "torch.Tensor") -> Any:
    """Key of a tensor's placement. torch's multi-tensor functions require tensors with the same placement."""
    from torch.distributed.tensor import DTensor

    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def group_by_placement(tensors: "Sequence[TensorT]") -> "list[list[TensorT]]":
    groups: dict[Any, list[TensorT]] = {}
    for tensor in tensors:
        groups.setdefault(placement_key(tensor), []).append(tensor)
    return list(groups.values())


def total_norm(tensors: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """The norm [] of a vector in several tensors, sharded or not."""
    import torch

    norms = [full_tensor(torch.nn.utils.get_total_norm(alike)) for alike in group_by_placement(tensors)]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def squared_norm(tensor: "torch.Tensor") -> "torch.Tensor":
    """The squared norm [] of a tensor, on its device, without a synchronization."""
    import torch

    norm: torch.Tensor = torch.linalg.vector_norm(tensor)
    return full_tensor(norm).double() ** 2


def gather_to_rank_zero(
    local_tensors: "Mapping[str, torch.Tensor]", watchdog: Watchdog
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Gather sharded or distributed tensors: all, in full, in CPU memory on rank 0; none on the others."""
    import torch
    import torch.distributed as dist

    shapes_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        shapes_by_rank, {name: (tuple(value.shape), value.dtype) for name, value in local_tensors.items()}
    )
    holders: dict[str, tuple[int, Any]] = {}
    for rank, tensors in enumerate(shapes_by_rank):
        for name, shape_and_dtype in tensors.items():
            holders.setdefault(name, (rank, shape_and_dtype))
    this_rank = dist.get_rank()
    for name, (holder, (shape, dtype)) in holders.items():
        watchdog.heartbeat()
        if name in local_tensors:
            full = full_tensor(local_tensors[name])
            if this_rank == holder == 0:
                yield name, full
            elif this_rank == holder:
                dist.send(full.detach().cpu().contiguous(), dst=0)
        if this_rank == 0 != holder:
            value = torch.empty(shape, dtype=dtype)
            dist.recv(value, src=holder)
            yield name, value
