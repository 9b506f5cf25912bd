"""Room for a run's workers on a Ray cluster: what its nodes have, what is free, and what its autoscaler may add.

A node is a map from the name of a resource (`CPU`, `GPU`) to how much of it the node has. The functions that count are
pure. `up`, `here`, `free`, `most` and `leaving` ask the Ray that this process is connected to. How many nodes of which
types there may be at a time is for `cluster.feasible`.
"""

import bisect
import json
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from rtrain import ray_internals
from rtrain.core.errors import Problem, UserError

if TYPE_CHECKING:
    from rtrain.config import Config

Node = Mapping[str, float]
Labels = Mapping[str, str]
ANY: Labels = MappingProxyType({})
"""The labels that every node has."""
NEEDS = {"cpu": "CPU", "gpu": "GPU"}
"""The resource of which a worker takes one, by its device. A worker with a GPU, or with a part of one, takes no CPU."""
ROUNDING = 1e-6
"""Ray counts resources in ten thousandths: three thirds of a GPU are one."""
AUTOSCALER_FILE = "RTRAIN_AUTOSCALER_FILE"
"""Environment variable with the path of the autoscaler's file, which `session.on_node_start` sets on the head, or with
the file's node types themselves, as JSON: manifests for Kubernetes set it so. Ray itself (2.60) keeps what may be
started where its manager says so, which neither its launcher nor KubeRay does."""
MAX_WORKERS: Final = 2
"""Nodes beside the head that Ray's launcher starts at most where its file names no `max_workers`."""
ANY_NUMBER = 1000
"""Nodes of a type without a limit."""
DATA_CPUS = 2
"""Fewest logical CPUs that Ray Data gets beside the workers' CPUs: for a task that reads, and one that may wait for it.
Without them a data stream waits for ever, and nothing says so."""
WORKERS_PER_DATA_CPU = 8
"""Workers for which Ray Data gets one more CPU."""
SPOT: Labels = MappingProxyType({"ray.io/market-type": "spot"})
"""The label of nodes that a cloud may take away, as Ray names it."""
LOST_LOOK_S, CONNECT_S = 1.0, 1.5
"""Seconds from one look for lost nodes to the next, and in which a node takes a connection."""


# ------------------------------------------------------------------------------------------------------------- counting


def count(nodes: Iterable[Node], device: str) -> int:
    """How many workers the nodes have room for, without data tasks. A worker needs a whole CPU or GPU of one node."""
    return sum(int(node.get(NEEDS[device], 0.0)) for node in nodes)


ACCELERATOR: Final = "accelerator_type:"
"""With the kind of a node's GPUs behind it, the name of a resource that Ray gives the node."""


def accelerators(node: Node) -> list[str]:
    """The kinds of GPU that a node has, as Ray calls them: `A100`, and `A100-80G` beside it where somebody says so."""
    return [name.removeprefix(ACCELERATOR) for name in node if name.startswith(ACCELERATOR)]


class Host(NamedTuple):
    """A node that is up, or one of a type that may be."""

    has: Node
    labels: Labels = ANY


class Room(NamedTuple):
    """What nodes have for runs, or what runs need of them."""

    places: int
    """Workers, on nodes with the labels for them."""
    data: int
    """CPUs of nodes that data tasks may run on."""
    cpus: int
    """CPUs of nodes that either may run on; 0 where workers take GPUs."""

    def holds(self, need: "Room") -> bool:
        return all(has >= needs for has, needs in zip(self, need, strict=True))

    def beyond(self, room: "Room") -> "Room":
        """What this is more than the other; negative where it is less."""
        return Room(*(one - other for one, other in zip(self, room, strict=True)))


class Needs(NamedTuple):
    """What the workers and data tasks of a run need of their nodes."""

    device: str = "cpu"
    data_cpus: int | None = None
    """The setting `cluster.data_cpus`."""
    labels: Labels = ANY
    data_labels: Labels = ANY
    """Those that a node must have for workers, and for data tasks."""
    share: float = 1.0
    """The part of a GPU that a worker takes; a worker without a GPU takes a CPU."""

    def places(self, node: Node) -> int:
        """Workers that the node has room for. None takes parts of two GPUs."""
        amount = node.get(NEEDS[self.device], 0.0)
        if self.share == 1:
            return int(amount)
        whole = int(amount)  # what is left of another one is free, where others hold parts of it
        return whole * int(1 / self.share + ROUNDING) + int((amount - whole) / self.share + ROUNDING)

    def of(self, workers: int, runs: int = 1) -> Room:
        """The need of so many runs, each of so many workers."""
        spare = data_cpus(self.data_cpus, workers)
        return Room(runs * workers, runs * spare, runs * (workers + spare) if self.device == "cpu" else 0)

    def offered(self, hosts: Iterable[Host]) -> Room:
        """The room of the nodes. Workers and data tasks of one run fit where all three numbers are large enough: either
        may run wherever it may, and only CPUs serve both."""
        places = data = cpus = 0
        for host in hosts:
            own = self.places(host.has) if has(host.labels, self.labels) else 0
            of_data = count([host.has], "cpu") if has(host.labels, self.data_labels) else 0
            places, data, cpus = places + own, data + of_data, cpus + max(own, of_data)
        return Room(places, data, cpus if self.device == "cpu" else 0)

    def most(self, hosts: Sequence[Host], at_most: int | None = None) -> int:
        """How many workers the nodes have room for, beside their data tasks."""
        room = self.offered(hosts)
        return largest(room.places if at_most is None else at_most, lambda number: room.holds(self.of(number)))


def largest(at_most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `at_most` that fits, where each smaller one fits too; 0 where none does."""
    return bisect.bisect(range(1, at_most + 1), False, key=lambda number: not fits(number))


def fits(nodes: Sequence[Node], device: str, asked: int | None) -> int:
    """How many workers the nodes have room for, whatever their labels; `asked` as in `data_cpus`."""
    return Needs(device, asked).most([Host(node) for node in nodes])


class Startable(NamedTuple):
    """What an autoscaler may start."""

    heads: list[Host]
    """Those that are up at all times."""
    kinds: dict[str, tuple[Host, int]]
    """By type a node, and how many of them there may be."""
    limit: int
    """How many nodes of all types there may be."""


def startable(document: Mapping[str, Any]) -> Startable:
    """What an autoscaler's file lets it start."""
    limit, head = int(document.get("max_workers", MAX_WORKERS)), document.get("head_node_type")
    found = Startable([], {}, limit)
    for name, kind in document.get("available_node_types", {}).items():
        node = {resource: float(amount) for resource, amount in (kind.get("resources") or {}).items()}
        host = Host(node, kind.get("labels") or ANY)
        if name == head:
            found.heads.append(host)
        else:
            found.kinds[name] = host, int(kind.get("max_workers", max(limit, ANY_NUMBER)))
    return found


def has(labels: Mapping[str, str] | None, wanted: Labels) -> bool:
    return wanted.items() <= {name: str(value) for name, value in (labels or {}).items()}.items()


def reachable(may: Startable, device: str, labels: Labels = ANY) -> list[Node]:
    """The nodes with the labels that there can be: the head, and as many others as an autoscaler may start at a time,
    those with most CPUs or GPUs first."""
    kinds = [(host.has, min(may.limit, number)) for host, number in may.kinds.values() if has(host.labels, labels)]
    started = sorted((node for node, number in kinds for _ in range(number)), key=lambda node: -count([node], device))
    return [*(host.has for host in may.heads if has(host.labels, labels)), *started[: may.limit]]


def data_cpus(asked: int | None, workers: int) -> int:
    """Logical CPUs for the data tasks of so many workers; `asked` is the setting `cluster.data_cpus`, None to
    choose."""
    return DATA_CPUS + workers // WORKERS_PER_DATA_CPU if asked is None else asked


def task_cpus(asked: int | None, workers: int) -> float:
    """Logical CPUs of a data task: one, or less where each worker's stream has to have a task within the data tasks'
    CPUs. One that had no room would have an autoscaler start a node for it."""
    return min(1.0, math.floor(100 * data_cpus(asked, workers) / workers) / 100)


def needs(config: "Config", device: str) -> Needs:
    """Those of a run by its settings."""
    settings, share = config.deploy.cluster, config.recipe.train.gpus_per_worker if device == "gpu" else 1.0
    return Needs(device, settings.data_cpus, settings.labels, settings.data_labels, share)


# ------------------------------------------------------------------------------------------------------ asking the Ray


def up() -> list[Host]:
    """The nodes that are up and will stay, with all their resources."""
    return list(up_by_id().values())


def here(labels: Labels = ANY) -> list[Node]:
    """The nodes with the labels that are up and will stay, with all their resources."""
    return [host.has for host in up() if has(host.labels, labels)]


def free(own: Mapping[str, int] | None = None, needs: Needs | None = None) -> list[Host]:
    """The nodes of `up` with their free resources. `own`: the run's own workers by node, of such needs; their places
    count as free."""
    kind, share = (NEEDS[needs.device], needs.share) if needs else ("CPU", 1.0)
    available = ray_internals.available_by_node()
    found: list[Host] = []
    for name, host in up_by_id().items():
        node = dict(available.get(name, {}))
        node[kind] = node.get(kind, 0.0) + share * (own or {}).get(name, 0)
        found.append(Host(node, host.labels))
    return found


def most(device: str, labels: Labels = ANY) -> int:
    """How many CPUs or GPUs for workers the nodes that are up have, or the nodes that the autoscaler may start, if that
    is more."""
    return max(count(here(labels), device), count(may(device, labels), device))


def may(device: str, labels: Labels = ANY) -> list[Node]:
    """The nodes with the labels that there can be: those that are up, or, if that is more, those that the autoscaler
    would have, the ones with most CPUs or GPUs first."""
    up, document = here(labels), autoscaler()
    if document is None:
        return up
    all_of_them = reachable(startable(document), device, labels)
    return max(up, all_of_them, key=lambda nodes: count(nodes, device))


def absent(setting: str, labels: Labels) -> list[Problem]:
    """The problem of a setting whose labels no node has, nor may have. What asks for them would wait for ever."""
    if not labels or here(labels) or types(labels):
        return []
    reason = "no node of the cluster has these labels, and its autoscaler may start none that has"
    return [
        Problem(
            setting,
            dict(labels),
            reason,
            "write those of a node type in the cluster's file, or none",
            code="unknown_labels",
        )
    ]


def types(labels: Labels = ANY) -> dict[str, Node]:
    """The types of node with the labels that the autoscaler may start, by name."""
    return {name: host.has for name, (host, _) in may_start().kinds.items() if has(host.labels, labels)}


def may_start() -> Startable:
    """What the autoscaler may start; nothing where there is none."""
    return startable(autoscaler() or {})


def autoscaler() -> Mapping[str, Any] | None:
    """What the autoscaler may start, in the form of its file; None where nobody says so."""
    given = os.environ.get(AUTOSCALER_FILE, "")
    if given.startswith("{"):
        return dict(json.loads(given))
    if given and (file := Path(given).expanduser()).is_file():
        try:
            found = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(
                f"{AUTOSCALER_FILE}={given}: the file is no YAML ({error}); see rtrain cluster lint", code="unreadable"
            ) from None
        return found if isinstance(found, dict) else None
    groups = ray_internals.cluster_config()
    if not groups:
        return None
    numbers = [number if number >= 0 else ANY_NUMBER for _, _, number in groups]
    kinds = {
        name: {"resources": node, "max_workers": number}
        for (name, node, _), number in zip(groups, numbers, strict=True)
    }
    return {"max_workers": sum(numbers), "available_node_types": kinds}


@contextmanager
def data_tasks_on(labels: Labels) -> Iterator[None]:
    """Have the data tasks that this process begins in the `with` block run on nodes with the labels."""
    if not labels:
        yield
        return
    from ray.data import DataContext

    options = DataContext.get_current().execution_options
    before, options.label_selector = options.label_selector, dict(labels)
    try:
        yield
    finally:
        options.label_selector = before


_silent: set[str] = set()
"""Ids of nodes that took no connection. Ray counts on them for some seconds more, and a start that is placed there
waits in vain; they do not count until they answer again."""


def lost(nodes: Collection[str], patience_s: float) -> dict[str, Host]:
    """Those of the nodes, by id, that are gone. Where none is, it looks again until so many seconds have passed: Ray
    itself learns of it some time later, by health checks.

    A node whose raylet takes no connection is gone as well, whatever Ray thinks. The node of this process is not.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    end = time.monotonic() + patience_s
    while True:
        known = {node["NodeID"]: node for node in ray.nodes() if node["NodeID"] in nodes and node["NodeID"] != here}
        gone = {name: node for name, node in known.items() if not (node["Alive"] and _takes_connections(node))}
        if gone or not known or time.monotonic() > end:
            _silent.update(gone)
            return {name: Host(node["Resources"], node["Labels"]) for name, node in gone.items()}
        time.sleep(LOST_LOOK_S)


def _takes_connections(node: Mapping[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def node_here() -> Host:
    """The node of this process, with all its resources."""
    import ray

    name = ray.get_runtime_context().get_node_id()
    return next(Host(node["Resources"], node["Labels"]) for node in ray.nodes() if node["NodeID"] == name)


def head_host() -> str | None:
    """The host name of the head's node; None while Ray does not show it."""
    import ray

    heads = (node for node in ray.nodes() if node["Alive"] and ray_internals.HEAD_RESOURCE in node["Resources"])
    return next((str(node["NodeManagerHostname"]) for node in heads), None)


def leaving() -> set[str]:
    """Ids of the nodes that are being drained, after a spot notice or because they were idle."""
    return ray_internals.draining_nodes()


def up_by_id() -> dict[str, Host]:
    """The nodes of `up` by their ids."""
    import ray

    gone = leaving()
    return {
        node["NodeID"]: Host(node["Resources"], node["Labels"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in gone and (node["NodeID"] not in _silent or _takes_connections(node))
    }
