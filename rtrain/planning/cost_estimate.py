"""What a run on some nodes costs: hours by prices, and what spot nodes add to them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rtrain.cluster.pricing import WORKER, Price
from rtrain.config import Config
from rtrain.planning.placement import Cluster, Nodes


@dataclass(frozen=True)
class Cost:
    """What a run on some nodes costs."""

    hours: float
    dollars: float
    """On demand."""
    spot_dollars: float | None = None
    """With the workers' nodes as spot nodes, and the head on demand; None, as what follows, where these are taken away
    faster than the run gets on, and `of_workers`."""
    interruptions: float | None = None
    """Expected where the workers' nodes are spot nodes."""
    repeated_hours: float | None = None
    """What these add to the hours: updates that are trained again, and nodes that are waited for."""
    of_workers: bool = False
    """By the price of a worker's hour, whatever it runs on."""


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


def worker_price(config: Config, table: Mapping[str, Price]) -> float | None:
    """What an hour of a worker costs, whatever it runs on: by `tune.price`, else by the table; None where neither says
    it. A run's report and a search's budget count by the same."""
    return config.deploy.tune.price or (table[WORKER].on_demand if WORKER in table else None)


def of_workers(hours: float, workers: int, price: float) -> Cost:
    """The cost of so many workers by the `price` of an hour of one."""
    return Cost(hours, hours * workers * price, of_workers=True)


def up(cluster: Cluster, nodes: Nodes) -> dict[str, int]:
    """Workers' nodes that are paid for: those of a run, and those that are up without it."""
    found = {kind.name: max(nodes.get(kind.name, 0), kind.least) for kind in cluster.kinds}
    return {name: number for name, number in found.items() if number}


def idle(cluster: Cluster, nodes: Nodes) -> list[str]:
    """What is to be said of nodes that are paid for although the run needs none of them."""
    more = {name: number - nodes.get(name, 0) for name, number in up(cluster, nodes).items()}
    return [
        f"{number} more of {name} are up whatever runs (min_workers), and paid for"
        for name, number in more.items()
        if number
    ]


def of_nodes(
    cluster: Cluster, nodes: Nodes, table: Mapping[str, Price], hours: float, *, repeats_s: float, restart_s: float
) -> Cost | None:
    """The cost of a run on `nodes` of a cluster, by the prices of their types; the rest as in `cost`. None where the
    price of a node is not known, the head included."""
    paid = dict[str, tuple[int, Price]]()
    types = {kind.name: kind.type for kind in cluster.kinds}
    for name, number in up(cluster, nodes).items():
        price = table.get(types[name] or "")
        if price is None:
            return None
        # Nothing is repeated where a node is taken away that the run is not on.
        share = nodes.get(name, 0) / number
        paid[name] = number, replace(price, interruptions=price.interruptions * share)
    heads = [table.get(kind.type or "") for kind in cluster.heads]
    if None in heads:
        return None
    return cost(hours, paid, heads[0] if heads else None, repeats_s=repeats_s, restart_s=restart_s)
