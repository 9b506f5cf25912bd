"""How many replicas there are where nobody has said it: as many as the machine has room for. Pure, but for `alone` and
`host`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from rtrain.config import Serve
from rtrain.core import cgroup_limits, engines, env

MOST = 4
"""More replicas are wanted by those who have such a load, and know of it."""
OWN_MB = 400.0
"""Memory of a replica beside its models: 416 to 444 MB with one of 18 MB."""
LOADED = 2.0
"""Memory of a loaded model over the size of its files, with another one beside it while it changes."""
PLANS_MB = 350.0
"""Memory of the plans of a graph for all shapes of its calls: 335 MB for 230 shapes of a model of 6 layers of 384, 190
MB for 159 of one of 2 layers of 32 (OpenVINO, an AMD EPYC)."""


class Host(NamedTuple):
    """Where replicas may run."""

    cores: int
    memory_mb: float
    several: bool = False
    """Whether there are several machines, or may be."""


def alone() -> Host:
    """This machine, before it has a Ray of its own."""
    available, limit = psutil.virtual_memory().available, cgroup_limits.memory()
    return Host(env.cores(), (available if limit is None else min(available, limit)) / 1e6)


def host(free: Iterable[Mapping[str, float]], several: bool) -> Host:
    """This machine, as part of a Ray that is there. `free`: what its nodes have free."""
    return Host(env.cores(), sum(node.get("memory", 0.0) for node in free) / 1e6, several)


def resolved(settings: Serve, artifacts: Iterable[Path], where: Host) -> tuple[Serve, str]:
    """The settings with a number of replicas, and what to tell of it where the machine has decided; nothing where it is
    the usual one.

    A core each, up to `MOST`, beside one for HAProxy where there are more than two: on two, a second replica and
    HAProxy would take the time of the first. On a cluster one, since what its nodes are for is not known here; and one
    where the number follows the load.
    """
    if settings.replicas is not None:
        return settings, ""
    folders = list(artifacts)
    number, line = 1, ""
    if not where.several and where.cores > 2 and not settings.max_replicas:
        each_mb = OWN_MB + LOADED * sum(map(_size_mb, folders)) + PLANS_MB * sum(map(_plans_by_shape, folders))
        by_cores = min(MOST, (where.cores - 1) // (settings.threads * len(folders)))
        number = max(1, min(by_cores, int(where.memory_mb / each_mb)))
        memory = "" if number == max(1, by_cores) else f" and {where.memory_mb / 1e3:.1f} GB of free memory"
        line = f"{number} {'replica' if number == 1 else 'replicas'}, by {where.cores} cores{memory} (serve.replicas)"
    return settings.model_copy(update={"replicas": number}), line


def _plans_by_shape(folder: Path) -> bool:
    return any(engine.plans_by_shape and engine.present(folder) for engine in engines.ENGINES.values())


def _size_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
