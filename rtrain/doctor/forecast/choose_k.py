"""Which aggregation frequency trains soonest, by theory and clock together. Pure.

To the same loss, updates of B rows need in proportion to 1 + B_noise / B of them (McCandlish et al. 2018,
arXiv:1812.06162): of rows fewer than the noise scale, each further row spares nearly as much as it costs; of more, it
spares nothing. An update of k passes takes t(k). So time(k) = (1 + B_noise / B(k)) x t(k), up to a factor; what B_noise
is and how t grows with k a short pilot tells.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rtrain import events
from rtrain.config import Recipe
from rtrain.doctor.forecast.pace import CPU
from rtrain.doctor.forecast.scaling import STEP, Compute
from rtrain.errors import UserError
from rtrain.exchange import noise

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

    scale: noise.Scale
    rows_per_update: int
    passes: float
    """Passes of `micro_batch` rows on each worker, of an update: its aggregation frequency."""
    update_s: float
    exchange_s: float


def of_run(log: Sequence[Mapping[str, Any]], k: float) -> Pilot:
    """The pilot by its log, made with the aggregation frequency `k`. Raises `UserError` where that tells too little."""
    scale = noise.of_run(log)
    if scale is None:
        raise UserError(
            "--choose-k: this run has too few measurements of its gradients' noise (one in "
            f"{noise.EVERY} updates, at least 3); train for more updates, with the whole model on each worker"
        )
    last = events.trained(log)
    if last is None or last[1]["updates"] <= last[0]["update"]:
        raise UserError("--choose-k: this run has not come to its end: its log has no event `trained`")
    started, ended = last
    seconds = ended["seconds"]["train"] / (ended["updates"] - started["update"])
    exchange = (ended.get("exchange") or {}).get("seconds", 0.0)
    return Pilot(scale, started["rows_per_update"], k, seconds, exchange)


def work(pilot: Pilot, weights: float, memory_per_s: float) -> Compute:
    """A worker's own work, by the pilot's one aggregation frequency: what is neither the exchange nor the optimizer's
    step, over `weights` bytes at so many a second, are its passes."""
    step = min(STEP * weights / memory_per_s, pilot.update_s / 2)
    return Compute(step, max(0.0, pilot.update_s - pilot.exchange_s - step) / pilot.passes)


def options(pilot: Pilot, compute: Compute, tried: Iterable[int] = TRIED) -> list[Option]:
    """Each frequency with its time, at the learning rate that suits its rows."""
    rows = {k: round(pilot.rows_per_update * k / pilot.passes) for k in tried}
    seconds = {k: compute.seconds(k) + pilot.exchange_s for k in rows}

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
    log: Sequence[Mapping[str, Any]], recipe: Recipe, size: float, tried: Iterable[int] = TRIED
) -> tuple[Pilot, list[Option]]:
    """A pilot of the recipe with `size` bytes of weights, by its log. Raises `UserError` where that tells too
    little."""
    pilot = of_run(log, recipe.rows_per_update / recipe.train.workers / recipe.train.micro_batch)
    return pilot, options(pilot, work(pilot, size, CPU.memory_per_s), tried)


@dataclass(frozen=True)
class Prior:
    """What the first trial of a search tells of the others' updates."""

    most_rows: int
    """Updates of more rows than this gain little by them, or cost more than they gain."""
    rows: int
    """Those of an update with which training is soonest at its end."""


def prior(log: Sequence[Mapping[str, Any]], recipe: Recipe, size: float) -> Prior | None:
    """By the log of the search's first trial; None until that tells enough."""
    scale = noise.of_run(log)
    if scale is None or scale.high is None or events.trained(log) is None:
        return None
    _, found = of_log(log, recipe, size, SEARCHED)
    worth = max(one.rows_per_update for one in found if one.relative <= WORTH)
    return Prior(min(math.ceil(scale.high), worth), chosen(found).rows_per_update)


def chosen(found: Sequence[Option]) -> Option:
    """The one that trains soonest; of those within a hundredth of it the smallest, whose updates are more."""
    return min((one for one in found if one.relative <= 1.01), key=lambda one: one.k)


def miss(measured: Mapping[int, Sequence[float]], choice: int) -> float:
    """By what share the chosen frequency's measured time is above the best one's; medians over seeds."""
    medians = {k: statistics.median(times) for k, times in measured.items()}
    return medians[choice] / min(medians.values()) - 1
