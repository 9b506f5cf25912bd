"""Rehearsal plan from a cluster file: node types, limits, the start of Ray, prices. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rtrain.cluster import capacity, placement, pricing
from rtrain.cluster.checks import clouds, shell_commands, yaml_document as documents
from rtrain.cluster.checks.yaml_document import Document, InvalidYaml
from rtrain.cluster.instance_types import INSTANCES_BY_NAME
from rtrain.core.errors import ConfigError, Problem

PROVIDER_CLASS, FOLDER_SETTING = "rtrain.rehearsal.machines.provider.RehearsalNodeProvider", "rehearsal_folder"
"""Node provider of the autoscaler, and its setting with the folder of the machine registry."""
MAX_IDLE_S = 60.0
"""Maximum idle timeout in seconds of a rehearsed node. With a much shorter one, nodes that an elastic run requested are
terminated before it has grown onto them."""
SMALL_NODE_CPUS = 2
FILE_OPTION = "--file"
REPLACED_OPTIONS = (
    *("--address", "--autoscaling-config", "--block", "--disable-usage-stats", "--head"),
    *("--labels", "--object-store-memory", "--resources"),
)
"""Options of the file's `ray start` that the rehearsal sets itself, besides ports, folders and amounts."""
COMMAND_LISTS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
"""Command lists that Ray's autoscaler requires in a file, even if it runs none."""


@dataclass(frozen=True)
class RehearsedNodeType:
    """A node type."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    min_workers: int
    max_workers: int
    is_spot: bool
    instance_type: str | None
    dollars_per_hour: float | None
    """On-demand price per hour; None if unknown."""


@dataclass(frozen=True)
class RehearsalPlan:
    head: RehearsedNodeType
    node_types: tuple[RehearsedNodeType, ...]
    """Worker node types."""
    max_workers: int
    """Maximum workers of all types."""
    idle_timeout_s: float
    """Idle timeout of the file in seconds."""
    watcher: str | None
    """Cloud of the spot watcher on each worker; None if the file starts no watcher."""
    head_options: tuple[str, ...]
    """Options of the file's `ray start` that apply to a rehearsal."""
    worker_options: tuple[str, ...]
    start_hook: str | None
    """The file's RAY_START_HOOK."""

    @property
    def min_workers(self) -> int:
        """Workers that are always up."""
        return sum(node_type.min_workers for node_type in self.node_types)

    @property
    def has_gpus(self) -> bool:
        """Whether its nodes have GPUs: a rehearsal only declares them."""
        return any(node_type.resources.get("GPU") for node_type in self.node_types)

    @property
    def rehearsal_idle_timeout_s(self) -> float:
        return min(self.idle_timeout_s, MAX_IDLE_S)

    @property
    def types_by_name(self) -> dict[str, RehearsedNodeType]:
        return {node_type.name: node_type for node_type in (self.head, *self.node_types)}

    def autoscaler_config(self, folder: str) -> dict[str, Any]:
        """Autoscaler configuration in place of the file: the same cluster on this machine, whose machine registry is in
        `folder`. Machines start Ray themselves."""
        node_types = {
            node_type.name: {
                "resources": {name: int(amount) for name, amount in node_type.resources.items()},
                "labels": dict(node_type.labels),
                "min_workers": node_type.min_workers,
                "max_workers": node_type.max_workers,
                "node_config": {},
            }
            for node_type in (self.head, *self.node_types)
        }
        return {
            "cluster_name": "rehearsal",
            "max_workers": self.max_workers,
            "idle_timeout_minutes": self.rehearsal_idle_timeout_s / 60,
            "provider": {
                "type": "external",
                "module": PROVIDER_CLASS,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                FOLDER_SETTING: folder,
            },
            "auth": {},
            "head_node_type": self.head.name,
            "available_node_types": node_types,
            "file_mounts": {},
            "cluster_synced_files": [],
            **{f"{name}_commands": [] for name in COMMAND_LISTS},
        }

    def shrink_to(self, workers: int, data_cpus: int) -> "RehearsalPlan | None":
        """The same cluster with nodes of two CPUs, so few that a CPU run with its data tasks needs all of them, and
        shrinks without one. None without CPU nodes."""
        node_type = next(
            (
                candidate_type
                for candidate_type in self.node_types
                if candidate_type.resources.get("CPU", 0) >= 1 and candidate_type.max_workers
            ),
            None,
        )
        if node_type is None:
            return None
        nodes = math.ceil((workers + data_cpus) / SMALL_NODE_CPUS)
        small_type = replace(node_type, resources={"CPU": float(SMALL_NODE_CPUS)}, min_workers=0, max_workers=nodes)
        return replace(self, node_types=(small_type,), max_workers=nodes)

    def required_nodes(self, workers: int, request: capacity.ResourceRequest) -> int | None:
        """Minimum worker nodes with capacity for a run and its data tasks; None if the limits are too small."""
        capacities = [
            request.capacity_of([capacity.NodeSpec(node_type.resources, node_type.labels)])
            for node_type in self.node_types
        ]
        missing = request.capacity_for(workers).minus(
            request.capacity_of([capacity.NodeSpec(self.head.resources, self.head.labels)])
        )
        counts = placement.cheapest_node_counts(
            capacities,
            [node_type.max_workers for node_type in self.node_types],
            self.max_workers,
            missing,
            [1] * len(capacities),
        )
        return None if counts is None else sum(counts)


def parse_plan(text: str) -> RehearsalPlan:
    """Parse a cluster file. Raises `ConfigError` with all problems that prevent a rehearsal."""
    document = parse_launcher_file(text)
    specs, head_type = document.get("available_node_types"), document.get("head_node_type")
    if not isinstance(specs, dict) or not specs:
        reason = "the file has no available_node_types to scale"
        raise ConfigError(
            [
                Problem(
                    FILE_OPTION,
                    None,
                    reason,
                    "write them, as rtrain cluster init --cloud aws does",
                    code="no_node_types",
                )
            ]
        )
    if head_type not in specs:
        reason = f"head_node_type is {head_type}, which is not one of {', '.join(map(str, specs))}"
        raise ConfigError([Problem(FILE_OPTION, None, reason, "name the head's type", code="unknown_name")])
    prices = pricing.load_price_table(metadata=document.get("metadata"))
    max_workers = _require_integer(document.get("max_workers", default=capacity.DEFAULT_MAX_WORKERS), "max_workers")
    cloud_configs = {node.name: node for node in clouds.iter_node_types(document)}
    node_types, problems = [], []
    for name, spec in specs.items():
        cloud_config = cloud_configs.get(name)
        instance_type = cloud_config.instance_type if cloud_config else None
        known_instance = INSTANCES_BY_NAME.get(instance_type or "")
        resources = (spec or {}).get("resources")
        if resources is None and known_instance is not None:
            resources = {"CPU": known_instance.cpus, **({"GPU": known_instance.gpus} if known_instance.gpus else {})}
        if resources is None:
            reason = f"the node type {name} has no resources, and {instance_type or 'its instance type'} is unknown"
            problems.append(
                Problem(FILE_OPTION, None, reason, f"write resources: {{CPU: ...}} in {name}", code="no_resources")
            )
            continue
        resources = {
            key: documents.require_number(amount, f"{name}.resources.{key}") for key, amount in resources.items()
        }
        if fractional := [f"{key}: {amount:g}" for key, amount in resources.items() if not amount.is_integer()]:
            reason = f"the node type {name} has fractional resources: {', '.join(fractional)}"
            problems.append(Problem(FILE_OPTION, None, reason, "write integers, e.g. 1000 for 1", code="not_integer"))
        min_workers = 0 if name == head_type else _require_integer(spec.get("min_workers", 0), f"{name}.min_workers")
        node_types.append(
            RehearsedNodeType(
                name=name,
                resources=resources,
                labels={key: str(value) for key, value in (spec.get("labels") or {}).items()},
                min_workers=min_workers,
                max_workers=0
                if name == head_type
                else min(max_workers, _require_integer(spec.get("max_workers", max_workers), f"{name}.max_workers")),
                is_spot=cloud_config is not None and cloud_config.is_spot,
                instance_type=instance_type,
                dollars_per_hour=prices[instance_type].on_demand if instance_type in prices else None,
            )
        )
    if problems:
        raise ConfigError(problems)
    ray_starts = {"--head" in start.options: start for start in shell_commands.iter_ray_starts(document)}
    watched_clouds = [
        match[1]
        for command in shell_commands.iter_commands(document)
        if (match := re.search(r"-m rtrain\.cluster\.spot_watcher (aws|gcp|azure)\b", command.text))
    ]
    return RehearsalPlan(
        head=next(node_type for node_type in node_types if node_type.name == head_type),
        node_types=tuple(node_type for node_type in node_types if node_type.name != head_type),
        max_workers=max_workers,
        idle_timeout_s=60.0 * float(document.get("idle_timeout_minutes", default=5)),
        watcher=watched_clouds[0] if watched_clouds else None,
        head_options=_usable_options(ray_starts[True].options) if True in ray_starts else (),
        worker_options=_usable_options(ray_starts[False].options) if False in ray_starts else (),
        start_hook=ray_starts[True].environment.get("RAY_START_HOOK") if True in ray_starts else None,
    )


def _require_integer(value: object, name: str) -> int:
    return int(documents.require_number(value, name))


def parse_launcher_file(text: str) -> Document:
    """Parse a launcher file. Raises `ConfigError` for any other file."""
    try:
        parsed = documents.parse_documents(text)
    except InvalidYaml as error:
        reason = f"line {error.line}: invalid YAML: {error.reason}"
        raise ConfigError([Problem(FILE_OPTION, None, reason, "fix it", code="unreadable")]) from None
    if len(parsed) != 1 or not isinstance(parsed[0].value, dict) or "apiVersion" in parsed[0].value:
        reason = "the file is not a Ray launcher file"
        raise ConfigError(
            [
                Problem(
                    FILE_OPTION,
                    None,
                    reason,
                    "write one with rtrain cluster init --cloud aws",
                    code="not_a_cluster_file",
                )
            ]
        )
    return parsed[0]


def _usable_options(options: Mapping[str, str]) -> tuple[str, ...]:
    dropped_options = re.compile(r"--(?:[a-z-]+-port|port|temp-dir|plasma-directory|num-[cg]pus|memory|min-.*|max-.*)")
    return tuple(
        f"{name}={value}" if value else name
        for name, value in options.items()
        if name not in REPLACED_OPTIONS and not dropped_options.fullmatch(name)
    )
