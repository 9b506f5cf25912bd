"""Hourly prices and interruption rates of nodes: a table that the user may edit.

Without a file (`cluster.prices`), prices are those of `cluster.instance_types` and of the cluster file (`metadata:
{prices: ...}`). Plans, reports and search budgets use the same table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from rtrain.cluster.cluster_file import INSTANCES, require_mapping, require_number
from rtrain.core.errors import ConfigError, Problem

WORKER_KEY: Final = "worker"
"""Key of the price of a worker hour."""
DEFAULT_SPOT_RATIO: Final = 0.4
"""Spot price as a share of the on-demand price, an assumption for types without a price. It changes hourly."""
DEFAULT_INTERRUPTION_RATE: Final = 0.01
"""Interruptions of a spot node per hour, an assumption: once in four days. Clouds publish less than 5 % to more than 20
% per month by type; GPUs are interrupted more often."""


@dataclass(frozen=True)
class Price:
    on_demand: float
    spot: float
    interruptions: float
    """Expected interruptions per spot node and hour."""

    def hourly_price(self, *, is_spot: bool) -> float:
        return self.spot if is_spot else self.on_demand


def load_price_table(file: Path | None = None, metadata: Mapping[str, Any] | None = None) -> dict[str, Price]:
    """Prices by instance type: list prices, overridden by `load_user_prices`. Raises `ConfigError`."""
    list_prices = {instance.name: make_price(instance.dollars_per_hour) for instance in INSTANCES}
    return list_prices | load_user_prices(file, metadata)


def load_user_prices(file: Path | None, metadata: Mapping[str, Any] | None) -> dict[str, Price]:
    """The user's prices: from the `metadata` of a cluster file, overridden by the price file. Raises `ConfigError` for
    every invalid entry."""
    entries = require_mapping(require_mapping(metadata, "metadata").get("prices"), "metadata.prices")
    prices = {
        str(name): make_price(require_number(dollars, f"metadata.prices.{name}")) for name, dollars in entries.items()
    }
    return prices if file is None else prices | read_price_file(file)


def make_price(on_demand: float, spot: float | None = None, interruptions: float | None = None) -> Price:
    return Price(
        on_demand,
        DEFAULT_SPOT_RATIO * on_demand if spot is None else spot,
        DEFAULT_INTERRUPTION_RATE if interruptions is None else interruptions,
    )


PRICE_KEYS: Final = ("on_demand", "spot", "interruptions")


def read_price_file(file: Path) -> dict[str, Price]:
    """Read the prices of a YAML file: for each instance type `on_demand`, optionally `spot` and `interruptions`. The
    entry `worker` is the price of a worker hour on any node. Raises `ConfigError`."""
    if not file.is_file():
        fix = "write one with rtrain plan --write-prices FILE, or name none: --set cluster.prices=null"
        raise ConfigError([_file_problem(file, "no such file", fix, "not_found")])
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid bytes or dates
        raise ConfigError([_file_problem(file, f"no YAML ({error})", "write it again", "unreadable")]) from None
    entries = document if isinstance(document, dict) else {None: document}
    problems = [
        _file_problem(
            file,
            f"{name} needs non-negative numbers {', '.join(PRICE_KEYS)}; {PRICE_KEYS[0]} is required",
            f"write {name}: {{on_demand: 1.00, spot: 0.40}}",
            "wrong_type",
        )
        for name, entry in entries.items()
        if not _is_entry(entry)
    ]
    if problems:
        raise ConfigError(problems)
    return {str(name): make_price(**entry) for name, entry in entries.items()}


def _file_problem(file: Path, reason: str, fix: str, code: str) -> Problem:
    return Problem("cluster.prices", str(file), reason, fix, code=code)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or "on_demand" not in entry or not entry.keys() <= set(PRICE_KEYS):
        return False
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        for value in entry.values()
    )


FILE_HEADER: Final = """\
# Prices for `rtrain plan --prices` and for the setting `cluster.prices`: by instance type, in dollars an hour.
#   on_demand      as listed; AWS in us-west-2, Google in us-central1, Azure in westus2
#   spot           an assumption: {spot:g} of it. It changes by the hour and the zone
#   interruptions  interruptions of a spot node per hour: an assumption
# On your own machines, write the price of a worker hour: worker: {{on_demand: 0.04}}
"""


def format_price_file(prices: Mapping[str, Price]) -> str:
    """Format the table as a file for `read_price_file`."""
    lines = [
        f"{name}: {{on_demand: {price.on_demand:g}, spot: {round(price.spot, 4):g}, "
        f"interruptions: {price.interruptions:g}}}"
        for name, price in prices.items()
    ]
    return FILE_HEADER.format(spot=DEFAULT_SPOT_RATIO) + "\n".join(lines) + "\n"
