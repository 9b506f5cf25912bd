"""What a run on some nodes costs: hours by prices, and what spot nodes add to them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from rtrain.cluster.prices import Price


@dataclass(frozen=True)
class Cost:
    """What a run on some nodes costs."""

    hours: float
    dollars: float
    """On demand."""
    spot_dollars: float | None = None
    """With the workers' nodes as spot nodes, and the head on demand; None, as what follows, where these are taken away
    faster than the run gets on."""
    interruptions: float | None = None
    """Expected where the workers' nodes are spot nodes."""
    repeated_hours: float | None = None
    """What these add to the hours: updates that are trained again, and nodes that are waited for."""


def cost(
    hours: float,
    nodes: Mapping[str, tuple[int, Price]],
    head: Price | None,
    *,
    repeats_s: float,
    restart_s: float,
) -> Cost:
    """`nodes`: by type how many workers' nodes there are, and their price. An interruption repeats `repeats_s` of
    training and takes `restart_s` until it goes on; meanwhile all nodes are paid for."""
    rate = sum(number * price.interruptions for number, price in nodes.values())
    repeated = rate * (repeats_s + restart_s) / 3600
    of_head = head.on_demand if head else 0.0
    on_demand = of_head + sum(number * price.on_demand for number, price in nodes.values())
    if repeated >= 1:
        return Cost(hours, hours * on_demand)
    # Hours that are repeated are interrupted too: a geometric series.
    added = hours * repeated / (1 - repeated)
    spot = of_head + sum(number * price.spot for number, price in nodes.values())
    return Cost(hours, hours * on_demand, (hours + added) * spot, rate * (hours + added), added)
