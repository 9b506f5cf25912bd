"""The machines that the workers of a start are on, for the run's log: what it costs is computed from it."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.core import env
from rtrain.parallel import collectives

if TYPE_CHECKING:
    import torch

DMI = Path("/sys/class/dmi/id")
"""What a machine's firmware says of it. AWS writes the instance type there; other clouds tell it over the network."""


def told(device: "torch.device", share: float = 1.0) -> list[dict[str, Any]]:
    """The machines, each with its workers, which have such a share of a GPU. Called on every rank."""
    return merged(collectives.every(here(device, share)))


def merged(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each worker says of its machine, once for each machine; `workers` and `gpus` are those of all of them."""
    counts = Counter(one["host"] for one in workers)
    by_host = {one["host"]: one for one in workers}
    return [
        {**one, "workers": counts[host], "gpus": counts[host] * one["gpus"], "cores": one["cores"]}
        for host, one in by_host.items()
    ]


def here(device: "torch.device", share: float = 1.0) -> dict[str, Any]:
    """This worker's machine; `gpus`: those of this worker."""
    gpu = None
    if device.type == "cuda":
        import torch

        gpu = torch.cuda.get_device_name(device)
    known = {"host": os.uname().nodename, "cores": env.cores(), "gpus": share if gpu is not None else 0, "gpu": gpu}
    return {**known, "instance": instance(), "spot": capacity.has(capacity.node_here().labels, capacity.SPOT)}


def head() -> dict[str, Any]:
    """The head's machine, called by the driver. Its type is known where the driver runs on it, as a job's does."""
    if ray_internals.HEAD_RESOURCE in capacity.node_here().has:
        return {"host": os.uname().nodename, "instance": instance()}
    return {"host": capacity.head_host(), "instance": None}


def instance(dmi: Path = DMI) -> str | None:
    """The type of this machine, as a cloud names it; None where its firmware does not say so."""
    try:
        vendor, name = ((dmi / file).read_text(encoding="utf-8").strip() for file in ("sys_vendor", "product_name"))
    except OSError:
        return None
    return name if vendor == "Amazon EC2" else None
