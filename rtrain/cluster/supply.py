"""Room for a run's workers on a Ray cluster: what its nodes have, what is free, and what its autoscaler may add.

A node is a map from the name of a resource (`CPU`, `GPU`) to how much of it the node has. The functions that count are
pure. `here`, `free`, `most` and `leaving` ask the Ray that this process is connected to.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rtrain import ray_internals
from rtrain.errors import Problem, UserError

Node = Mapping[str, float]
Labels = Mapping[str, str]
ANY: Labels = MappingProxyType({})
"""The labels that every node has."""
NEEDS = {"cpu": "CPU", "gpu": "GPU"}
"""The resource of which a worker takes one, by its device. A worker with a GPU takes no CPU."""
AUTOSCALER_FILE = "RTRAIN_AUTOSCALER_FILE"
"""Environment variable with the path of the autoscaler's file, which `session.on_node_start` sets on the head, or with
the file's node types themselves, as JSON: manifests for Kubernetes set it so. Ray itself (2.60) keeps what may be
started where its manager says so, which neither its launcher nor KubeRay does."""
ANY_NUMBER = 1000
"""Nodes of a type without a limit."""
DATA_CPUS = 2
"""Fewest logical CPUs that Ray Data gets beside the workers' CPUs: for a task that reads, and one that may wait for it.
Without them a data stream waits for ever, and nothing says so."""
WORKERS_PER_DATA_CPU = 8
"""Workers for which Ray Data gets one more CPU."""


# ------------------------------------------------------------------------------------------------------------- counting


def count(nodes: Iterable[Node], device: str) -> int:
    """How many workers the nodes have room for, without data tasks. A worker needs a whole CPU or GPU of one node."""
    return sum(int(node.get(NEEDS[device], 0.0)) for node in nodes)


def fits(nodes: Sequence[Node], device: str, asked: int | None) -> int:
    """How many workers the nodes have room for, beside the data tasks of so many; `asked` as in `data_cpus`."""
    cpus, places = count(nodes, "cpu"), count(nodes, device)
    each = 1 if device == "cpu" else 0
    room = (number for number in range(places, 0, -1) if number * each + data_cpus(asked, number) <= cpus)
    return next(room, 0)


def largest(nodes: Sequence[Node], types: Sequence[tuple[Node, int]], most_workers: int, device: str) -> int:
    """How many workers the cluster has room for once the autoscaler has started all the nodes that it may.

    `nodes`: the nodes that are always up (the head). `types`: a node of each type, and how many of this type there may
    be. `most_workers`: how many nodes of all types there may be together.
    """
    each = sorted((count([node], device) for node, number in types for _ in range(number)), reverse=True)
    return count(nodes, device) + sum(each[:most_workers])


def startable(document: Mapping[str, Any], labels: Labels = ANY) -> tuple[list[Node], list[tuple[Node, int]], int]:
    """The head, the worker types with their numbers, and the limit over all types, from an autoscaler's file; of these
    the nodes that have the labels."""
    limit, head = int(document.get("max_workers", 0)), document.get("head_node_type")
    heads: list[Node] = []
    types: list[tuple[Node, int]] = []
    for name, kind in document.get("available_node_types", {}).items():
        node = {resource: float(amount) for resource, amount in (kind.get("resources") or {}).items()}
        if not has(kind.get("labels"), labels):
            continue
        if name == head:
            heads.append(node)
        else:
            types.append((node, min(limit, int(kind.get("max_workers", limit)))))
    return heads, types, limit


def has(labels: Mapping[str, str] | None, wanted: Labels) -> bool:
    return wanted.items() <= {name: str(value) for name, value in (labels or {}).items()}.items()


def reachable(document: Mapping[str, Any], device: str, labels: Labels = ANY) -> list[Node]:
    """The nodes with the labels that there can be by an autoscaler's file: the head, and as many others as it may start
    at a time, those with room for most workers first."""
    heads, types, limit = startable(document, labels)
    started = sorted((node for node, number in types for _ in range(number)), key=lambda node: -count([node], device))
    return [*heads, *started[:limit]]


def slots(workers: int, spare: int, device: str, cpus: int, room: int) -> int:
    """How many trials of so many workers, each with `spare` CPUs for its data tasks, have room at a time; at least one.
    `room`: CPUs or GPUs of the nodes that there can be, `cpus` their CPUs."""
    each = workers + spare if device == "cpu" else workers
    return max(1, min(room // each, cpus // max(1, spare)))


def data_cpus(asked: int | None, workers: int) -> int:
    """Logical CPUs for the data tasks of so many workers; `asked` is the setting `cluster.data_cpus`, None to
    choose."""
    return DATA_CPUS + workers // WORKERS_PER_DATA_CPU if asked is None else asked


def task_cpus(asked: int | None, workers: int) -> float:
    """Logical CPUs of a data task: one, or less where each worker's stream has to have a task within the data tasks'
    CPUs. One that had no room would have an autoscaler start a node for it."""
    return min(1.0, math.floor(100 * data_cpus(asked, workers) / workers) / 100)


# ------------------------------------------------------------------------------------------------------ asking the Ray


def here(labels: Labels = ANY) -> list[Node]:
    """The nodes with the labels that are up and will stay, with all their resources."""
    return list(_staying(labels).values())


def free(own: Mapping[str, int] | None = None, device: str = "cpu", labels: Labels = ANY) -> list[Node]:
    """The nodes of `here` with their free resources. `own`: the run's own workers by node; their places count as
    free."""
    available = ray_internals.available_by_node()
    found: list[Node] = []
    for name in _staying(labels):
        node = dict(available.get(name, {}))
        node[NEEDS[device]] = node.get(NEEDS[device], 0.0) + (own or {}).get(name, 0)
        found.append(node)
    return found


def most(device: str, labels: Labels = ANY) -> int:
    """How many workers the nodes that are up have room for, or the nodes that the autoscaler may start, if that is
    more."""
    return max(count(here(labels), device), count(may(device, labels), device))


def may(device: str, labels: Labels = ANY) -> list[Node]:
    """The nodes with the labels that there can be: those that are up, or, where they have room for more workers, those
    that the autoscaler would have, the largest first."""
    up, document = here(labels), autoscaler()
    if document is None:
        return up
    all_of_them = reachable(document, device, labels)
    return max(up, all_of_them, key=lambda nodes: count(nodes, device))


def absent(setting: str, labels: Labels) -> list[Problem]:
    """The problem of a setting whose labels no node has, nor may have. What asks for them would wait for ever."""
    if not labels or here(labels) or types(labels):
        return []
    reason = "no node of the cluster has these labels, and its autoscaler may start none that has"
    return [Problem(setting, dict(labels), reason, "write those of a node type in the cluster's file, or none")]


def types(labels: Labels = ANY) -> dict[str, Node]:
    """The types of node with the labels that the autoscaler may start, by name."""
    document = autoscaler() or {}
    kinds = document.get("available_node_types", {})
    return {
        name: {resource: float(amount) for resource, amount in (kind.get("resources") or {}).items()}
        for name, kind in kinds.items()
        if name != document.get("head_node_type") and has(kind.get("labels"), labels)
    }


def autoscaler() -> Mapping[str, Any] | None:
    """What the autoscaler may start, in the form of its file; None where nobody says so."""
    given = os.environ.get(AUTOSCALER_FILE, "")
    if given.startswith("{"):
        return dict(json.loads(given))
    if given and (file := Path(given).expanduser()).is_file():
        try:
            found = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(
                f"{AUTOSCALER_FILE}={given}: the file is no YAML ({error}); see rtrain cluster lint"
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


def leaving() -> set[str]:
    """Ids of the nodes that are being drained, after a spot notice or because they were idle."""
    return ray_internals.draining_nodes()


def _staying(labels: Labels) -> dict[str, Node]:
    import ray

    gone = leaving()
    return {
        node["NodeID"]: node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in gone and has(node["Labels"], labels)
    }
