"""How the model lies on a run's workers, where `train.strategy=auto` leaves it to the forecast of memory. Decided when
the run is made: its configuration then says what was chosen, and every later start follows it."""

from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.cluster import capacity
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.store.store import Store
from rtrain.models import device, precision
from rtrain.parallel import layout
from rtrain.planning import memory_fit


def decided(config: Config, chosen: device.Choice, store: Store, model: Path) -> tuple[Config, dict[str, Any] | None]:
    """The configuration with a strategy, and what the log is to say of it, if there was anything to decide.

    Where workers come and go, the fewest have room too. Raises `ConfigError` where no way fits, or where nobody says
    how much memory there is.
    """
    recipe = config.recipe
    if recipe.train.strategy == "manual":
        return config, None
    labels = config.deploy.cluster.labels
    nodes = [*capacity.here(labels), *capacity.types(labels).values()]
    passes = _passes(config, chosen, store)

    def fits(workers: int) -> tuple[memory_fit.Choice, dict[str, Any]]:
        room = memory_fit.room(nodes, chosen.device, workers)
        if room is None:
            reason = f"nobody says how much memory the cluster's {capacity.NEEDS[chosen.device]}s have for workers"
            fix = "write manual, with train.shard or train.tensor"
            raise ConfigError([Problem("train.strategy", "auto", reason, fix, code="unknown_memory")])
        tried = layout.possible(recipe, model, workers)
        found = memory_fit.first(memory_fit.needs(recipe, model, tried, passes, workers, chosen.device), room)
        taken = {"bytes": round(room.taken(found.need)), "room": round(room.bytes)}
        return found, {"why": found.why, "settings": found.way.settings, "workers": workers, **taken}

    # The fewest have the largest shares, all of them crowd a node, and as many as fill a node take most of it.
    least = recipe.train.min_workers or chosen.workers
    filling = (capacity.count([node], chosen.device) for node in nodes)
    numbers = {least, chosen.workers, *(min(max(number, least), chosen.workers) for number in filling)}
    found = [fits(workers) for workers in sorted(numbers)]
    way = layout.joined([choice.way for choice, _ in found])
    told = next((told for choice, told in found if choice.way == way), found[-1][1])
    return configuration.with_overrides(config, {"train.strategy": "manual", **way.settings}), told | {
        "settings": way.settings
    }


def _passes(config: Config, chosen: device.Choice, store: Store) -> memory_fit.Pass:
    recipe, lengths = config.recipe, store.column("train", "length")
    wanted = recipe.train.precision
    # A GPU's formats other than fp32 take equally many bytes.
    known = "bf16" if chosen.device == "gpu" and wanted == "auto" else precision.here(wanted)
    return memory_fit.Pass(
        memory_fit.lengths(recipe, chosen.device, int(lengths.max())),
        known,
        max(1, len(store.manifest.labels)),
        tokens_of_update=recipe.rows_per_update * float(lengths.mean()),
    )
