"""How the model lies on a run's workers, where `train.strategy=auto` leaves it to the forecast of memory. Decided when
the run is made: its configuration then says what was chosen, and every later start follows it."""

from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.cluster import supply
from rtrain.config import Config
from rtrain.data.stores.store import Store
from rtrain.doctor.forecast import fitting
from rtrain.errors import ConfigError, Problem
from rtrain.network import device, precision
from rtrain.strategies import ways


def decided(config: Config, chosen: device.Choice, store: Store, model: Path) -> tuple[Config, dict[str, Any] | None]:
    """The configuration with a strategy, and what the log is to say of it, if there was anything to decide.

    Where workers come and go, the fewest have room too. Raises `ConfigError` where no way fits, or where nobody says
    how much memory there is.
    """
    recipe = config.recipe
    if recipe.train.strategy == "manual":
        return config, None
    workers = recipe.train.min_workers or chosen.workers
    room = fitting.room([*supply.here(), *supply.may(chosen.device)], chosen.device, workers)
    if room is None:
        reason = f"nobody says how much memory the cluster's {supply.NEEDS[chosen.device]}s have for workers"
        fix = "write manual, with train.shard or train.tensor"
        raise ConfigError([Problem("train.strategy", "auto", reason, fix)])
    found = fitting.first(
        fitting.needs(
            recipe,
            model,
            ways.possible(recipe, model, workers),
            _passes(config, chosen, store),
            workers,
            chosen.device,
        ),
        room,
    )
    told = {
        "why": found.why,
        "settings": found.way.settings,
        "workers": workers,
        "bytes": round(room.taken(found.need)),
        "room": round(room.bytes),
    }
    return configuration.with_overrides(config, {"train.strategy": "manual", **found.way.settings}), told


def _passes(config: Config, chosen: device.Choice, store: Store) -> fitting.Pass:
    recipe, lengths = config.recipe, store.column("train", "length")
    wanted = recipe.train.precision
    # A GPU's formats other than fp32 take equally many bytes.
    known = (
        "bf16" if chosen.device == "gpu" and wanted == "auto" else precision.resolve(wanted, precision.of_processor())
    )
    return fitting.Pass(
        fitting.lengths(recipe, chosen.device, int(lengths.max())),
        known,
        max(1, len(store.manifest.labels)),
        tokens_of_update=recipe.rows_per_update * float(lengths.mean()),
    )
