"""Settings that change a side's speed and not what it trains: threads, allocator, loader processes, attention kernel.

A peer runs with the settings that were fastest for it in a small sweep (`python -m benchmarks.train --sweep`). rtrain
runs with its own defaults.
"""

import ctypes.util
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain import env

OWN = ("OMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "TORCH_", "RAY_", "RANK", "WORLD_SIZE", "ACCELERATE_")
"""Prefixes of environment variables that a side must not inherit from the caller's shell."""
LIBRARIES = ("jemalloc", "tcmalloc_minimal")


@dataclass(frozen=True)
class Budget:
    threads: int = 1
    """Threads of each process."""
    allocator: str = "glibc"
    """`glibc` (as it is), `kept` (glibc keeps large blocks, as rtrain sets it), or the name of a preloaded library."""
    loader_workers: int = 0
    """Processes that prepare batches, for each training process."""
    attention: str = "sdpa"
    """Transformers' attention implementation."""


def allocators() -> dict[str, dict[str, str]]:
    """The environment variables that select each allocator that this machine has."""
    kept = {name: value for name, value in env.SETTINGS.items() if name.startswith("MALLOC_")}
    found = {name: path for name in LIBRARIES if (path := ctypes.util.find_library(name))}
    return {"glibc": {}, "kept": kept, **{name: {"LD_PRELOAD": path} for name, path in found.items()}}


def environment(budget: Budget, inherited: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment of a side's processes: nothing is downloaded, and no setting of the caller's shell counts."""
    clean = {name: value for name, value in inherited.items() if not name.startswith(OWN)}
    return {
        **clean,
        **allocators()[budget.allocator],
        "OMP_NUM_THREADS": str(budget.threads),
        "PYTHONPATH": str(root),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }


def axes(peer: str) -> dict[str, tuple[Any, ...]]:
    """The settings that are swept for a peer, each with the values that are tried beside the default."""
    others = tuple(name for name in allocators() if name != "glibc")
    found: dict[str, tuple[Any, ...]] = {"allocator": others, "threads": (2,)}
    if peer == "ddp":
        # Its ratio shows what a loop costs, so both sides must use the kernel that is fastest here.
        return {**found, "attention": ("eager",)}
    return found if peer == "ray_documented" else {**found, "loader_workers": (1,)}


def sweep(axes: Mapping[str, Iterable[Any]], measure: Callable[[Budget], float]) -> tuple[Budget, dict[str, float]]:
    """Try the values of one axis after another, and keep what is faster. `measure` gives rows per second.

    Returns the best budget, and the rate of every budget that was tried, by its label.
    """
    best, tried = Budget(), dict[str, float]()
    tried[label(best)] = rate = measure(best)
    for axis, values in axes.items():
        start = best
        for value in values:
            one = dataclasses.replace(start, **{axis: value})
            tried[label(one)] = found = measure(one)
            if found > rate:
                best, rate = one, found
    return best, tried


def label(budget: Budget) -> str:
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(budget).items())


def load(path: Path) -> dict[str, Budget]:
    """The best budget of each peer that was swept."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return {peer: Budget(**found["best"]) for peer, found in document["peers"].items()}


def save(path: Path, found: Mapping[str, tuple[Budget, Mapping[str, float]]], about: Mapping[str, Any]) -> None:
    """Add the results of a sweep to the file; results of other peers stay in it."""
    peers = json.loads(path.read_text(encoding="utf-8"))["peers"] if path.is_file() else {}
    for peer, (best, tried) in found.items():
        peers[peer] = {"best": dataclasses.asdict(best), "rows_per_second": dict(tried)}
    path.write_text(json.dumps({"about": dict(about), "peers": peers}, indent=1) + "\n", encoding="utf-8")
