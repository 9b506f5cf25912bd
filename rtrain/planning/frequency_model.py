"""Which aggregation frequency trains soonest, by theory and clock together. Pure.

To the same loss, updates of B rows need in proportion to 1 + B_noise / B of them (McCandlish et al. 2018,
arXiv:1812.06162): of rows fewer than the noise scale, each further row spares nearly as much as it costs; of more, it
spares nothing. An update of k passes takes t(k). So time(k) = (1 + B_noise / B(k)) x t(k), up to a factor; what B_noise
is and how t grows with k a short pilot tells.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rtrain.config import Recipe
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.parallel import gradient_noise
from rtrain.planning.throughput import STEP, Compute, between, memory_per_s, passes
from rtrain.trainer.step_timing import BACKWARD, FORWARD

TRIED: Final = (1, 2, 4, 8)
SEARCHED: Final = (*TRIED, 16, 32, 64)
WORTH: Final = 1.1
"""Relative times up to which a frequency is worth a trial: the model is off by some percent."""


@dataclass(frozen=True)
class Option:
    """An aggregation frequency, and the time to the same loss relative to the best of those beside it."""

    k: int
    rows_per_update: int
    update_s: float
    relative: float
    low: float
    """The same at the lower end of the noise scale's interval, and at its upper end."""
    high: float | None


@dataclass(frozen=True)
class Pilot:
    """What a short run has told."""

    scale: gradient_noise.Scale
    rows_per_update: int
    passes: float
    """Passes of `micro_batch` rows on each worker, of an update: its aggregation frequency."""
    update_s: float
    exchange_s: float
    """The part of `update_s` for which a worker stood still for the exchange."""
    passes_s: float | None = None
    """The part of `update_s` in which a worker went forward and backward; None on a GPU, whose kernels run beside its
    spans."""


def of_run(log: Sequence[Mapping[str, Any]], k: float) -> Pilot:
    """The pilot by its log, made with the aggregation frequency `k`. Raises `UserError` where that tells too little."""
    scale = gradient_noise.of_run(log)
    if scale is None:
        raise UserError(
            "--choose-k: this run has not measured the noise of its gradients, or in fewer than 3 updates; "
            f"{gradient_noise.HOW}, with the whole model on each worker",
            code="not_measured",
        )
    started, ended = _last(log)
    exchange = ended["exchange"]["seconds"] if ended["exchange"] else 0.0
    stages = ended["stages"] if started["device"] == "cpu" else ()
    computing = statistics.fmean(one[FORWARD] + one[BACKWARD] for one in stages) if stages else None
    return Pilot(scale, started["rows_per_update"], k, update_s(log), exchange, computing)


def update_s(log: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of an update by the newest start of a run's log that has come to its end: their median. The first one of
    a start is left out, as it makes what later ones find, and so are those that measure the noise, where it is told how
    long others take. Raises `UserError` where no start has come to its end."""
    started, ended = _last(log)
    begin, end = (max(place for place, event in enumerate(log) if event is one) for one in (started, ended))
    ours = log[begin:end]  # a start that began later counts its own seconds
    measuring = {event["update"] for event in ours if event["kind"] == gradient_noise.KIND}
    told = [event for event in ours if event["kind"] == "progress"]
    plain, every = list[float](), list[float]()
    for one, other in itertools.pairwise(told):
        updates = other["update"] - one["update"]
        every.append((other["train_s"] - one["train_s"]) / updates)
        if not any(number in measuring for number in range(one["update"] + 1, other["update"] + 1)):
            plain.append(every[-1])
    if found := plain or every:
        return statistics.median(found)
    seconds: float = ended["seconds"]["train"] / (ended["updates"] - started["update"])
    return seconds


def _last(log: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    last = events.trained(log)
    if last is None or last[1]["updates"] <= last[0]["update"]:
        raise UserError(
            "--choose-k: this run has not come to its end: its log has no event `trained`", code="not_finished"
        )
    return last


def work(pilot: Pilot, weights: float, memory_per_s: float, another: tuple[float, float] | None = None) -> Compute:
    """What an update takes whatever its passes, its exchange included, and what each of them.

    By `another` update, of (passes, seconds), where there is one. Else the passes are what was forward and backward:
    calls of operators, which take as long for few rows as for many, are then counted with the rows, and updates of
    fewer passes are told as a little too quick. On a GPU nothing tells them apart, and the step is foretold by the
    `weights`, in bytes, and the bytes that memory moves in a second.
    """
    if another is not None:
        return between((pilot.passes, pilot.update_s), another)
    computing = pilot.passes_s
    if computing is None:
        step = min(STEP * weights / memory_per_s, pilot.update_s / 2)
        computing = pilot.update_s - pilot.exchange_s - step
    computing = min(max(computing, 0.0), pilot.update_s)
    return Compute(pilot.update_s - computing, computing / pilot.passes)


def options(pilot: Pilot, compute: Compute, tried: Iterable[int] = TRIED) -> list[Option]:
    """Each frequency with its time, at the learning rate that suits its rows."""
    rows = {k: round(pilot.rows_per_update * k / pilot.passes) for k in tried}
    seconds = {k: compute.seconds(k) for k in rows}

    def relative(scale: float) -> dict[int, float]:
        times = {k: (1 + scale / rows[k]) * seconds[k] for k in rows}
        return {k: time / min(times.values()) for k, time in times.items()}

    by, low = relative(pilot.scale.rows), relative(pilot.scale.low)
    high = None if pilot.scale.high is None else relative(pilot.scale.high)
    return [Option(k, rows[k], seconds[k], by[k], low[k], None if high is None else high[k]) for k in sorted(rows)]


def weights(folder: Path) -> int:
    """Bytes of the weights of a model's folder."""
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


def of_log(
    log: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    size: float,
    tried: Iterable[int] = TRIED,
    another: tuple[float, float] | None = None,
) -> tuple[Pilot, list[Option]]:
    """A pilot of the recipe with `size` bytes of weights, by its log; `another` as in `work`. Raises `UserError` where
    that tells too little."""
    pilot = of_run(log, passes(recipe, recipe.train.workers))
    memory = memory_per_s(_last(log)[0]["device"])
    return pilot, options(pilot, work(pilot, size, memory, another), tried)


@dataclass(frozen=True)
class Prior:
    """What the first trial of a search tells of the others' updates."""

    most_rows: int
    """Updates of more rows than this gain little by them, or cost more than they gain."""
    rows: int
    """Those of an update with which training is soonest at its end."""


def prior(log: Sequence[Mapping[str, Any]], recipe: Recipe, size: float) -> Prior | None:
    """By the log of the search's first trial; None until that tells enough."""
    scale = gradient_noise.of_run(log)
    if scale is None or scale.high is None or events.trained(log) is None:
        return None
    _, found = of_log(log, recipe, size, SEARCHED)
    best = chosen(found).rows_per_update
    worth = max(one.rows_per_update for one in found if time_of(one) <= WORTH)
    return Prior(min(math.ceil(scale.high), worth), best)


def chosen(found: Sequence[Option]) -> Option:
    """The one that trains soonest; of those within a hundredth of it the smallest, whose updates are more."""
    return min((one for one in found if time_of(one) <= 1.01), key=lambda one: one.k)


def time_of(one: Option) -> float:
    """Its relative time. The noise scale is that of a run's beginning, and it grows while a model learns (as McCandlish
    et al. 2018 find too): it is taken for the upper end of its interval, where that has one."""
    return one.relative if one.high is None else one.high
