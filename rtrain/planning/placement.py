"""Whether a run has room on a cluster that does not run yet, by the cluster's file: the same verdict that a start gives
on the cluster itself, before a node is paid for. Pure, and without torch: a layout that would wait for ever is refused
at once, with the nearest one that would not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rtrain.cluster import capacity, placement, preflight
from rtrain.cluster.capacity import Host, Needs, Room
from rtrain.cluster.checks import clouds
from rtrain.cluster.checks.yaml_document import Document, mapping, number
from rtrain.cluster.instance_types import BY_NAME, Instance
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem
from rtrain.models import device


@dataclass(frozen=True)
class Kind:
    """A type of node that may be started."""

    name: str
    node: capacity.Node
    labels: capacity.Labels
    most: int
    instance: Instance | None
    """What is known of its type; None where the table has no such type."""
    is_spot: bool
    type: str | None = None
    """Its type by its cloud's name, by which prices are looked up; None on machines of one's own."""
    least: int = 0
    """Nodes that are up, and paid for, whatever runs."""

    @property
    def host(self) -> Host:
        return Host(self.node, self.labels)

    @property
    def called(self) -> str:
        return self.type or self.name

    @property
    def gpu(self) -> str:
        """The kind of its GPUs: as its resources say it, else as the table does; else what it is called itself."""
        said = max(capacity.accelerators(self.node), key=len, default=None)  # A100-80G says more than A100
        return said or (self.instance and self.instance.gpu) or self.called


@dataclass(frozen=True)
class Cluster:
    heads: tuple[Kind, ...]
    kinds: tuple[Kind, ...]
    limit: int
    """Most nodes beside the head."""
    document: Mapping[str, Any]
    """The file that says so."""

    @property
    def may(self) -> capacity.Startable:
        """What its autoscaler may start."""
        kinds = {kind.name: (kind.host, kind.most) for kind in self.kinds}
        return capacity.Startable([kind.host for kind in self.heads], kinds, self.limit)


def of_document(document: Mapping[str, Any]) -> Cluster:
    """The nodes of a cluster's file. Where it says nothing of a node's processors and GPUs, its instance type has them,
    as clouds' providers fill it in. Raises `ConfigError` for what is no file of Ray's launcher."""
    kinds = document.get("available_node_types")
    if not isinstance(kinds, dict) or not all(isinstance(kind, dict) for kind in kinds.values()):
        reason, fix = "names no available_node_types", "write one with rtrain cluster init --cloud aws"
        raise ConfigError([Problem("--cluster", None, reason, fix, code="malformed")])
    provider = mapping(document.get("provider"), "provider").get("type")
    if provider is not None and not isinstance(provider, str):
        fix = f"write one of {', '.join(clouds.CLOUDS)}, or local"
        raise ConfigError(
            [Problem("provider.type of the cluster's file", provider, "is no text", fix, code="wrong_type")]
        )
    known = {node.name: node for node in clouds.nodes(Document("", document, {}))}
    found: list[tuple[bool, Kind]] = []
    head = document.get("head_node_type")
    limit = int(number(document.get("max_workers", capacity.MAX_WORKERS), "max_workers"))
    unlimited = max(limit, capacity.ANY_NUMBER)
    for name, kind in kinds.items():
        node = known.get(name)
        type_ = node.instance if node else None
        instance = BY_NAME.get(type_ or "")
        has = {"CPU": instance.cpus, "GPU": instance.gpus} if instance else {}
        resources = {key: value for key, value in has.items() if value} | mapping(
            kind.get("resources"), f"{name}.resources"
        )
        most = 1 if name == head else int(number(kind.get("max_workers", unlimited), f"{name}.max_workers"))
        least = 0 if name == head else int(number(kind.get("min_workers", 0), f"{name}.min_workers"))
        counted = {key: number(value, f"{name}.resources.{key}") for key, value in resources.items()}
        labels, is_spot = mapping(kind.get("labels"), f"{name}.labels"), bool(node and node.is_spot)
        found.append((name == head, Kind(name, counted, labels, most, instance, is_spot, type_, least)))
    heads = tuple(kind for is_head, kind in found if is_head)
    return Cluster(heads, tuple(kind for is_head, kind in found if not is_head), limit, document)


@dataclass(frozen=True)
class Layout:
    """What a run takes of a cluster."""

    needs: Needs
    choice: device.Choice
    """Its devices, and the workers that it asks for."""
    room: int
    """Workers that it can have, where the nodes that there can be have no room for all of them."""
    least: int
    """Fewest workers that it starts with."""
    trials: int = 1
    """Such runs at a time."""

    @property
    def device(self) -> str:
        return self.choice.device

    @property
    def workers(self) -> int:
        return self.choice.workers

    @property
    def spare(self) -> int:
        """CPUs of its data tasks."""
        return self.needs.of(self.room).data

    @property
    def need(self) -> Room:
        """What all of it needs at a time."""
        return self.needs.of(self.room, self.trials)


def laid_out(config: Config, cluster: Cluster, *, searches: bool = False) -> Layout:
    """The layout of a run, or of a search (`searches`), on the cluster. Raises `ConfigError` where it would wait for
    ever: a start on the cluster refuses the same, and says the same."""
    train, may, of_gpus = config.recipe.train, cluster.may, capacity.needs(config, "gpu")
    gpus = capacity.count(capacity.reachable(may, "gpu", of_gpus.labels), "gpu")
    room = gpus and placement.workers([], may, of_gpus, train.workers)
    chosen = device.choose(train.device, train.workers, train.min_workers, gpus, usable=True, room=room)
    needs = of_gpus if chosen.device == "gpu" else capacity.needs(config, "cpu")
    if problems := preflight.capacity(config.recipe, needs, [], may):
        raise ConfigError(problems)
    trials = 1
    if searches:
        fits = max(1, placement.runs([], may, needs, train.workers))
        wanted = config.deploy.tune.concurrent
        if wanted is not None and wanted > fits:
            spare = needs.of(train.workers).data
            reason = (
                f"the cluster has room for {fits} of {train.workers} workers, with {spare} CPUs each for data tasks"
            )
            raise ConfigError(
                [Problem("tune.concurrent", wanted, reason, f"write {fits}, or fewer train.workers", code="no_room")]
            )
        trials = wanted or fits
    room = placement.workers([], may, needs, chosen.workers)
    return Layout(needs, chosen, room, train.min_workers or chosen.workers, trials)


# ------------------------------------------------------------------------------------------------- which nodes, and how


Price = Callable[[Kind], float | None]
Holds = Callable[[Kind], int]
Nodes = Mapping[str, int]
"""Number of nodes by the name of their type."""


def fewest(
    cluster: Cluster, needs: Needs, need: Room, price: Price = lambda kind: 1.0, holds: Holds | None = None
) -> Nodes | None:
    """The cheapest nodes with room for `need`, which is of `needs`; None where there are none.

    `price`: what a node of a type costs, by default one as much as the other; None where nobody knows. A type without a
    price is used only where the types with a price have no room; the fewest nodes are chosen then, since their sum is
    unknown. `holds`: how many workers' memory a node has; None where that is not asked for.
    """

    def offered(kind: Kind) -> Room:
        room = needs.offered([kind.host])
        return room if holds is None else room._replace(places=min(room.places, holds(kind)))

    has = Room(*map(sum, zip(Room(0, 0, 0), *map(offered, cluster.heads), strict=True)))
    offers, most = [offered(kind) for kind in cluster.kinds], [kind.most for kind in cluster.kinds]
    lacking, dollars = need.beyond(has), [price(kind) for kind in cluster.kinds]
    priced = [number if cost is not None else 0 for number, cost in zip(most, dollars, strict=True)]
    found = placement.numbers(offers, priced, cluster.limit, lacking, [cost or 0.0 for cost in dollars])
    if found is None and None in dollars:
        found = placement.numbers(offers, most, cluster.limit, lacking, [1.0] * len(offers))
    if found is None:
        return None
    return {kind.name: count for kind, count in zip(cluster.kinds, found, strict=True) if count}
