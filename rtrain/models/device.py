"""Devices: where the CPU or GPU of a worker is chosen, the transfer of tensors, the backend of the process group.

`rtrain.runs.prepare` calls `choose_device` once for a run, with the capacity of the cluster. Ray then assigns GPUs to
workers, and each worker calls `choose_worker_device`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtrain.core import env
from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

_PRETEND_TYPE: ContextVar[str | None] = ContextVar("stands_for", default=None)


@dataclass(frozen=True)
class DeviceChoice:
    """The devices of a run's workers and the maximum number of workers."""

    device: str
    """`cpu`, or `gpu`: one GPU for each worker."""
    workers: int
    message: str | None = None
    """A message to the user: GPUs stay unused, or there are fewer workers than requested."""


def choose_device(
    requested_device: str,
    workers: int,
    min_workers: int | None,
    gpus: int,
    gpus_usable: bool,
    placeable_workers: int | None = None,
) -> DeviceChoice:
    """Choose the device of a run. Raises `ConfigError` if the request cannot be met.

    Args:
        requested_device: `train.device`, or the earlier decision of the run.
        gpus: GPUs of the whole cluster, including nodes that the autoscaler may start.
        gpus_usable: Whether this build of torch can compute on GPUs.
        placeable_workers: Workers that fit on nodes that can be up together, with the CPUs of their data tasks; None if
            unknown. If it is zero, `cluster.preflight` refuses the run.
    """
    if requested_device == "cpu" or (requested_device == "auto" and not gpus):
        return DeviceChoice("cpu", workers)
    gpu_count_text = f"{gpus} GPU{'' if gpus == 1 else 's'}"
    if gpus and not gpus_usable:
        reason = f"the cluster has {gpu_count_text}, which this build of torch cannot use"
        if requested_device == "auto":
            return DeviceChoice("cpu", workers, f"training on CPUs: {reason}; install a build of torch for them")
        fix = "install a build of torch for them, or write cpu"
        raise ConfigError([Problem("train.device", requested_device, reason, fix, code="unsupported")])
    if gpus < (min_workers or 1):
        reason = f"the cluster has {gpu_count_text}, and its autoscaler may start no more"
        note = f"; train.min_workers is {min_workers}" if min_workers else ""
        fix = f"write train.device=cpu, or start nodes with GPUs{note}"
        raise ConfigError([Problem("train.device", requested_device, reason, fix, code="too_few_gpus")])
    if gpus < workers:
        return DeviceChoice(
            "gpu",
            gpus,
            f"{gpus} worker{'' if gpus == 1 else 's'} instead of {workers}: the cluster has {gpu_count_text}, one for "
            "each. The rows of a step stay the same",
        )
    if placeable_workers and (min_workers or 1) <= placeable_workers < workers:
        return DeviceChoice(
            "gpu",
            placeable_workers,
            f"{placeable_workers} worker{'' if placeable_workers == 1 else 's'} instead of {workers}: no more fit on "
            "the nodes that the autoscaler may run at once, beside the data tasks. The rows of a step stay the same",
        )
    return DeviceChoice("gpu", workers)


def choose_worker_device(
    gpu_ids: Sequence[Any], get_assigned: "Callable[[], torch.device]", memory_share: float
) -> "torch.device":
    """Choose the device of this worker: the GPU that Ray assigned to it, limited to its share of memory; otherwise the
    CPU. Unassigned GPUs are not used, and fake GPUs cannot compute.

    Args:
        gpu_ids: The GPUs that Ray assigned to this process.
        get_assigned: Returns their device, as `ray.train.torch.get_device`.
    """
    import torch

    if not gpu_ids or env.uses_fake_gpus():
        return torch.device("cpu")
    device = get_assigned()
    if memory_share < 1:
        torch.cuda.set_per_process_memory_fraction(memory_share, device)
    return device


def can_use_gpus() -> bool:
    """Whether this build of torch can compute on GPUs. This machine may have none."""
    import torch

    return env.uses_fake_gpus() or bool(torch.backends.cuda.is_built())


def device_name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def effective_type(device: "torch.device") -> str:
    """The device type that determines how tensors on `device` are computed: `cpu`, `cuda`, ..."""
    return _PRETEND_TYPE.get() or device.type


@contextmanager
def pretend_cuda() -> Iterator[None]:
    """Treat fake tensors as CUDA tensors, so that memory estimates follow the GPU code path. A CPU build of torch
    cannot create fake CUDA tensors."""
    token = _PRETEND_TYPE.set("cuda")
    try:
        yield
    finally:
        _PRETEND_TYPE.reset(token)


def process_group_backend(device: str) -> str:
    """Backend of the process group by device type. NCCL sums gradients on GPUs but moves no CPU tensors; counts,
    results and decisions are CPU tensors on every worker."""
    return "cpu:gloo,cuda:nccl" if device == "gpu" and not env.uses_fake_gpus() else "gloo"


def to_device(values: "npt.NDArray[Any]", device: "torch.device") -> "torch.Tensor":
    """Copy an array to a device as a tensor. Copies to a GPU use pinned memory: a plain copy would wait for all queued
    GPU work."""
    import torch

    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
