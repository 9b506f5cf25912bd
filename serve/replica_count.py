"""How many replicas there are where nobody has said it: as many as the machine has room for. Pure, but for `local_host`
and `ray_host`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from rtrain.config import ServeConfig
from rtrain.core import cgroup_limits, engines, env

MAX_DEFAULT_REPLICAS = 4
"""More replicas are wanted by those who have such a load, and know of it."""
REPLICA_BASE_MB = 400.0
"""Memory of a replica beside its models: 416 to 444 MB with one of 18 MB."""
MODEL_MEMORY_FACTOR = 2.0
"""Memory of a loaded model over the size of its files, with another one beside it while it changes."""
SHAPE_PLANS_MB = 350.0
"""Memory of the plans of a graph for all shapes of its calls: 335 MB for 230 shapes of a model of 6 layers of 384, 190
MB for 159 of one of 2 layers of 32 (OpenVINO, an AMD EPYC)."""


class HostCapacity(NamedTuple):
    """Where replicas may run."""

    cores: int
    memory_mb: float
    is_multi_node: bool = False
    """Whether there are several machines, or may be."""


def local_host() -> HostCapacity:
    """This machine, before it has a Ray of its own."""
    available, limit = psutil.virtual_memory().available, cgroup_limits.free_memory_bytes()
    return HostCapacity(env.available_cores(), (available if limit is None else min(available, limit)) / 1e6)


def ray_host(free_nodes: Iterable[Mapping[str, float]], is_multi_node: bool) -> HostCapacity:
    """This machine, as part of a Ray that is there. `free_nodes`: what its nodes have free."""
    return HostCapacity(env.available_cores(), sum(node.get("memory", 0.0) for node in free_nodes) / 1e6, is_multi_node)


def resolve_replicas(
    settings: ServeConfig, artifacts: Iterable[Path], host_capacity: HostCapacity
) -> tuple[ServeConfig, str]:
    """The settings with a number of replicas, and what to tell of it where the machine has decided; nothing where it is
    the usual one.

    A core each, up to `MAX_DEFAULT_REPLICAS`, beside one for HAProxy where there are more than two: on two, a second
    replica and HAProxy would take the time of the first. On a cluster one, since what its nodes are for is not known
    here; and one where the number follows the load.
    """
    if settings.replicas is not None:
        return settings, ""
    folders = list(artifacts)
    num_replicas, message = 1, ""
    if not host_capacity.is_multi_node and host_capacity.cores > 2 and not settings.max_replicas:
        replica_mb = (
            REPLICA_BASE_MB
            + MODEL_MEMORY_FACTOR * sum(map(_folder_size_mb, folders))
            + SHAPE_PLANS_MB * sum(map(_has_shape_plans, folders))
        )
        max_by_cores = min(MAX_DEFAULT_REPLICAS, (host_capacity.cores - 1) // (settings.threads * len(folders)))
        num_replicas = max(1, min(max_by_cores, int(host_capacity.memory_mb / replica_mb)))
        memory = (
            ""
            if num_replicas == max(1, max_by_cores)
            else f" and {host_capacity.memory_mb / 1e3:.1f} GB of free memory"
        )
        message = (
            f"{num_replicas} {'replica' if num_replicas == 1 else 'replicas'}, by {host_capacity.cores} "
            f"cores{memory} (serve.replicas)"
        )
    return settings.model_copy(update={"replicas": num_replicas}), message


def _has_shape_plans(folder: Path) -> bool:
    return any(engine.compiles_per_shape and engine.find_files(folder) for engine in engines.ENGINES.values())


def _folder_size_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
