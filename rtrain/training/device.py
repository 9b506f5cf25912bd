"""Where a worker's tensors are, how they get there, and by what transport workers exchange them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


def backend(use_gpu: bool) -> str:
    """Of the workers' process group, one transport per kind of device: nccl, which sums gradients on GPUs, moves no CPU
    tensor, and counts, outcomes and decisions are CPU tensors on every kind of worker."""
    return "cpu:gloo,cuda:nccl" if use_gpu else "gloo"


def moved(values: "npt.NDArray[Any]", device: "torch.device") -> "torch.Tensor":
    """An array as a tensor on the device. A GPU reads it from pinned memory when it comes to it: a plain copy would
    wait here until all that the GPU has been told to do is done."""
    import torch

    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
