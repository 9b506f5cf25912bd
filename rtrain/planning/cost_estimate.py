"""Cost of a run: hours times prices, and the overhead of spot interruptions. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rtrain.cluster.pricing import WORKER_KEY, Price
from rtrain.config import Config
from rtrain.planning.placement import NodeCounts, PlannedCluster


@dataclass(frozen=True)
class RunCost:
    """Cost of a run on given nodes."""

    hours: float
    dollars: float
    """On demand."""
    spot_dollars: float | None = None
    """Cost with spot workers and an on-demand head. None, like the next two fields, if interruptions outpace the
    training, or if `is_per_worker`."""
    interruptions: float | None = None
    """Expected number of interruptions on spot nodes."""
    repeated_hours: float | None = None
    """Hours that interruptions add: repeated steps and restarts."""
    is_per_worker: bool = False
    """Whether the cost is based on the price of a worker hour instead of node prices."""


def estimate_cost(
    hours: float,
    nodes: Mapping[str, tuple[int, Price]],
    head_price: Price | None,
    *,
    repeated_s: float,
    restart_s: float,
) -> RunCost:
    """Estimate the cost on demand and on spot nodes. `nodes` maps a type to the number of worker nodes and their price.
    An interruption repeats `repeated_s` of training and takes `restart_s`; all nodes are billed meanwhile."""
    interruption_rate = sum(number * price.interruptions for number, price in nodes.values())
    repeated_share = interruption_rate * (repeated_s + restart_s) / 3600
    head_rate = head_price.on_demand if head_price else 0.0
    hourly_rate = head_rate + sum(number * price.on_demand for number, price in nodes.values())
    if repeated_share >= 1:
        return RunCost(hours, hours * hourly_rate)
    # Repeated hours are interrupted too: a geometric series.
    added_hours = hours * repeated_share / (1 - repeated_share)
    spot_rate = head_rate + sum(number * price.spot for number, price in nodes.values())
    return RunCost(
        hours,
        hours * hourly_rate,
        (hours + added_hours) * spot_rate,
        interruption_rate * (hours + added_hours),
        added_hours,
    )


def worker_price(config: Config, table: Mapping[str, Price]) -> float | None:
    """Price of a worker hour: `tune.worker_cost_per_hour`, else the price table; None if neither has one. Reports and
    search budgets use the same price."""
    return config.deploy.tune.worker_cost_per_hour or (table[WORKER_KEY].on_demand if WORKER_KEY in table else None)


def cost_per_worker_hour(hours: float, workers: int, price: float) -> RunCost:
    """Cost of `workers` workers at `price` per worker hour."""
    return RunCost(hours, hours * workers * price, is_per_worker=True)


def billed_nodes(cluster: PlannedCluster, nodes: NodeCounts) -> dict[str, int]:
    """Worker nodes that are billed: the nodes of the run and the nodes that `min_workers` keeps up."""
    counts = {
        node_type.name: max(nodes.get(node_type.name, 0), node_type.min_nodes) for node_type in cluster.node_types
    }
    return {name: number for name, number in counts.items() if number}


def idle_node_notes(cluster: PlannedCluster, nodes: NodeCounts) -> list[str]:
    """Notes about nodes that are billed although the run does not need them."""
    extra_nodes = {name: number - nodes.get(name, 0) for name, number in billed_nodes(cluster, nodes).items()}
    return [
        f"{number} more nodes of type {name} are kept up by min_workers and billed"
        for name, number in extra_nodes.items()
        if number
    ]


def node_cost(
    cluster: PlannedCluster,
    nodes: NodeCounts,
    table: Mapping[str, Price],
    hours: float,
    *,
    repeated_s: float,
    restart_s: float,
) -> RunCost | None:
    """Cost of a run on `nodes` by the prices of their types; the other parameters as in `estimate_cost`. None if the
    price of a node or of the head is unknown."""
    priced_nodes = dict[str, tuple[int, Price]]()
    instance_names = {node_type.name: node_type.instance_name for node_type in cluster.node_types}
    for name, number in billed_nodes(cluster, nodes).items():
        price = table.get(instance_names[name] or "")
        if price is None:
            return None
        # Losing a node that the run does not use repeats nothing.
        run_share = nodes.get(name, 0) / number
        priced_nodes[name] = number, replace(price, interruptions=price.interruptions * run_share)
    head_prices = [table.get(node_type.instance_name or "") for node_type in cluster.head_types]
    if None in head_prices:
        return None
    return estimate_cost(
        hours, priced_nodes, head_prices[0] if head_prices else None, repeated_s=repeated_s, restart_s=restart_s
    )
