"""What an hour of a node costs, and how often a spot node is taken away: a table that the user edits.

Without a file (`cluster.prices`), prices on demand are those of `cluster.instances` and of the cluster's file
(`metadata: {prices: ...}`). A plan, a run's report and a search's budget count by the same table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from rtrain.cluster.checks.yaml_document import mapping, number
from rtrain.cluster.instance_types import INSTANCES
from rtrain.core.errors import ConfigError, Problem

WORKER: Final = "worker"
"""The name by which a file has the price of a worker's hour."""
SPOT: Final = 0.4
"""Spot price as a share of that on demand, where no file says it: an assumption. It changes by the hour."""
INTERRUPTIONS: Final = 0.01
"""How often a spot node is taken away in an hour, where no file says it: an assumption, once in four days. Clouds
publish less than 5 % to more than 20 % in a month by type, and GPUs are taken more often."""


@dataclass(frozen=True)
class Price:
    """What an hour of a node costs."""

    on_demand: float
    spot: float
    interruptions: float
    """Expected in an hour of a spot node."""

    def hourly(self, *, is_spot: bool) -> float:
        return self.spot if is_spot else self.on_demand


def table(file: Path | None = None, metadata: Mapping[str, Any] | None = None) -> dict[str, Price]:
    """Prices by name of the instance type: list prices, replaced by `user_prices`. Raises `ConfigError`."""
    return {one.name: of(one.dollars) for one in INSTANCES} | user_prices(file, metadata)


def user_prices(file: Path | None, metadata: Mapping[str, Any] | None) -> dict[str, Price]:
    """The user's prices: those of a cluster's file, by its `metadata`, replaced by those of the file of prices. Raises
    `ConfigError` with every entry that is no price."""
    prices = mapping(mapping(metadata, "metadata").get("prices"), "metadata.prices")
    found = {str(name): of(number(dollars, f"metadata.prices.{name}")) for name, dollars in prices.items()}
    return found if file is None else found | read(file)


def of(on_demand: float, spot: float | None = None, interruptions: float | None = None) -> Price:
    return Price(
        on_demand,
        SPOT * on_demand if spot is None else spot,
        INTERRUPTIONS if interruptions is None else interruptions,
    )


NAMES: Final = ("on_demand", "spot", "interruptions")


def read(file: Path) -> dict[str, Price]:
    """The prices of a YAML file: for each instance type `on_demand`, and perhaps `spot` and `interruptions`. What is
    there by the name `worker` is the price of a worker's hour, whatever it runs on. Raises `ConfigError`."""
    if not file.is_file():
        fix = "write one with rtrain plan --write-prices FILE, or name none: --set cluster.prices=null"
        raise ConfigError([Problem("cluster.prices", str(file), "no such file", fix, code="not_found")])
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: other bytes, a date that the calendar has not
        raise ConfigError(
            [Problem("cluster.prices", str(file), f"no YAML ({error})", "write it again", code="unreadable")]
        ) from None
    found: dict[str, Price] = {}
    problems: list[Problem] = []
    for name, entry in (document if isinstance(document, dict) else {None: document}).items():
        entry = entry if isinstance(entry, dict) else {}
        sound = "on_demand" in entry and entry.keys() <= set(NAMES) and all(map(_is_price, entry.values()))
        if sound:
            found[str(name)] = of(**entry)
        else:
            reason = f"{name} has no numbers from 0 on by the names {', '.join(NAMES)}, the first of which it needs"
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
    return found


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


HEAD: Final = """\
# Prices for `rtrain plan --prices` and for the setting `cluster.prices`: by instance type, in dollars an hour.
#   on_demand      as listed; AWS in us-west-2, Google in us-central1, Azure in westus2
#   spot           an assumption: {spot:g} of it. Look it up, it changes by the hour and the zone
#   interruptions  how often a spot node is taken away in an hour: an assumption
# On machines of your own, write what an hour of one worker costs: worker: {{on_demand: 0.04}}
"""


def text(prices: Mapping[str, Price]) -> str:
    """The table as a file that `read` takes."""
    lines = [
        f"{name}: {{on_demand: {price.on_demand:g}, spot: {round(price.spot, 4):g}, "
        f"interruptions: {price.interruptions:g}}}"
        for name, price in prices.items()
    ]
    return HEAD.format(spot=SPOT) + "\n".join(lines) + "\n"
