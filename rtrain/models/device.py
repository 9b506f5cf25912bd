"""The devices that a run's workers train on, how tensors get there, and the transport between the workers.

`choose` is pure; `rtrain.runs.prepare` asks it once for a run, with what the cluster has or may start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtrain.core import env
from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


@dataclass(frozen=True)
class Choice:
    """The devices that a run's workers train on, and the most workers that there may be."""

    device: str
    """`cpu`, or `gpu`, which is one GPU for each worker."""
    workers: int
    why: str | None = None
    """What a user should be told: that GPUs are left alone, or that there are fewer workers than asked for."""


def choose(wanted: str, workers: int, least: int | None, gpus: int, usable: bool, room: int | None = None) -> Choice:
    """The choice for a run; raises `ConfigError` where what was asked for cannot be had.

    `wanted`: `train.device`, or what the run has decided before; `gpus`: those of the whole cluster, with what its
    autoscaler may start, also where none is up yet; `usable`: whether this build of torch can compute on them; `room`:
    how many of the workers have room on nodes that may be up together, with the CPUs of their data tasks (None: not
    known). Where none has, the run is refused by that (`cluster.preflight`), and not here.
    """
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return Choice("cpu", workers)
    has = f"{gpus} GPU{'' if gpus == 1 else 's'}"
    if gpus and not usable:
        reason = f"the cluster has {has}, which this build of torch cannot use"
        if wanted == "auto":
            return Choice("cpu", workers, f"training on CPUs: {reason}; install a build of torch for them")
        fix = "install a build of torch for them, or write cpu"
        raise ConfigError([Problem("train.device", wanted, reason, fix, code="unsupported")])
    if gpus < (least or 1):
        reason = f"the cluster has {has}, and its autoscaler may start no more"
        fix = "write train.device=cpu, or start nodes with GPUs" + (f"; train.min_workers is {least}" if least else "")
        raise ConfigError([Problem("train.device", wanted, reason, fix, code="too_few_gpus")])
    if gpus < workers:
        why = f"{gpus} worker{'' if gpus == 1 else 's'} instead of {workers}: the cluster has {has}, one for each"
        return Choice("gpu", gpus, f"{why}. The rows of an update stay the same")
    if room and (least or 1) <= room < workers:
        why = f"{room} worker{'' if room == 1 else 's'} instead of {workers}: of the nodes that may be up together with"
        return Choice("gpu", room, f"{why} CPUs for data tasks no more have a GPU. The rows of an update stay the same")
    return Choice("gpu", workers)


def usable() -> bool:
    """Whether this build of torch computes on GPUs, or they are only counted; the machine itself may have none."""
    import torch

    return env.gpus_are_counted() or bool(torch.backends.cuda.is_built())


def named(device: "torch.device") -> str:
    """What a worker trains on, for a log: `cpu`, or a GPU by its name."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


_STANDS_FOR: ContextVar[str | None] = ContextVar("stands_for", default=None)


def kind(device: "torch.device") -> str:
    """By whose way tensors on `device` are computed: `cpu`, `cuda` and so on."""
    return _STANDS_FOR.get() or device.type


@contextmanager
def standing_for_gpu() -> Iterator[None]:
    """Inside, tensors without numbers are computed as a GPU computes them, wherever they are, so that what they take is
    what they take there. A torch without CUDA makes no such tensor that says of itself that it is on a GPU."""
    token = _STANDS_FOR.set("cuda")
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


def backend(device: str) -> str:
    """Transports of the workers' process group, one per kind of device: nccl, which sums gradients on GPUs, moves no
    CPU tensor, and counts, outcomes and decisions are CPU tensors on every kind of worker."""
    return "cpu:gloo,cuda:nccl" if device == "gpu" and not env.gpus_are_counted() else "gloo"


def moved(values: "npt.NDArray[Any]", device: "torch.device") -> "torch.Tensor":
    """An array as a tensor on the device. A GPU reads it from pinned memory when it comes to it: a plain copy would
    wait here until all that the GPU has been told to do is done."""
    import torch

    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
