"""Placement of a run on a cluster that does not exist yet, by the cluster file. Pure, and without torch.

The verdict equals that of a start on the cluster itself, before a node is billed: a layout that would never start is
refused at once, with the nearest layout that would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rtrain.cluster import capacity, cluster_file, placement, preflight
from rtrain.cluster.capacity import Capacity, NodeSpec, ResourceRequest
from rtrain.cluster.cluster_file import InstanceType, require_mapping
from rtrain.cluster.pricing import WORKER_KEY, Price
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem
from rtrain.models import device


@dataclass(frozen=True)
class NodeType:
    """A node type that the autoscaler may start."""

    name: str
    resources: capacity.NodeResources
    labels: capacity.Labels
    max_nodes: int
    instance: InstanceType | None
    """The instance type; None if it is not in the table."""
    is_spot: bool
    instance_name: str | None = None
    """The cloud's name of the instance type, the key of the price table; None on machines outside a cloud."""
    min_nodes: int = 0
    """Nodes that are always up, and billed."""

    @property
    def node_spec(self) -> NodeSpec:
        return NodeSpec(self.resources, self.labels)

    @property
    def display_name(self) -> str:
        return self.instance_name or self.name

    @property
    def gpu_type(self) -> str:
        """The GPU model: from the resources, else from the instance table, else the display name."""
        # A100-80G is more specific than A100.
        stated_type = max(capacity.list_gpu_types(self.resources), key=len, default=None)
        return stated_type or (self.instance and self.instance.gpu) or self.display_name


@dataclass(frozen=True)
class PlannedCluster:
    head_types: tuple[NodeType, ...]
    node_types: tuple[NodeType, ...]
    max_nodes: int
    """Maximum number of worker nodes."""
    document: Mapping[str, Any]
    """The cluster file."""

    @property
    def autoscaler_limits(self) -> capacity.AutoscalerLimits:
        """Nodes that the autoscaler may start."""
        node_types = {node_type.name: (node_type.node_spec, node_type.max_nodes) for node_type in self.node_types}
        return capacity.AutoscalerLimits(
            [node_type.node_spec for node_type in self.head_types], node_types, self.max_nodes
        )


def parse_cluster(document: Mapping[str, Any]) -> PlannedCluster:
    """Read the node types of a cluster file, with resources as the autoscaler counts them (`NodeType.resources` of
    `cluster_file`). Raises `ConfigError` if the file is not a Ray cluster file."""
    specs = document.get("available_node_types")
    if not isinstance(specs, dict) or not all(isinstance(node_spec, dict) for node_spec in specs.values()):
        reason, fix = "names no available_node_types", "write one with rtrain cluster init --cloud aws"
        raise ConfigError([Problem("--cluster", None, reason, fix, code="invalid_cluster_file")])
    provider = require_mapping(document.get("provider"), "provider").get("type")
    if provider is not None and not isinstance(provider, str):
        fix = f"write one of {', '.join(cluster_file.CLOUDS)}, or local"
        raise ConfigError(
            [Problem("provider.type of the cluster's file", provider, "is not a string", fix, code="wrong_type")]
        )
    file = cluster_file.ClusterFile.from_mapping(document)
    unlimited = max(file.max_workers, capacity.UNLIMITED_NODES)
    head_types, node_types = (
        tuple(
            NodeType(
                node.name,
                node.resources,
                node.labels,
                1 if is_head else node.max_workers(unlimited),
                node.instance,
                node.is_spot,
                node.instance_type,
                node.min_workers,
            )
            for node in file.node_types
            if node.is_head == is_head
        )
        for is_head in (True, False)
    )
    return PlannedCluster(head_types, node_types, file.max_workers, document)


@dataclass(frozen=True)
class PlacementPlan:
    """Resources that a run takes of a cluster."""

    request: ResourceRequest
    device_choice: device.DeviceChoice
    """The device, and the requested number of workers."""
    available_workers: int
    """Workers that the cluster has capacity for, if that is less than requested."""
    min_workers: int
    """Minimum number of workers."""
    concurrent_trials: int = 1
    """Number of concurrent runs."""

    @property
    def device(self) -> str:
        return self.device_choice.device

    @property
    def workers(self) -> int:
        return self.device_choice.workers

    @property
    def data_cpus(self) -> int:
        """CPUs of the data tasks."""
        return self.request.capacity_for(self.available_workers).data_cpus

    @property
    def required(self) -> Capacity:
        """Capacity that all concurrent runs need."""
        return self.request.capacity_for(self.available_workers, self.concurrent_trials)


def plan_placement(config: Config, cluster: PlannedCluster, *, is_search: bool = False) -> PlacementPlan:
    """Place a run, or a search (`is_search`), on the cluster. Raises `ConfigError` if it would never start, with the
    message of a start on the cluster."""
    train, limits, gpu_request = (
        config.recipe.train,
        cluster.autoscaler_limits,
        capacity.resource_request_from_config(config, "gpu"),
    )
    gpu_count = capacity.count_worker_slots(capacity.reachable_nodes(limits, "gpu", gpu_request.labels), "gpu")
    available_workers = gpu_count and placement.max_workers([], limits, gpu_request, train.workers)
    device_choice = device.choose_device(
        train.device, train.workers, train.min_workers, gpu_count, gpus_usable=True, placeable_workers=available_workers
    )
    request = gpu_request if device_choice.device == "gpu" else capacity.resource_request_from_config(config, "cpu")
    if problems := preflight.check_capacity(config.recipe, request, [], limits):
        raise ConfigError(problems)
    concurrent_trials = 1
    if is_search:
        max_trials = max(1, placement.max_concurrent_runs([], limits, request, train.workers))
        requested_trials = config.deploy.tune.max_concurrent_trials
        if requested_trials is not None and requested_trials > max_trials:
            runs = f"{max_trials} runs of {train.workers} workers"
            reason = (
                f"the cluster has capacity for {runs} and {request.capacity_for(train.workers).data_cpus} data CPUs"
            )
            fix, code = f"write {max_trials}, or fewer train.workers", "insufficient_capacity"
            raise ConfigError([Problem("tune.max_concurrent_trials", requested_trials, reason, fix, code=code)])
        concurrent_trials = requested_trials or max_trials
    available_workers = placement.max_workers([], limits, request, device_choice.workers)
    return PlacementPlan(
        request, device_choice, available_workers, train.min_workers or device_choice.workers, concurrent_trials
    )


# ------------------------------------------------------------------------------------------------------- node counts


PriceFunction = Callable[[NodeType], float | None]
SlotFunction = Callable[[NodeType], int]
NodeCounts = Mapping[str, int]
"""Number of nodes by type name."""


def cheapest_nodes(
    cluster: PlannedCluster,
    request: ResourceRequest,
    required: Capacity,
    price_of: PriceFunction = lambda node_type: 1.0,
    slots_in_memory: SlotFunction | None = None,
) -> NodeCounts | None:
    """Find the cheapest nodes with capacity for `required`, which is a multiple of `request`; None if impossible.

    Args:
        price_of: Price of a node of a type; 1 by default; None if unknown. A type without a price is used only if the
            priced types lack capacity; the node count is minimized then, since the sum is unknown.
        slots_in_memory: Number of workers that a node's memory holds; None skips the check.
    """

    def offered_capacity(node_type: NodeType) -> Capacity:
        offered = request.capacity_of([node_type.node_spec])
        if slots_in_memory is None:
            return offered
        return offered._replace(worker_slots=min(offered.worker_slots, slots_in_memory(node_type)))

    head_capacity = Capacity(*map(sum, zip(Capacity(0, 0, 0), *map(offered_capacity, cluster.head_types), strict=True)))
    capacities = [offered_capacity(node_type) for node_type in cluster.node_types]
    max_counts = [node_type.max_nodes for node_type in cluster.node_types]
    missing, prices = required.minus(head_capacity), [price_of(node_type) for node_type in cluster.node_types]
    priced_counts = [number if cost is not None else 0 for number, cost in zip(max_counts, prices, strict=True)]
    known_prices, equal_prices = [cost or 0.0 for cost in prices], [1.0] * len(prices)
    limit, choose_counts = cluster.max_nodes, placement.cheapest_node_counts
    counts = choose_counts(capacities, priced_counts, limit, missing, known_prices)
    if counts is None and None in prices:
        counts = choose_counts(capacities, max_counts, limit, missing, equal_prices)
    if counts is None:
        return None
    return {node_type.name: count for node_type, count in zip(cluster.node_types, counts, strict=True) if count}


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
    total_hours = hours + added_hours
    spot_dollars = total_hours * (head_rate + sum(number * price.spot for number, price in nodes.values()))
    return RunCost(hours, hours * hourly_rate, spot_dollars, interruption_rate * total_hours, added_hours)


def worker_price(config: Config, table: Mapping[str, Price]) -> float | None:
    """Price of a worker hour: `tune.worker_cost_per_hour`, else the price table; None if neither has one. Reports and
    search budgets use the same price."""
    return config.deploy.tune.worker_cost_per_hour or (table[WORKER_KEY].on_demand if WORKER_KEY in table else None)


def cost_per_worker_hour(hours: float, workers: int, price: float) -> RunCost:
    """Cost of `workers` workers at `price` per worker hour."""
    return RunCost(hours, hours * workers * price, is_per_worker=True)


def billed_nodes(cluster: PlannedCluster, nodes: NodeCounts) -> dict[str, int]:
    """Worker nodes that are billed: the nodes of the run and the nodes that `min_workers` keeps up."""
    counts = {kind.name: max(nodes.get(kind.name, 0), kind.min_nodes) for kind in cluster.node_types}
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
    head_price = head_prices[0] if head_prices else None
    return estimate_cost(hours, priced_nodes, head_price, repeated_s=repeated_s, restart_s=restart_s)
