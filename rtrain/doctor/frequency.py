"""Which aggregation frequency to take: a pilot, which is trained here or was trained before, and the decision."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.data.order import Order
from rtrain.doctor.forecast import choose_k
from rtrain.errors import UserError
from rtrain.exchange import noise
from rtrain.network import model
from rtrain.run import Run
from rtrain.runs import driver, preparing
from tune.asking import space

JSON: Final = "choose-k.json"
PILOT: Final = "pilot"
"""Name of the pilot's folder within that of the decision."""
SHARE: Final = 0.15
"""Share of a run's updates that its pilot has, at most."""
FREQUENCIES: Final = (4, 2, 1)
"""Those of a pilot; a smaller one where the share of the run would be too few updates of a larger one."""
FEWEST: Final = 3 * noise.EVERY
"""Updates of a pilot: a noise scale needs three measurements."""
MOST: Final = noise.LATEST * noise.EVERY
"""And no more of them tell it."""


def updates(order: Order) -> int | None:
    """Updates of the pilot of a run with this order; None where its share of the run is too short."""
    found = min(MOST, math.floor(SHARE * order.updates))
    return found if found >= FEWEST else None


def train(config: Config, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> Run:
    """Train a pilot of the recipe into `folder`, on the Ray that the process is connected to. Raises `UserError` where
    a run of it is too short for one."""
    for k in FREQUENCIES:
        prepared = preparing.prepare(piloted(config, k), folder, tokens_root=folder.parent.parent)
        if (length := updates(prepared.order)) is not None:
            driver.fit(prepared, until=length, reports=False, on_event=on_event)
            return prepared.run
        shutil.rmtree(folder)
    raise UserError(
        f"--choose-k: a pilot has {FEWEST} updates at least, and may be {SHARE:.0%} of a run: this run has "
        f"{prepared.order.updates} updates of {prepared.config.recipe.rows_per_update} rows. Train on more rows or "
        "epochs, or name a pilot of your own: rtrain plan --choose-k --like RUN"
    )


def piloted(config: Config, k: int) -> Config:
    """The configuration of a pilot. It keeps no copies: it goes in the end, and they would stay, under the name that
    every pilot has."""
    return configuration.with_overrides(config, settings(config, k) | {"cluster.storage": None})


def settings(config: Config, k: int) -> dict[str, Any]:
    """What a search would change to train with this frequency: it carries the learning rate by `tune.lr_scaling`."""
    return space.overrides(config, {space.FREQUENCY: k})


def decided(config: Config, pilot: Run) -> dict[str, Any]:
    """The decision as JSON: for a recipe, by a pilot of it. Raises `UserError` where its log tells too little."""
    recipe = configuration.load(str(pilot.config)).recipe
    size = choose_k.weights(model.resolve(recipe.model.name, pilot.folder.parent))
    found, options = choose_k.of_log(pilot.events(), recipe, size)
    best = choose_k.chosen(options)
    carried = {one.k: settings(config, one.k) for one in options}
    return {
        "noise_scale": dataclasses.asdict(found.scale),
        "pilot": {"updates": pilot_updates(pilot), "rows_per_update": found.rows_per_update},
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


def pilot_updates(pilot: Run) -> int:
    last = pilot.last("trained")
    return 0 if last is None else int(last["updates"])


def run(config: Config, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train a pilot, decide, and leave the decision in `folder`; the pilot goes."""
    pilot = train(config, folder / PILOT, on_event)
    document = decided(config, pilot)
    (folder / JSON).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(pilot.folder)
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
    given = (f"--set {name}={_written(value)}" for name, value in document["settings"].items())
    return [*lines, f"write {' '.join(given)}"]


def _written(value: Any) -> Any:
    return "null" if value is None else value
