"""What a rehearsal takes from a cluster's file: its node types, its limits, how it starts Ray, its prices. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rtrain.cluster import capacity, placement, pricing as priced
from rtrain.cluster.checks import clouds, shell_commands, yaml_document as documents
from rtrain.cluster.checks.yaml_document import Document, Unreadable
from rtrain.cluster.instance_types import BY_NAME
from rtrain.core.errors import ConfigError, Problem

PROVIDER, FOLDER = "rtrain.rehearsal.machines.provider.Rehearsed", "rehearsal_folder"
"""The autoscaler's cloud, and its setting with the folder of the book."""
IDLE_S = 60.0
"""Seconds without work after which a rehearsed node is ended, where the file's own time is longer. Much shorter, and
nodes that an elastic run has asked for are ended again before it has grown onto them."""
TIGHT_CPUS = 2
FILE = "--file"
REPLACED = (
    *("--address", "--autoscaling-config", "--block", "--disable-usage-stats", "--head"),
    *("--labels", "--object-store-memory", "--resources"),
)
"""Options of the file's `ray start` that the rehearsal gives itself, besides those of ports, folders and numbers."""
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
"""The lists of commands that Ray's autoscaler looks up in a file, also where it runs none of them."""


@dataclass(frozen=True)
class Kind:
    """A node type."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    least: int
    most: int
    is_spot: bool
    instance: str | None
    dollars: float | None
    """An hour of it on demand; None where its price is not known."""


@dataclass(frozen=True)
class Plan:
    head: Kind
    kinds: tuple[Kind, ...]
    """The workers' types."""
    most: int
    """Workers of all types at a time."""
    idle_s: float
    """Seconds without work after which the file has a worker ended."""
    watcher: str | None
    """The cloud whose notices are listened for on each worker; None where the file starts no watcher."""
    head_options: tuple[str, ...]
    """Those of the file's `ray start` that mean something here."""
    worker_options: tuple[str, ...]
    hook: str | None
    """What the file exports as RAY_START_HOOK."""

    @property
    def least(self) -> int:
        """Workers that are up without any work."""
        return sum(kind.least for kind in self.kinds)

    @property
    def counts_gpus(self) -> bool:
        """Whether its nodes have GPUs: here they are counted, and not there."""
        return any(kind.resources.get("GPU") for kind in self.kinds)

    @property
    def rehearsed_idle_s(self) -> float:
        return min(self.idle_s, IDLE_S)

    @property
    def by_name(self) -> dict[str, Kind]:
        return {kind.name: kind for kind in (self.head, *self.kinds)}

    def autoscaler_file(self, folder: str) -> dict[str, Any]:
        """What Ray's autoscaler is given in place of the file: the same cluster from a cloud on this machine, whose
        book is in `folder`. Machines start Ray themselves."""
        described = {
            kind.name: {
                "resources": {name: int(amount) for name, amount in kind.resources.items()},
                "labels": dict(kind.labels),
                "min_workers": kind.least,
                "max_workers": kind.most,
                "node_config": {},
            }
            for kind in (self.head, *self.kinds)
        }
        return {
            "cluster_name": "rehearsal",
            "max_workers": self.most,
            "idle_timeout_minutes": self.rehearsed_idle_s / 60,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                FOLDER: folder,
            },
            "auth": {},
            "head_node_type": self.head.name,
            "available_node_types": described,
            "file_mounts": {},
            "cluster_synced_files": [],
            **{f"{name}_commands": [] for name in COMMANDS},
        }

    def tight(self, workers: int, data_cpus: int) -> "Plan | None":
        """The same cluster of nodes of two CPUs, so few that a run on CPUs needs all of them beside its data tasks, and
        goes on smaller without one. None where it has no nodes of CPUs."""
        kind = next((kind for kind in self.kinds if kind.resources.get("CPU", 0) >= 1 and kind.most), None)
        if kind is None:
            return None
        nodes = math.ceil((workers + data_cpus) / TIGHT_CPUS)
        small = replace(kind, resources={"CPU": float(TIGHT_CPUS)}, least=0, most=nodes)
        return replace(self, kinds=(small,), most=nodes)

    def needed(self, workers: int, needs: capacity.Needs) -> int | None:
        """The fewest worker nodes that have room for a run beside its data tasks, of one type or of several. None where
        no number of them has."""
        offers = [needs.offered([capacity.Host(kind.resources, kind.labels)]) for kind in self.kinds]
        lacking = needs.of(workers).beyond(needs.offered([capacity.Host(self.head.resources, self.head.labels)]))
        found = placement.numbers(offers, [kind.most for kind in self.kinds], self.most, lacking, [1] * len(offers))
        return None if found is None else sum(found)


def of(text: str) -> Plan:
    """The plan of a file. Raises `ConfigError` with everything for which it cannot be rehearsed."""
    found = read(text)
    kinds, head = found.get("available_node_types"), found.get("head_node_type")
    if not isinstance(kinds, dict) or not kinds:
        reason = "it names no available_node_types, so that there is nothing to scale"
        raise ConfigError(
            [Problem(FILE, None, reason, "write them, as rtrain cluster init --cloud aws does", code="no_node_types")]
        )
    if head not in kinds:
        reason = f"head_node_type is {head}, which is none of {', '.join(map(str, kinds))}"
        raise ConfigError([Problem(FILE, None, reason, "name the head's type", code="unknown_name")])
    prices = priced.table(metadata=found.get("metadata"))
    most = _whole(found.get("max_workers", default=capacity.MAX_WORKERS), "max_workers")
    known = {node.name: node for node in clouds.nodes(found)}
    made, problems = [], []
    for name, kind in kinds.items():
        node = known.get(name)
        instance = node.instance if node else None
        listed = BY_NAME.get(instance or "")
        resources = (kind or {}).get("resources")
        if resources is None and listed is not None:
            resources = {"CPU": listed.cpus, **({"GPU": listed.gpus} if listed.gpus else {})}
        if resources is None:
            reason = f"the node type {name} says no resources, and {instance or 'its instance'} is in no table"
            problems.append(
                Problem(FILE, None, reason, f"write resources: {{CPU: ...}} in {name}", code="no_resources")
            )
            continue
        resources = {key: documents.number(amount, f"{name}.resources.{key}") for key, amount in resources.items()}
        if broken := [f"{key}: {amount:g}" for key, amount in resources.items() if not amount.is_integer()]:
            reason = (
                f"the node type {name} has resources of {', '.join(broken)}, and Ray's launcher takes whole numbers"
            )
            problems.append(
                Problem(FILE, None, reason, "write e.g. 1000 for 1, and ask for so much more", code="not_whole")
            )
        least = 0 if name == head else _whole(kind.get("min_workers", 0), f"{name}.min_workers")
        made.append(
            Kind(
                name=name,
                resources=resources,
                labels={key: str(value) for key, value in (kind.get("labels") or {}).items()},
                least=least,
                most=0 if name == head else min(most, _whole(kind.get("max_workers", most), f"{name}.max_workers")),
                is_spot=node is not None and node.is_spot,
                instance=instance,
                dollars=prices[instance].on_demand if instance in prices else None,
            )
        )
    if problems:
        raise ConfigError(problems)
    starts = {"--head" in start.options: start for start in shell_commands.starts(found)}
    watched = [
        match[1]
        for command in shell_commands.commands(found)
        if (match := re.search(r"-m rtrain\.cluster\.spot (aws|gcp|azure)\b", command.text))
    ]
    return Plan(
        head=next(kind for kind in made if kind.name == head),
        kinds=tuple(kind for kind in made if kind.name != head),
        most=most,
        idle_s=60.0 * float(found.get("idle_timeout_minutes", default=5)),
        watcher=watched[0] if watched else None,
        head_options=_kept(starts[True].options) if True in starts else (),
        worker_options=_kept(starts[False].options) if False in starts else (),
        hook=starts[True].environment.get("RAY_START_HOOK") if True in starts else None,
    )


def _whole(value: object, name: str) -> int:
    return int(documents.number(value, name))


def read(text: str) -> Document:
    """A file of the launcher's. Raises `ConfigError` for another one."""
    try:
        found = documents.read(text)
    except Unreadable as error:
        reason = f"line {error.line}: no YAML: {error.reason}"
        raise ConfigError([Problem(FILE, None, reason, "mend it", code="unreadable")]) from None
    if len(found) != 1 or not isinstance(found[0].value, dict) or "apiVersion" in found[0].value:
        reason = "it is no file of Ray's launcher"
        raise ConfigError(
            [Problem(FILE, None, reason, "write one with rtrain cluster init --cloud aws", code="not_a_cluster_file")]
        )
    return found[0]


def _kept(options: Mapping[str, str]) -> tuple[str, ...]:
    dropped = re.compile(r"--(?:[a-z-]+-port|port|temp-dir|plasma-directory|num-[cg]pus|memory|min-.*|max-.*)")
    return tuple(
        f"{name}={value}" if value else name
        for name, value in options.items()
        if name not in REPLACED and not dropped.fullmatch(name)
    )
