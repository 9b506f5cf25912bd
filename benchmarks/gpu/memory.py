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
    from rtrain.planning.memory_estimate import TracedMemory

TOKENS = 1 << 14
MAX_MEMORY_RATIO = 1.25
"""Largest ratio of a peak to its forecast."""


def traced(network: Any, lengths: Sequence[int], precision: str, recompute: bool, device: str) -> "TracedMemory":
    """A pass of a network as the forecast computes it, by the network's configuration alone."""
    from rtrain.config import ModelConfig
    from rtrain.planning import memory_estimate
    from rtrain.tasks import base

    with tempfile.TemporaryDirectory() as folder:
        network.config.save_pretrained(folder)
        return memory_estimate.trace_micro_batch(
            Path(folder),
            base.get_task("classification"),
            ModelConfig(pooling="own"),
            lengths,
            device=device,
            num_outputs=network.config.num_labels,
            precision=precision,
            recomputes_layers=recompute,
            has_gradients=False,
        )


def foretold(trace: "TracedMemory") -> float:
    """Bytes of a worker that has a GPU to itself."""
    from rtrain.planning import memory_estimate

    return memory_estimate.estimate_memory(trace, 1, overhead=1.0).tensor_bytes


def run(bench: Bench) -> None:
    for model in bench.size.models:
        for precision in dict.fromkeys((bench.precision, "fp32")):
            with bench.report.attempt(f"{model}.{precision}"):
                _measure(bench, model, precision)
            forget(bench)


def _measure(bench: Bench, model: str, precision: str) -> None:
    rows = texts(bench, "long")
    count = min(TOKENS, bench.size.max_micro_batch_tokens) // bench.size.long
    batch = rows.take(np.resize(np.arange(len(rows)), count))
    tokens = int(batch.window_lengths.sum())
    bytes_by: dict[bool, float] = {}
    seconds_by: dict[bool, float] = {}
    for recompute in (False, True):
        model_network = network(bench, model, recompute=recompute)
        ours = Ours(model_network, batch, count, tokens, precision)
        expecting = traced(
            model_network, batch.window_lengths.tolist(), precision, recompute, "gpu" if bench.gpu else "cpu"
        )
        peak, expected = _peak(bench, ours, expecting)
        bytes_by[recompute] = peak
        times, seconds = common.timed(bench, ours.update, bench.size.seconds / 3)
        seconds_by[recompute] = seconds / times
        about: dict[str, Any] = {
            "gb": peak / 1e9,
            "forecast_gb": expected / 1e9,
            "tokens": tokens,
            "weights": sum(parameter.numel() for parameter in model_network.parameters()),
        }
        limit = MAX_MEMORY_RATIO if bench.gpu else None
        key = f"{model}.{precision}.{'recomputed' if recompute else 'kept'}"
        bench.report.line(key, peak / expected, "x the forecast", maximum=limit, **about)
        del ours, model_network
        forget(bench)
    price, saved = seconds_by[True] / seconds_by[False], bytes_by[True] / bytes_by[False]
    bench.report.line(f"{model}.{precision}.recomputation", price, "x the time", memory=saved, tokens=tokens)


def _peak(bench: Bench, ours: Ours, expecting: "TracedMemory") -> tuple[float, float]:
    """Return (measured bytes, forecast bytes): of a whole update on a GPU, reserved memory included; of the tensors
    that autograd saves on a CPU."""
    import torch

    if bench.gpu:
        ours.update(0)
        torch.cuda.reset_peak_memory_stats()
        ours.update(1)
        return float(torch.cuda.max_memory_reserved()), foretold(expecting)
    saved: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in ours.network.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours.update(0)
    return float(sum(saved.values())), float(expecting.activations)
