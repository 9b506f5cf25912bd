"""Whether a run has room on a cluster that does not run yet, by the cluster's file: the same verdict that a start gives
on the cluster itself, before a node is paid for. Pure, and without torch: a layout that would wait for ever is refused
at once, with the nearest one that would not.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rtrain.cluster import preflight, supply
from rtrain.cluster.instances import BY_NAME, Instance
from rtrain.cluster.lint import clouds
from rtrain.cluster.lint.document import Document, number
from rtrain.config import Config
from rtrain.errors import ConfigError, Problem
from rtrain.network import device

LIMIT: Final = 2
"""Nodes that Ray starts at most where its file names no `max_workers`."""
COMBINED: Final = 20_000
"""Combinations of node types that are looked at, beyond which those of a single type are."""


@dataclass(frozen=True)
class Kind:
    """A type of node that may be started."""

    name: str
    node: supply.Node
    most: int
    instance: Instance | None
    is_spot: bool


@dataclass(frozen=True)
class Cluster:
    heads: tuple[Kind, ...]
    kinds: tuple[Kind, ...]
    limit: int
    """Most nodes beside the head."""
    document: Mapping[str, Any]
    """The autoscaler's file, with what its provider would add to it."""


def of_document(document: Mapping[str, Any], labels: supply.Labels = supply.ANY) -> Cluster:
    """The nodes of a cluster's file; those without the labels that workers need are there, and have no room. Where it
    says nothing of a node's processors and GPUs, its instance type has them, as clouds' providers fill it in. Raises
    `ConfigError` for what is no file of Ray's launcher."""
    kinds = document.get("available_node_types")
    if not isinstance(kinds, dict) or not all(isinstance(kind, dict) for kind in kinds.values()):
        reason, fix = "names no available_node_types", "write one with rtrain cluster init --cloud aws"
        raise ConfigError([Problem("--cluster", None, reason, fix)])
    known = {node.name: node for node in clouds.nodes(Document("", document, {}))}
    filled: dict[str, Any] = {"max_workers": LIMIT, **document, "available_node_types": {}}
    found: list[tuple[bool, Kind]] = []
    head, limit = document.get("head_node_type"), int(number(filled["max_workers"], "max_workers"))
    for name, kind in kinds.items():
        node = known.get(name)
        instance = BY_NAME.get((node.instance if node else None) or "")
        has = {"CPU": instance.cpus, "GPU": instance.gpus} if instance else {}
        resources = {key: value for key, value in has.items() if value} | (kind.get("resources") or {})
        if not supply.has(kind.get("labels"), labels):
            resources = {}
        filled["available_node_types"][name] = {**kind, "resources": resources}
        most = 1 if name == head else min(limit, int(number(kind.get("max_workers", limit), f"{name}.max_workers")))
        counted = {key: number(value, f"{name}.resources.{key}") for key, value in resources.items()}
        found.append((name == head, Kind(name, counted, most, instance, bool(node and node.is_spot))))
    heads = tuple(kind for is_head, kind in found if is_head)
    return Cluster(heads, tuple(kind for is_head, kind in found if not is_head), limit, filled)


@dataclass(frozen=True)
class Layout:
    """What a run takes of a cluster."""

    device: str
    workers: int
    """Workers that it asks for."""
    room: int
    """Workers that it can have, where the nodes that there can be have no room for all of them."""
    least: int
    """Fewest workers that it starts with."""
    spare: int
    """CPUs of its data tasks."""
    trials: int = 1
    """Such runs at a time."""
    why: str | None = None
    """What a user should be told of the device."""


def laid_out(config: Config, cluster: Cluster, *, searches: bool = False) -> Layout:
    """The layout of a run, or of a search (`searches`), on the cluster. Raises `ConfigError` where it would wait for
    ever: a start on the cluster refuses the same, and says the same."""
    train, asked = config.recipe.train, config.deploy.cluster.data_cpus
    gpus, cpus = (_most(cluster, kind) for kind in ("gpu", "cpu"))
    chosen = device.choose(train.device, train.workers, train.min_workers, gpus, usable=True)
    least = train.min_workers or chosen.workers
    spare = supply.data_cpus(asked, train.min_workers or train.workers)
    if problems := preflight.capacity(config.recipe, cpus, spare, chosen.device):
        raise ConfigError(problems)
    if fewest(cluster, least, chosen.device, spare) is None:
        reason = f"no nodes that may be up together have {least} {supply.NEEDS[chosen.device]}s and {spare} CPUs"
        fix = f"raise max_workers above {cluster.limit}, or name a node type that has both"
        raise ConfigError([Problem("train.workers", train.workers, reason, fix)])
    trials = 1
    if searches:
        spare = supply.data_cpus(asked, train.workers)
        fits = supply.slots(train.workers, spare, chosen.device, cpus, gpus if chosen.device == "gpu" else cpus)
        wanted = config.deploy.tune.concurrent
        if wanted is not None and wanted > fits:
            reason = (
                f"the cluster has room for {fits} of {train.workers} workers, with {spare} CPUs each for data tasks"
            )
            raise ConfigError([Problem("tune.concurrent", wanted, reason, f"write {fits}, or fewer train.workers")])
        trials = wanted or fits
    most = supply.fits(supply.reachable(cluster.document, chosen.device), chosen.device, asked)
    room = max(least, min(chosen.workers, most))
    spare = supply.data_cpus(asked, room)
    return Layout(chosen.device, chosen.workers, room, least, spare, trials, chosen.why)


def _most(cluster: Cluster, kind: str) -> int:
    return supply.count(supply.reachable(cluster.document, kind), kind)


# ------------------------------------------------------------------------------------------------- which nodes, and how


Price = Callable[[Kind], float]
Holds = Callable[[Kind], int]
Nodes = Mapping[str, int]
"""Number of nodes by the name of their type."""


def fewest(
    cluster: Cluster,
    workers: int,
    device: str,
    spare: int,
    price: Price = lambda kind: 1.0,
    holds: Holds | None = None,
) -> Nodes | None:
    """The cheapest nodes with room for the workers and their data tasks; None where there are none.

    `price`: what a node of a type costs, by default one as much as the other. `holds`: how many workers' memory a node
    has; None where that is not asked for.
    """
    best: tuple[float, int, dict[str, int]] | None = None
    for numbers in _combinations(cluster):
        chosen = dict(zip((kind.name for kind in cluster.kinds), numbers, strict=True))
        if not _room(cluster, chosen, workers, device, spare, holds):
            continue
        cost = sum(price(kind) * chosen[kind.name] for kind in cluster.kinds)
        found = (cost, sum(numbers), {name: number for name, number in chosen.items() if number})
        if best is None or found[:2] < best[:2]:
            best = found
    return None if best is None else best[2]


def _combinations(cluster: Cluster) -> Sequence[tuple[int, ...]]:
    """Numbers of nodes by type that may be up together."""
    ranges = [range(min(kind.most, cluster.limit) + 1) for kind in cluster.kinds]
    if math.prod(map(len, ranges)) <= COMBINED:
        return [numbers for numbers in itertools.product(*ranges) if sum(numbers) <= cluster.limit]
    alone = [
        tuple(number if place == other else 0 for other in range(len(ranges)))
        for place, numbers in enumerate(ranges)
        for number in numbers
    ]
    largest = [
        tuple(_largest(cluster, kind).get(one.name, 0) for one in cluster.kinds)
        for kind in (supply.NEEDS["cpu"], supply.NEEDS["gpu"])
    ]
    return [*alone, *largest]


def _largest(cluster: Cluster, resource: str) -> dict[str, int]:
    """As many nodes as there may be, those with most of the resource first."""
    left, found = cluster.limit, {}
    for kind in sorted(cluster.kinds, key=lambda kind: -kind.node.get(resource, 0.0)):
        found[kind.name] = min(left, kind.most)
        left -= found[kind.name]
    return found


def _room(cluster: Cluster, chosen: Nodes, workers: int, device: str, spare: int, holds: Holds | None) -> bool:
    nodes = [(kind, number) for kind in (*cluster.heads, *cluster.kinds) if (number := chosen.get(kind.name, 1))]
    if supply.fits([kind.node for kind, number in nodes for _ in range(number)], device, spare) < workers:
        return False
    if holds is None:
        return True
    return sum(min(holds(kind), supply.count([kind.node], device)) * number for kind, number in nodes) >= workers


def dealt(cluster: Cluster, chosen: Nodes, workers: int, device: str, holds: Holds) -> int:
    """Most workers on one node, where those that are chosen are filled one after another."""
    found, left = 0, workers
    for kind in (*cluster.heads, *cluster.kinds):
        for _ in range(chosen.get(kind.name, 1 if kind in cluster.heads else 0)):
            here = min(left, holds(kind), supply.count([kind.node], device))
            found, left = max(found, here), left - here
    return found
