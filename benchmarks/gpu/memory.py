"""The peak memory of an update against what `rtrain plan` foretells, and the price of computing layers again.

A CPU has no counter of peak memory. There the memory that autograd keeps for the backward pass is counted against the
foretold activations, so that the report can be tested.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu import bench as common
from benchmarks.gpu.bench import Bench, forget, network, texts
from benchmarks.gpu.speed import Ours

if TYPE_CHECKING:
    from rtrain.planning.memory_trace import Traced

TOKENS = 1 << 14
NEAR = 1.25
"""Largest ratio of a peak to its forecast."""


def traced(made: Any, lengths: Sequence[int], precision: str, recompute: bool, device: str) -> "Traced":
    """A pass of a network as the forecast computes it, by the network's configuration alone."""
    from rtrain.config import Model
    from rtrain.planning import memory_trace
    from rtrain.tasks import base

    with tempfile.TemporaryDirectory() as folder:
        made.config.save_pretrained(folder)
        return memory_trace.of_pass(
            Path(folder),
            base.get("classification"),
            Model(pooling="own"),
            lengths,
            device=device,
            outputs=made.config.num_labels,
            precision=precision,
            recomputed=recompute,
            more_passes=False,
        )


def foretold(found: "Traced") -> float:
    """Bytes of a worker that is alone on its GPU, on which its process is not."""
    from rtrain.planning import memory_needs

    return memory_needs.needed(found, 1, process=0.0, kept=1.0).total


def run(bench: Bench) -> None:
    for model in bench.size.models:
        for precision in dict.fromkeys((bench.precision, "fp32")):
            with bench.report.attempt(f"{model}.{precision}"):
                _one(bench, model, precision)
            forget(bench)


def _one(bench: Bench, model: str, precision: str) -> None:
    of = texts(bench, "long")
    count = min(TOKENS, bench.size.largest_pass) // bench.size.long
    chosen = of.pick(np.resize(np.arange(len(of)), count))
    tokens = int(chosen.lengths.sum())
    bytes_by: dict[bool, float] = {}
    seconds_by: dict[bool, float] = {}
    for recompute in (False, True):
        made = network(bench, model, recompute=recompute)
        ours = Ours(made, chosen, count, tokens, precision)
        expecting = traced(made, chosen.lengths.tolist(), precision, recompute, "gpu" if bench.gpu else "cpu")
        taken, expected = _peak(bench, ours, expecting)
        bytes_by[recompute] = taken
        times, seconds = common.timed(bench, ours.update, bench.size.seconds / 3)
        seconds_by[recompute] = seconds / times
        about: dict[str, Any] = {
            "gb": taken / 1e9,
            "forecast_gb": expected / 1e9,
            "tokens": tokens,
            "weights": sum(one.numel() for one in made.parameters()),
        }
        limit = NEAR if bench.gpu else None
        key = f"{model}.{precision}.{'recomputed' if recompute else 'kept'}"
        bench.report.line(key, taken / expected, "x the forecast", most=limit, **about)
        del ours, made
        forget(bench)
    price, saved = seconds_by[True] / seconds_by[False], bytes_by[True] / bytes_by[False]
    bench.report.line(f"{model}.{precision}.recomputation", price, "x the time", memory=saved, tokens=tokens)


def _peak(bench: Bench, ours: Ours, expecting: "Traced") -> tuple[float, float]:
    """(bytes measured, bytes foretold): of a whole update on a GPU, with what its allocator keeps; of what autograd
    keeps on a CPU."""
    import torch

    if bench.gpu:
        ours.update(0)
        torch.cuda.reset_peak_memory_stats()
        ours.update(1)
        return float(torch.cuda.max_memory_reserved()), foretold(expecting)
    kept: dict[int, int] = {}
    weights = {one.untyped_storage().data_ptr() for one in ours.network.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours.update(0)
    return float(sum(kept.values())), float(expecting.activations)
