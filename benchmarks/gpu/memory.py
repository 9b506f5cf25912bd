"""The peak memory of an update against its forecast by arithmetic, and the price of computing layers again.

A CPU has no counter of peak memory. There the memory that autograd keeps for the backward pass is counted, so that the
report can be tested.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import probe
from benchmarks.gpu import bench as common
from benchmarks.gpu.bench import Bench, forget, network, texts
from benchmarks.gpu.speed import Ours

TOKENS = 1 << 14
NEAR = 1.25
"""Largest ratio of a peak to its forecast."""
STATE = 4 * 4
"""Bytes that each weight takes: the weight, its gradient and two moments."""


@dataclass(frozen=True)
class Shape:
    """The facts of a network on which its memory depends."""

    weights: int
    linear: int
    """Weights of linear layers among these."""
    layers: int
    hidden: int

    @classmethod
    def of(cls, made: Any) -> "Shape":
        config = made.config
        whole = sum(one.numel() for one in made.parameters())
        return cls(whole, sum(probe.weights(made)), config.num_hidden_layers, config.hidden_size)


def activations(shape: Shape, tokens: int, precision: str, recompute: bool) -> int:
    """Bytes that a pass keeps for its backward pass. Pure.

    The pass has no padding, and its attention kernel keeps no matrix of tokens by tokens. For each token a layer keeps,
    in multiples of the hidden size: its input 1, query, key and value 3, the output of attention 1, the inputs of both
    normalisations 2, of the feed-forward layers 1 + 4, and of the activation between them 4; and two dropout masks of
    one byte each. In half precision the normalisations' inputs stay fp32. In fp32, which that kernel does not support,
    the output of attention is kept twice. (Korthikanti et al. 2022, arXiv:2205.05198, count in this way.)
    """
    half = precision != "fp32"
    layer = (2 * 14 + 4 * 2 if half else 4 * 17) + 2
    embeddings = 4 + 1 + 4
    kept = 4 * shape.layers + layer if recompute else layer * shape.layers
    return tokens * shape.hidden * (kept + embeddings)


def forecast(shape: Shape, tokens: int, precision: str, recompute: bool) -> int:
    """Bytes of an update: state, activations, and in half precision the linear layers' weights once more. Pure."""
    copies = 2 * shape.linear if precision != "fp32" else 0
    return STATE * shape.weights + copies + activations(shape, tokens, precision, recompute)


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
        shape = Shape.of(made)
        taken, expected = _peak(bench, ours, shape, tokens, precision, recompute)
        bytes_by[recompute] = taken
        times, seconds = common.timed(bench, ours.update, bench.size.seconds / 3)
        seconds_by[recompute] = seconds / times
        about: dict[str, Any] = {
            "gb": taken / 1e9,
            "forecast_gb": expected / 1e9,
            "tokens": tokens,
            "weights": shape.weights,
        }
        limit = NEAR if bench.gpu else None
        key = f"{model}.{precision}.{'recomputed' if recompute else 'kept'}"
        bench.report.line(key, taken / expected, "x the forecast", most=limit, **about)
        del ours, made
        forget(bench)
    price, saved = seconds_by[True] / seconds_by[False], bytes_by[True] / bytes_by[False]
    bench.report.line(f"{model}.{precision}.recomputation", price, "x the time", memory=saved, tokens=tokens)


def _peak(bench: Bench, ours: Ours, shape: Shape, tokens: int, precision: str, recompute: bool) -> tuple[float, int]:
    """(bytes measured, bytes forecast): for a whole update on a GPU, for what autograd keeps on a CPU."""
    import torch

    if bench.gpu:
        ours.update(0)
        torch.cuda.reset_peak_memory_stats()
        ours.update(1)
        return float(torch.cuda.max_memory_allocated()), forecast(shape, tokens, precision, recompute)
    kept: dict[int, int] = {}
    weights = {one.untyped_storage().data_ptr() for one in ours.network.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours.update(0)
    return float(sum(kept.values())), activations(shape, tokens, precision, recompute)
