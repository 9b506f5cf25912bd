"""Which aggregation frequency to take: a pilot, which is trained here, and the decision."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import Order
from rtrain.models import builder
from rtrain.parallel import gradient_noise
from rtrain.planning import frequency_model, throughput
from rtrain.runs import controller, prepare, worker_pool
from tune import space

JSON: Final = "choose-k.json"
PILOT: Final = "pilot"
BESIDE: Final = "beside"
WORKERS: Final = "workers"
"""Folders within that of the decision: of the pilot, of the updates beside it, and of the processes of both."""
SHARE: Final = 0.15
"""Share of a run's updates that its pilot has, at most."""
FREQUENCIES: Final = (4, 2, 1)
"""Those of a pilot; a smaller one where the share of the run would be too few updates of a larger one."""
ENOUGH: Final = 16
"""Updates of a pilot: eight measurements of the noise."""
FEWEST: Final = 8
"""Those of the pilot of a short run, whose updates have one pass."""
MOST: Final = 2 * gradient_noise.LATEST
"""And no more of them tell it."""
CLOCK: Final = 5
"""Updates by which the time of another frequency is told: one takes as long as the next."""


def updates(order: Order, k: int) -> int | None:
    """Updates of the pilot of a run with this order, of `k` passes each; None where its share of the run is too short
    for it and for the updates of the other frequency."""
    beside = math.ceil(CLOCK * other(k) / k)
    found = min(MOST, math.floor(SHARE * order.updates) - beside)
    return found if found >= (ENOUGH if k > 1 else FEWEST) else None


def other(k: int) -> int:
    """The frequency of the updates beside those of a pilot: 1 and 4 passes tell how long 8 take, but 1 and 2 do not."""
    return 1 if k == FREQUENCIES[0] else FREQUENCIES[0]


def train(config: Config, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> tuple[Run, Run]:
    """Train a pilot of the recipe into `folder`, and beside it some updates of another frequency, on the Ray that the
    process is connected to. Raises `UserError` where a run of the recipe is too short for one."""
    for k in FREQUENCIES:
        prepared = prepare.prepare(piloted(config, k), folder / PILOT, tokens_root=folder.parent)
        length = updates(prepared.order, k)
        if length is not None:
            break
        shutil.rmtree(prepared.run.folder)
    else:
        raise UserError(
            f"--choose-k: a pilot has {FEWEST} updates at least, {CLOCK} of another k beside it take as long as "
            f"{CLOCK * other(1)}, and both may be {SHARE:.0%} of a run: this run has "
            f"{prepared.order.updates} updates of {prepared.config.recipe.rows_per_update} rows. Train on more rows or "
            "epochs",
            code="too_few_rows",
        )
    beside = prepare.prepare(piloted(config, other(k)), folder / BESIDE, tokens_root=folder.parent)
    workers = worker_pool.Kept(Run(folder / WORKERS), worker_pool.post())
    try:
        prepared.run.decide("noise", gradient_noise.PILOT)
        controller.fit(prepared, until=length, reports=False, workers=workers, on_event=on_event)
        controller.fit(beside, until=CLOCK, reports=False, workers=workers, on_event=on_event)
    finally:
        workers.end()
    return prepared.run, beside.run


def piloted(config: Config, k: int) -> Config:
    """The configuration of a pilot. Its rate rises within the pilot, not all along it: the noise is to be that of a
    training. It keeps no copies: it goes in the end, and they would stay, under the name that every pilot has."""
    own = {"optim.warmup": SHARE * config.recipe.optim.warmup, "train.log_every": 1, "cluster.storage": None}
    return configuration.with_overrides(config, settings(config, k) | own)


def settings(config: Config, k: int) -> dict[str, Any]:
    """What a search would change to train with this frequency: it carries the learning rate by `tune.lr_scaling`."""
    return space.overrides(config, {space.FREQUENCY: k})


def decided(config: Config, pilot: Run, beside: Run) -> dict[str, Any]:
    """The decision as JSON: for a recipe, by a pilot of it, and by a run with another frequency `beside` it. Raises
    `UserError` where their logs tell too little."""
    recipe = configuration.load(str(pilot.config)).recipe
    size = frequency_model.weights(builder.resolve(recipe.model.name, pilot.folder.parent))
    found, options = frequency_model.of_log(pilot.events(), recipe, size, another=_timed(beside))
    last = pilot.last("trained")
    assert last is not None  # `of_log` refuses a run without one
    best = frequency_model.chosen(options)
    carried = {one.k: settings(config, one.k) for one in options}
    return {
        "noise_scale": dataclasses.asdict(found.scale),
        "pilot": {"updates": last["updates"], "rows_per_update": found.rows_per_update},
        "options": [
            {
                **dataclasses.asdict(one),
                "settings": carried[one.k],
                "lr": configuration.with_overrides(config, carried[one.k]).recipe.peak_lr,
            }
            for one in options
        ],
        "aggregation_frequency": best.k,
        "settings": carried[best.k],
    }


def _timed(run: Run) -> tuple[float, float]:
    recipe = configuration.load(str(run.config)).recipe
    return throughput.passes(recipe, recipe.train.workers), frequency_model.update_s(run.events())


def run(config: Config, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train a pilot, decide, and leave the decision in `folder`; the pilot goes."""
    document = decided(config, *train(config, folder, on_event))
    (folder / JSON).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name in (PILOT, BESIDE, WORKERS):
        shutil.rmtree(folder / name)
    return document


def text(document: Mapping[str, Any]) -> list[str]:
    """The decision as lines."""
    scale, pilot = document["noise_scale"], document["pilot"]
    high = "unknown" if scale["high"] is None else f"{scale['high']:,.0f}"
    lines = [
        f"noise scale {scale['rows']:,.0f} rows ({scale['low']:,.0f} to {high}), by {pilot['updates']:,} updates of "
        f"{pilot['rows_per_update']:,} rows"
    ]
    lines += [
        f"k {one['k']}: {one['rows_per_update']:,} rows in {one['update_s']:.3g} s, lr {one['lr']:.3g}; "
        f"{one['relative']:.2f} x the shortest time"
        for one in document["options"]
    ]
    given = " ".join(f"--set {name}={_written(value)}" for name, value in document["settings"].items())
    why = "" if scale["high"] is None else f", by {high} rows: the noise scale grows while a model learns"
    return [*lines, f"k {document['aggregation_frequency']} is chosen{why}", f"write {given}"]


def _written(value: Any) -> Any:
    return "null" if value is None else value
