"""Where an update's time goes: the ten largest kernels, and the gaps in which the GPU has nothing to do.

On a CPU the largest operators are shown, so that the report can be tested; it has no such gaps.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.bench import CARRIED, Bench, forget, network, rows_per_update, synchronize, texts
from benchmarks.gpu.speed import Ours

CASES = (("bert-large", "squadshifts"), (CARRIED, "banking77"))
UPDATES, LARGEST = 3, 10
Span = tuple[float, float]
"""Begin and end of a kernel, in microseconds."""


def run(bench: Bench) -> None:
    for model, kind in CASES:
        with bench.report.attempt(f"{model}.{kind}"):
            _one(bench, model, kind)
        forget(bench)


def _one(bench: Bench, model: str, kind: str) -> None:
    import torch
    from torch.profiler import ProfilerActivity

    of = texts(bench, kind)
    most = min(bench.size.largest_pass, 1 << 15)
    ours = Ours(network(bench, model), of, rows_per_update(bench.size, of), most, bench.precision)
    for number in range(2):
        ours.update(number)
    synchronize(bench)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.gpu else [])]
    with torch.profiler.profile(activities=activities) as found:
        for number in range(UPDATES):
            ours.update(number)
        synchronize(bench)
    by, spans = _kernels(found.events()) if bench.gpu else _operators(found.key_averages())
    total = sum(by.values())
    key = f"{model}.{kind}"
    for place, (name, spent) in enumerate(sorted(by.items(), key=lambda one: -one[1])[:LARGEST], start=1):
        share = spent / total
        bench.report.line(f"{key}.{place}", share, "of the time in kernels", kernel=name, ms=spent / 1e3 / UPDATES)
    if spans:
        idle, whole, largest = gaps(spans)
        about: dict[str, Any] = {
            "ms_an_update": whole / 1e3 / UPDATES,
            "largest_gaps_us": largest[:LARGEST],
            "kernels": len(spans),
        }
        bench.report.line(f"{key}.idle", idle / whole, "of the time the GPU waits", most=0.1, **about)


def _kernels(events: Iterable[Any]) -> tuple[dict[str, float], list[Span]]:
    """Microseconds by kernel, and every kernel's span."""
    by: dict[str, float] = {}
    spans = []
    for one in events:
        # The event of the optimizer's step spans the step's kernels, and is no kernel itself. (Names of kernels have a
        # "#" too, in which a lambda is counted.)
        named = getattr(one, "is_user_annotation", False) or one.name.startswith("Optimizer.")
        if str(one.device_type).endswith("CUDA") and not named and one.time_range.end > one.time_range.start:
            by[one.name] = by.get(one.name, 0.0) + one.time_range.end - one.time_range.start
            spans.append((float(one.time_range.start), float(one.time_range.end)))
    return by, spans


def _operators(averages: Iterable[Any]) -> tuple[dict[str, float], list[Span]]:
    return {one.key: float(one.self_cpu_time_total) for one in averages}, []


def gaps(spans: Sequence[Span]) -> tuple[float, float, list[float]]:
    """(time that no span covers, time from the first begin to the last end, gaps with the largest first). Pure."""
    found, reached = [], None
    for begin, end in sorted(spans):
        if reached is not None and begin > reached:
            found.append(begin - reached)
        reached = end if reached is None else max(reached, end)
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return sum(found), whole, sorted(found, reverse=True)
