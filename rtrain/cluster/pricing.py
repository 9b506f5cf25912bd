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

from rtrain.cluster.checks.yaml_document import require_mapping, require_number
from rtrain.cluster.instance_types import INSTANCES
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
    """Hourly price of a node."""

    on_demand: float
    spot: float
    interruptions: float
    """Expected interruptions per spot node and hour."""

    def hourly_price(self, *, is_spot: bool) -> float:
        return self.spot if is_spot else self.on_demand


def load_price_table(file: Path | None = None, metadata: Mapping[str, Any] | None = None) -> dict[str, Price]:
    """Prices by instance type: list prices, overridden by `load_user_prices`. Raises `ConfigError`."""
    return {instance.name: make_price(instance.dollars_per_hour) for instance in INSTANCES} | load_user_prices(
        file, metadata
    )


def load_user_prices(file: Path | None, metadata: Mapping[str, Any] | None) -> dict[str, Price]:
    """The user's prices: from the `metadata` of a cluster file, overridden by the price file. Raises `ConfigError` for
    every invalid entry."""
    metadata_prices = require_mapping(require_mapping(metadata, "metadata").get("prices"), "metadata.prices")
    parsed_prices = {
        str(name): make_price(require_number(dollars, f"metadata.prices.{name}"))
        for name, dollars in metadata_prices.items()
    }
    return parsed_prices if file is None else parsed_prices | read_price_file(file)


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
        raise ConfigError([Problem("cluster.prices", str(file), "no such file", fix, code="not_found")])
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid bytes or dates
        raise ConfigError(
            [Problem("cluster.prices", str(file), f"no YAML ({error})", "write it again", code="unreadable")]
        ) from None
    prices: dict[str, Price] = {}
    problems: list[Problem] = []
    for name, entry in (document if isinstance(document, dict) else {None: document}).items():
        entry = entry if isinstance(entry, dict) else {}
        is_valid = "on_demand" in entry and entry.keys() <= set(PRICE_KEYS) and all(map(_is_price, entry.values()))
        if is_valid:
            prices[str(name)] = make_price(**entry)
        else:
            reason = f"{name} needs non-negative numbers {', '.join(PRICE_KEYS)}; {PRICE_KEYS[0]} is required"
            problems.append(
                Problem(
                    "cluster.prices",
                    str(file),
                    reason,
                    f"write {name}: {{on_demand: 1.00, spot: 0.40}}",
                    code="wrong_type",
                )
            )
    if problems:
        raise ConfigError(problems)
    return prices


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


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
