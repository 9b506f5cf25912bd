"""Tensors that are spread over workers, and what they are as one: torch's DTensor says how each is cut."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rtrain import torch_internals
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import torch

Part = TypeVar("Part", bound="torch.Tensor")


def here(tensor: "torch.Tensor") -> bool:
    """Whether this worker has a share of the tensor: one that others alone have is on torch's meta device."""
    return tensor.device.type != "meta"


def device(module: "torch.nn.Module") -> "torch.device":
    """Where this worker computes the module: where the weights are that it has; `meta`, where nobody has any."""
    every = module.parameters()  # asked for before each pass: to walk through all takes milliseconds
    first = next(every)
    return next((one.device for one in itertools.chain([first], every) if here(one)), first.device)


def move(module: "torch.nn.Module", device: "torch.device") -> None:
    """Put what this worker has of a module on a device, one tensor after another."""
    for one in (*module.parameters(), *module.buffers()):
        if here(one):
            one.data = one.data.to(device)


def full(tensor: "torch.Tensor") -> "torch.Tensor":
    """The whole tensor, on every worker that has a share of it. Called on all of these."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: "torch.Tensor") -> "torch.Tensor":
    """This worker's share, in the same memory."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leave_file(module: "torch.nn.Module") -> None:
    """Copy what a worker has of `module` out of the file that it was read from.

    Tensors that were read are parts of one mapping of the whole file, which stays in memory as long as one of them
    does: a worker that keeps a share of the weights would have all of them.
    """
    for one in (*module.parameters(), *module.buffers()):
        share = torch_internals.share_of(one)
        share.data = share.data.clone()


def like(value: "torch.Tensor", parameter: "torch.Tensor") -> "torch.Tensor":
    """A whole tensor cut as `parameter` is, on its device. Nothing is sent: every worker has the whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    found = value
    if isinstance(parameter, DTensor):
        found = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return found.to(parameter.device)


def fill(share: "torch.Tensor", value: "torch.Tensor") -> None:
    """Put a whole tensor's share in its place."""
    if share.shape != value.shape:
        raise ValueError(f"a tensor of {list(value.shape)} for one of {list(share.shape)}")
    local(share).copy_(local(like(value, share)))


def kind(tensor: "torch.Tensor") -> Any:
    """How a tensor is cut. torch's calls for many tensors at once take those of one kind."""
    from torch.distributed.tensor import DTensor

    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def by_kind(tensors: "Sequence[Part]") -> "list[list[Part]]":
    """The tensors in groups that are cut alike."""
    found: dict[Any, list[Part]] = {}
    for tensor in tensors:
        found.setdefault(kind(tensor), []).append(tensor)
    return list(found.values())


def norm(tensors: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """The norm of a vector that is given in parts, whole or cut, []."""
    import torch

    norms = [full(torch.nn.utils.get_total_norm(alike)) for alike in by_kind(tensors)]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def squared(tensor: "torch.Tensor") -> "torch.Tensor":
    """The squared norm of a tensor, [], on its device: nothing waits for it yet."""
    import torch

    found: torch.Tensor = torch.linalg.vector_norm(tensor)
    return full(found).double() ** 2


def from_holders(own: "Mapping[str, torch.Tensor]", watch: Watch) -> "Iterator[tuple[str, torch.Tensor]]":
    """Tensors of which each worker has some, or shares of some: on rank 0 all, whole, sent to its processor's memory;
    on others none."""
    import torch
    import torch.distributed as dist

    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, {name: (tuple(value.shape), value.dtype) for name, value in own.items()})
    holders: dict[str, tuple[int, Any]] = {}
    for rank, tensors in enumerate(known):
        for name, described in tensors.items():
            holders.setdefault(name, (rank, described))
    here = dist.get_rank()
    for name, (holder, (shape, dtype)) in holders.items():
        watch.alive()
        found = full(own[name]) if name in own else None
        if here == holder != 0:
            assert found is not None
            dist.send(found.detach().cpu().contiguous(), dst=0)
        elif here == 0 and holder == 0:
            assert found is not None
            yield name, found
        elif here == 0:
            value = torch.empty(shape, dtype=dtype)
            dist.recv(value, src=holder)
            yield name, value
