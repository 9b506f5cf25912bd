"""The gain of what rtrain could do: compiled encoders, the fused optimizer, CUDA graphs, larger passes. Each is
measured beside the loop as it is."""

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu import bench as common
from benchmarks.gpu.bench import CARRIED, Bench, forget, network, texts
from benchmarks.gpu.speed import Ours

MODELS = ("bert-base", CARRIED, "bert-large")
PASSES = (1 << 9, 1 << 11, 1 << 13, 1 << 15, 1 << 16, 1 << 17)


def run(bench: Bench) -> None:
    # For a CPU torch.compile makes other code, and takes minutes.
    works = (_passes, _optimizer, *((_compiled, _graphs) if bench.gpu else ()))
    for model in MODELS if bench.gpu else MODELS[:1]:
        for work in works:
            with bench.report.attempt(f"{model}.{work.__name__.strip('_')}"):
                work(bench, model)
            forget(bench)


def _ours(bench: Bench, model: str, kind: str, most: int, compile: Callable[[Any], None] = lambda made: None) -> Ours:
    of = texts(bench, kind)
    made = network(bench, model)
    rows = common.rows_per_update(bench.size, of)
    compile(made)
    return Ours(made, of, rows, most, bench.precision)


def _usual(bench: Bench) -> int:
    return min(1 << 15, bench.size.largest_pass)


def _passes(bench: Bench, model: str) -> None:
    """Tokens a second by the size of a pass."""
    for most in PASSES:
        if most <= bench.size.largest_pass:
            with bench.report.attempt(f"{model}.pass_of_{most}"):
                speed = _ours(bench, model, "squadshifts", most).measure(bench)
                bench.report.line(f"{model}.pass_of_{most}", speed.tokens, "tokens/s", precision=bench.precision)
            forget(bench)


def _optimizer(bench: Bench, model: str) -> None:
    """The time of a step of AdamW: fused in one kernel, as rtrain has it, and by torch's loops over tensors."""
    import torch

    made = network(bench, model)
    found = {}
    for name, how in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        one = copy.deepcopy(made)
        for parameter in one.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-4, **how)  # type: ignore[arg-type]
        count, seconds = common.timed(bench, partial(_step, optimizer), bench.size.seconds / 3)
        found[name] = 1e3 * seconds / count
        del one, optimizer
    about: dict[str, Any] = {f"{name}_ms": value for name, value in found.items()}
    bench.report.line(f"{model}.fused_optimizer", found["foreach"] / found["fused"], "x as fast a step", **about)


def _step(optimizer: Any, number: int) -> None:
    optimizer.step()


def _compiled(bench: Bench, model: str) -> None:
    """The gain of torch.compile for each encoder layer, for any number of tokens."""
    import torch

    def compiled(made: Any) -> None:
        for layer in made.base_model.encoder.layer:
            layer.compile(dynamic=True)

    torch._dynamo.reset()
    _compare(bench, f"{model}.compiled_layers", model, "squadshifts", compiled)


def _graphs(bench: Bench, model: str) -> None:
    """The gain of CUDA graphs, by torch.compile. They need passes of one shape, so all texts have equal lengths."""
    import torch

    torch._dynamo.reset()
    _compare(bench, f"{model}.cuda_graphs", model, "long", lambda made: made.compile(mode="reduce-overhead"))


def _compare(bench: Bench, key: str, model: str, kind: str, compile: Callable[[Any], None]) -> None:
    """Time both in turns, so that a drift of the clocks affects both alike."""
    plain, other = _ours(bench, model, kind, _usual(bench)), _ours(bench, model, kind, _usual(bench), compile)
    begun = time.perf_counter()
    for number in range(Ours.UPDATES):
        other.update(number)
    warm = time.perf_counter() - begun
    ratios = []
    for _ in range(bench.size.rounds):
        base = plain.measure(bench).tokens
        ratios.append(other.measure(bench).tokens / base)
    bench.report.line(key, values=ratios, unit="x", compile_s=warm, texts=kind, tokens_per_pass=_usual(bench))
