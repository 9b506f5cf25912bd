"""Capacity of a Ray cluster for a run's workers: the nodes' resources, the free resources, and the nodes that its
autoscaler may add.

A node is a map from resource name (`CPU`, `GPU`) to amount. The first part counts, and is pure; the second part queries
the connected Ray cluster. `cluster.placement` decides how many nodes of each type may be up together.
"""

import bisect
import json
import operator
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from rtrain import ray_internals
from rtrain.cluster.cluster_file import ClusterFile
from rtrain.cluster.data_tasks import resolve_data_cpus
from rtrain.core.errors import Problem, UserError

if TYPE_CHECKING:
    from rtrain.config import Config

NodeResources = Mapping[str, float]
Labels = Mapping[str, str]
ANY_LABELS: Labels = MappingProxyType({})
"""No required labels: every node matches."""
WORKER_RESOURCE = {"cpu": "CPU", "gpu": "GPU"}
"""Resource that a worker takes, by its device. A worker with a GPU, or a fraction of one, takes no CPU."""
RESOURCE_TOLERANCE = 1e-6
"""Ray counts resources in ten-thousandths: three thirds of a GPU are one GPU."""
AUTOSCALER_FILE_VARIABLE = "RTRAIN_AUTOSCALER_FILE"
"""Environment variable with the path of the autoscaler's file, which `connection.on_node_start` sets on the head, or
with the file's node types as JSON, as Kubernetes manifests set it. Ray itself (2.60) knows the limits only if its
manager reports them; neither its launcher nor KubeRay does."""
UNLIMITED_NODES = 1000
"""Maximum number of nodes of a type without a limit."""
SPOT_LABELS: Labels = MappingProxyType({"ray.io/market-type": "spot"})
"""Ray's label of spot nodes."""
LOST_NODE_POLL_S, CONNECT_TIMEOUT_S = 1.0, 1.5
"""Seconds between two checks for lost nodes, and timeout of a connection to a node."""


# ------------------------------------------------------------------------------------------------------------- counting


def count_worker_slots(nodes: Iterable[NodeResources], device: str) -> int:
    """Count the workers that fit on the nodes, without data tasks. A worker needs a whole CPU or GPU of one node."""
    return sum(int(node.get(WORKER_RESOURCE[device], 0.0)) for node in nodes)


ACCELERATOR_PREFIX: Final = "accelerator_type:"
"""Prefix of Ray's resource name for a GPU model."""


def list_gpu_types(node: NodeResources) -> list[str]:
    """The GPU models of a node, as Ray names them: `A100`, and also `A100-80G` if it is declared."""
    return [name.removeprefix(ACCELERATOR_PREFIX) for name in node if name.startswith(ACCELERATOR_PREFIX)]


class NodeSpec(NamedTuple):
    """A live node, or a node of a type that may be started."""

    resources: NodeResources
    labels: Labels = ANY_LABELS


class Capacity(NamedTuple):
    """Capacity that nodes offer, or that runs require."""

    worker_slots: int
    """Worker slots, on nodes with the workers' labels."""
    data_cpus: int
    """CPUs of nodes that data tasks may use."""
    shared_cpus: int
    """CPUs of nodes that both may use; 0 if workers take GPUs."""

    def covers(self, required: "Capacity") -> bool:
        return all(map(operator.ge, self, required))

    def minus(self, subtracted: "Capacity") -> "Capacity":
        """Subtract another capacity; results may be negative."""
        return Capacity(*map(operator.sub, self, subtracted))


class ResourceRequest(NamedTuple):
    """Resources that the workers and data tasks of a run need."""

    device: str = "cpu"
    data_cpus: int | None = None
    """The setting `cluster.data_cpus`."""
    labels: Labels = ANY_LABELS
    data_labels: Labels = ANY_LABELS
    """Labels that nodes must have for workers, and for data tasks."""
    gpu_share: float = 1.0
    """Fraction of a GPU per worker; a worker without a GPU takes a CPU."""

    def worker_slots(self, node: NodeResources) -> int:
        """Number of workers that fit on the node. A worker never spans two GPUs."""
        amount = node.get(WORKER_RESOURCE[self.device], 0.0)
        if self.gpu_share == 1:
            return int(amount)
        whole_gpus = int(amount)  # a fraction remains of a GPU that others share
        return whole_gpus * self._shares(1.0) + self._shares(amount - whole_gpus)

    def _shares(self, gpus: float) -> int:
        return int(gpus / self.gpu_share + RESOURCE_TOLERANCE)

    def capacity_for(self, workers: int, runs: int = 1) -> Capacity:
        """Capacity that `runs` runs of `workers` workers need."""
        data_cpus = resolve_data_cpus(self.data_cpus, workers)
        return Capacity(runs * workers, runs * data_cpus, runs * (workers + data_cpus) if self.device == "cpu" else 0)

    def capacity_of(self, nodes: Iterable[NodeSpec]) -> Capacity:
        """Capacity of the nodes. Workers and data tasks fit if all three numbers suffice: only CPUs serve both."""
        worker_slots = data_cpus = shared_cpus = 0
        for node in nodes:
            node_slots = self.worker_slots(node.resources) if matches_labels(node.labels, self.labels) else 0
            has_data_labels = matches_labels(node.labels, self.data_labels)
            node_data_cpus = count_worker_slots([node.resources], "cpu") if has_data_labels else 0
            worker_slots, data_cpus = worker_slots + node_slots, data_cpus + node_data_cpus
            shared_cpus += max(node_slots, node_data_cpus)
        return Capacity(worker_slots, data_cpus, shared_cpus if self.device == "cpu" else 0)

    def max_workers(self, nodes: Sequence[NodeSpec], upper_bound: int | None = None) -> int:
        """Count the workers that fit on the nodes beside their data tasks."""
        available = self.capacity_of(nodes)
        bound = available.worker_slots if upper_bound is None else upper_bound
        return largest_feasible(bound, lambda workers: available.covers(self.capacity_for(workers)))


def largest_feasible(upper_bound: int, is_feasible: Callable[[int], bool]) -> int:
    """Binary search for the largest feasible number up to `upper_bound`, if each smaller number is feasible too; 0 if
    none is."""
    return bisect.bisect(range(1, upper_bound + 1), False, key=lambda number: not is_feasible(number))


class AutoscalerLimits(NamedTuple):
    """Nodes that an autoscaler may start."""

    head_nodes: list[NodeSpec]
    """Head nodes, which are always up."""
    node_types: dict[str, tuple[NodeSpec, int]]
    """A node and its maximum count, by type."""
    max_nodes: int
    """Maximum number of nodes of all types."""


def parse_autoscaler_limits(document: Mapping[str, Any]) -> AutoscalerLimits:
    """Parse the limits in an autoscaler's file. Raises `ConfigError`."""
    file = ClusterFile.from_mapping(document)
    unlimited = max(file.max_workers, UNLIMITED_NODES)
    return AutoscalerLimits(
        [NodeSpec(node.resources, node.labels) for node in file.node_types if node.is_head],
        {
            node.name: (NodeSpec(node.resources, node.labels), node.max_workers(unlimited))
            for node in file.node_types
            if not node.is_head
        },
        file.max_workers,
    )


def matches_labels(labels: Mapping[str, str] | None, required: Labels) -> bool:
    return required.items() <= {name: str(value) for name, value in (labels or {}).items()}.items()


def reachable_nodes(limits: AutoscalerLimits, device: str, labels: Labels = ANY_LABELS) -> list[NodeResources]:
    """The nodes with the labels that can exist at a time: the head, and as many others as an autoscaler may start,
    largest first."""
    matching_types = [
        (node.resources, number) for node, number in limits.node_types.values() if matches_labels(node.labels, labels)
    ]
    worker_nodes = [node for node, number in matching_types for _ in range(min(limits.max_nodes, number))]
    worker_nodes.sort(key=lambda node: -count_worker_slots([node], device))
    head_nodes = [node.resources for node in limits.head_nodes if matches_labels(node.labels, labels)]
    return [*head_nodes, *worker_nodes[: limits.max_nodes]]


def resource_request_from_config(config: "Config", device: str) -> ResourceRequest:
    settings, gpu_share = config.deploy.cluster, config.recipe.train.gpus_per_worker if device == "gpu" else 1.0
    return ResourceRequest(device, settings.data_cpus, settings.labels, settings.data_labels, gpu_share)


# ------------------------------------------------------------------------------------------- queries of the cluster


def live_nodes() -> list[NodeSpec]:
    """The live nodes that are not draining, with all their resources."""
    return list(live_nodes_by_id().values())


def nodes_with_labels(labels: Labels = ANY_LABELS) -> list[NodeResources]:
    """The live nodes with the labels that are not draining, with all their resources."""
    return [node.resources for node in live_nodes() if matches_labels(node.labels, labels)]


def available_nodes(
    own_workers: Mapping[str, int] | None = None, request: ResourceRequest | None = None
) -> list[NodeSpec]:
    """The live nodes with their free resources. `own_workers`: the run's own workers by node; their slots count as
    free."""
    resource, gpu_share = (WORKER_RESOURCE[request.device], request.gpu_share) if request else ("CPU", 1.0)
    available_by_node = ray_internals.available_resources_by_node()
    nodes: list[NodeSpec] = []
    for node_id, node in live_nodes_by_id().items():
        resources = dict(available_by_node.get(node_id, {}))
        resources[resource] = resources.get(resource, 0.0) + gpu_share * (own_workers or {}).get(node_id, 0)
        nodes.append(NodeSpec(resources, node.labels))
    return nodes


def max_accelerators(device: str, labels: Labels = ANY_LABELS) -> int:
    """Maximum CPUs or GPUs for workers: of the live nodes, or of the nodes that the autoscaler may start, if that is
    more."""
    return count_worker_slots(potential_nodes(device, labels), device)


def potential_nodes(device: str, labels: Labels = ANY_LABELS) -> list[NodeResources]:
    """The nodes with the labels that can exist: the live nodes, or, if that is more, the nodes of the autoscaler,
    largest first."""
    live, document = nodes_with_labels(labels), load_autoscaler_config()
    if document is None:
        return live
    reachable = reachable_nodes(parse_autoscaler_limits(document), device, labels)
    return max(live, reachable, key=lambda nodes: count_worker_slots(nodes, device))


def find_unmatched_labels(setting: str, labels: Labels) -> list[Problem]:
    """Report a setting whose labels no existing or startable node has. A run with such labels would hang."""
    if not labels or nodes_with_labels(labels) or startable_node_types(labels):
        return []
    reason = "no node of the cluster has these labels, and its autoscaler cannot start one"
    fix = "write the labels of a node type in the cluster file, or none"
    return [Problem(setting, dict(labels), reason, fix, code="unknown_labels")]


def startable_node_types(labels: Labels = ANY_LABELS) -> dict[str, NodeResources]:
    """The startable node types with the labels, by name."""
    return {
        name: node.resources
        for name, (node, _) in autoscaler_limits().node_types.items()
        if matches_labels(node.labels, labels)
    }


def autoscaler_limits() -> AutoscalerLimits:
    """The limits of the autoscaler; empty without one."""
    return parse_autoscaler_limits(load_autoscaler_config() or {})


def load_autoscaler_config() -> Mapping[str, Any] | None:
    """The autoscaler's limits in the form of its file; None if unknown."""
    file_setting = os.environ.get(AUTOSCALER_FILE_VARIABLE, "")
    if file_setting.startswith("{"):
        return dict(json.loads(file_setting))
    if file_setting and (file := Path(file_setting).expanduser()).is_file():
        try:
            document = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            message = f"{AUTOSCALER_FILE_VARIABLE}={file_setting}: invalid YAML ({error}); run rtrain cluster lint"
            raise UserError(message, code="unreadable") from None
        return document if isinstance(document, dict) else None
    groups = ray_internals.cluster_config()
    if not groups:
        return None
    max_counts = [number if number >= 0 else UNLIMITED_NODES for _, _, number in groups]
    node_types = {
        name: {"resources": node, "max_workers": number}
        for (name, node, _), number in zip(groups, max_counts, strict=True)
    }
    return {"max_workers": sum(max_counts), "available_node_types": node_types}


_unresponsive_node_ids: set[str] = set()
"""Ids of nodes that refused a connection. Ray counts on them for some seconds more, and an attempt placed there would
hang; they do not count until they respond again."""


def find_lost_nodes(node_ids: Collection[str], timeout_s: float) -> dict[str, NodeSpec]:
    """Find lost nodes among `node_ids`, polling until `timeout_s`: Ray detects a loss later, by health checks. A node
    whose raylet refuses connections is lost too, whatever Ray reports. The node of this process is never lost."""
    import ray

    own_node_id = ray.get_runtime_context().get_node_id()
    deadline = time.monotonic() + timeout_s
    while True:
        known_nodes = {
            node["NodeID"]: node for node in ray.nodes() if node["NodeID"] in node_ids and node["NodeID"] != own_node_id
        }
        lost_nodes = {
            name: node for name, node in known_nodes.items() if not (node["Alive"] and _accepts_connections(node))
        }
        if lost_nodes or not known_nodes or time.monotonic() > deadline:
            _unresponsive_node_ids.update(lost_nodes)
            return {name: NodeSpec(node["Resources"], node["Labels"]) for name, node in lost_nodes.items()}
        time.sleep(LOST_NODE_POLL_S)


def _accepts_connections(node: Mapping[str, Any]) -> bool:
    return accepts_connections((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_TIMEOUT_S)


def accepts_connections(address: tuple[str, int], timeout_s: float) -> bool:
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError:
        return False
    return True


def current_node() -> NodeSpec:
    """The node of this process, with all its resources."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    return next(NodeSpec(node["Resources"], node["Labels"]) for node in ray.nodes() if node["NodeID"] == node_id)


def head_hostname() -> str | None:
    """Hostname of the head node; None until Ray reports it."""
    import ray

    heads = (node for node in ray.nodes() if node["Alive"] and ray_internals.HEAD_RESOURCE in node["Resources"])
    return next((str(node["NodeManagerHostname"]) for node in heads), None)


def draining_node_ids() -> set[str]:
    """Ids of draining nodes, after a spot notice or for being idle."""
    return ray_internals.draining_node_ids()


def live_nodes_by_id() -> dict[str, NodeSpec]:
    import ray

    draining = draining_node_ids()
    return {
        node["NodeID"]: NodeSpec(node["Resources"], node["Labels"])
        for node in ray.nodes()
        if node["Alive"]
        and node["NodeID"] not in draining
        and (node["NodeID"] not in _unresponsive_node_ids or _accepts_connections(node))
    }
