"""Placement of a run on a cluster that does not exist yet, by the cluster file. Pure, and without torch.

The verdict equals that of a start on the cluster itself, before a node is billed: a layout that would never start is
refused at once, with the nearest layout that would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rtrain.cluster import capacity, placement, preflight
from rtrain.cluster.capacity import Capacity, NodeSpec, ResourceRequest
from rtrain.cluster.checks import clouds
from rtrain.cluster.checks.yaml_document import Document, require_mapping, require_number
from rtrain.cluster.instance_types import INSTANCES_BY_NAME, InstanceType
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
        stated_type = max(
            capacity.list_gpu_types(self.resources), key=len, default=None
        )  # A100-80G is more specific than A100
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
    """Read the node types of a cluster file. A type without processors and GPUs gets those of its instance type, as the
    clouds' node providers fill them in. Raises `ConfigError` if the file is not a Ray cluster file."""
    specs = document.get("available_node_types")
    if not isinstance(specs, dict) or not all(isinstance(node_spec, dict) for node_spec in specs.values()):
        reason, fix = "names no available_node_types", "write one with rtrain cluster init --cloud aws"
        raise ConfigError([Problem("--cluster", None, reason, fix, code="invalid_cluster_file")])
    provider = require_mapping(document.get("provider"), "provider").get("type")
    if provider is not None and not isinstance(provider, str):
        fix = f"write one of {', '.join(clouds.CLOUDS)}, or local"
        raise ConfigError(
            [Problem("provider.type of the cluster's file", provider, "is not a string", fix, code="wrong_type")]
        )
    cloud_configs = {node.name: node for node in clouds.iter_node_types(Document("", document, {}))}
    parsed: list[tuple[bool, NodeType]] = []
    head_type = document.get("head_node_type")
    max_nodes = int(require_number(document.get("max_workers", capacity.DEFAULT_MAX_WORKERS), "max_workers"))
    unlimited = max(max_nodes, capacity.UNLIMITED_NODES)
    for name, spec in specs.items():
        cloud_config = cloud_configs.get(name)
        instance_name = cloud_config.instance_type if cloud_config else None
        instance = INSTANCES_BY_NAME.get(instance_name or "")
        instance_resources = {"CPU": instance.cpus, "GPU": instance.gpus} if instance else {}
        resources = {key: value for key, value in instance_resources.items() if value} | require_mapping(
            spec.get("resources"), f"{name}.resources"
        )
        max_count = (
            1 if name == head_type else int(require_number(spec.get("max_workers", unlimited), f"{name}.max_workers"))
        )
        min_count = 0 if name == head_type else int(require_number(spec.get("min_workers", 0), f"{name}.min_workers"))
        amounts = {key: require_number(value, f"{name}.resources.{key}") for key, value in resources.items()}
        labels, is_spot = (
            require_mapping(spec.get("labels"), f"{name}.labels"),
            bool(cloud_config and cloud_config.is_spot),
        )
        parsed.append(
            (name == head_type, NodeType(name, amounts, labels, max_count, instance, is_spot, instance_name, min_count))
        )
    head_types = tuple(node_type for is_head, node_type in parsed if is_head)
    return PlannedCluster(
        head_types, tuple(node_type for is_head, node_type in parsed if not is_head), max_nodes, document
    )


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
            data_cpus = request.capacity_for(train.workers).data_cpus
            reason = (
                f"the cluster has capacity for {max_trials} runs of {train.workers} workers and {data_cpus} data CPUs"
            )
            raise ConfigError(
                [
                    Problem(
                        "tune.max_concurrent_trials",
                        requested_trials,
                        reason,
                        f"write {max_trials}, or fewer train.workers",
                        code="insufficient_capacity",
                    )
                ]
            )
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
        return (
            offered
            if slots_in_memory is None
            else offered._replace(worker_slots=min(offered.worker_slots, slots_in_memory(node_type)))
        )

    head_capacity = Capacity(*map(sum, zip(Capacity(0, 0, 0), *map(offered_capacity, cluster.head_types), strict=True)))
    capacities, max_counts = (
        [offered_capacity(node_type) for node_type in cluster.node_types],
        [node_type.max_nodes for node_type in cluster.node_types],
    )
    missing, prices = required.minus(head_capacity), [price_of(node_type) for node_type in cluster.node_types]
    priced_counts = [number if cost is not None else 0 for number, cost in zip(max_counts, prices, strict=True)]
    counts = placement.cheapest_node_counts(
        capacities, priced_counts, cluster.max_nodes, missing, [cost or 0.0 for cost in prices]
    )
    if counts is None and None in prices:
        counts = placement.cheapest_node_counts(
            capacities, max_counts, cluster.max_nodes, missing, [1.0] * len(capacities)
        )
    if counts is None:
        return None
    return {node_type.name: count for node_type, count in zip(cluster.node_types, counts, strict=True) if count}
