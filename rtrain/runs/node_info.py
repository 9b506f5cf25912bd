"""Machines of an attempt's workers, for the run log. Costs are computed from them."""

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

DMI_FOLDER = Path("/sys/class/dmi/id")
"""Firmware information. AWS writes the instance type there; other clouds serve it over the network."""


def event_fields(device: "torch.device", gpu_share: float = 1.0) -> list[dict[str, Any]]:
    """Return the machines with their number of workers. Collective."""
    return merge_by_host(collectives.all_gather_object(describe_machine(device, gpu_share)))


def merge_by_host(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the workers' machines by host name; `workers` and `gpus` are sums."""
    counts = Counter(worker["host"] for worker in workers)
    by_host = {worker["host"]: worker for worker in workers}
    return [
        {**item, "workers": counts[host], "gpus": counts[host] * item["gpus"], "cores": item["cores"]}
        for host, item in by_host.items()
    ]


def describe_machine(device: "torch.device", gpu_share: float = 1.0) -> dict[str, Any]:
    """Return this worker's machine; `gpus` is this worker's share."""
    gpu_name = None
    if device.type == "cuda":
        import torch

        gpu_name = torch.cuda.get_device_name(device)
    hardware = {
        "host": os.uname().nodename,
        "cores": env.available_cores(),
        "gpus": gpu_share if gpu_name is not None else 0,
        "gpu": gpu_name,
    }
    return {
        **hardware,
        "instance": instance_type(),
        "spot": capacity.matches_labels(capacity.current_node().labels, capacity.SPOT_LABELS),
    }


def describe_head() -> dict[str, Any]:
    """Return the head's machine. Its instance type is known only if the driver runs on it, as a job's driver does."""
    if ray_internals.HEAD_RESOURCE in capacity.current_node().resources:
        return {"host": os.uname().nodename, "instance": instance_type()}
    return {"host": capacity.head_hostname(), "instance": None}


def instance_type(dmi: Path = DMI_FOLDER) -> str | None:
    """Return the cloud's name of this machine's type; None if the firmware lacks it."""
    try:
        vendor, product_name = (
            (dmi / file).read_text(encoding="utf-8").strip() for file in ("sys_vendor", "product_name")
        )
    except OSError:
        return None
    return product_name if vendor == "Amazon EC2" else None
