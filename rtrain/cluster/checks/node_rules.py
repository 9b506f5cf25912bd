"""Rules about nodes: who reaches them, where they are, what they are made of, which of them may be taken away."""

import re
from collections.abc import Iterator

from rtrain.cluster import capacity
from rtrain.cluster.checks.clouds import Node, get, nodes
from rtrain.cluster.checks.findings import Around, Found, shown
from rtrain.cluster.checks.shell_commands import WORKER_START, Command, commands, parts
from rtrain.cluster.checks.yaml_document import Document
from rtrain.cluster.instance_types import BY_NAME

ZONES = {"aws": r"(?:[a-z]|-[a-z0-9-]+-\d+[a-z]?)", "gcp": r"-[a-z]+\d*[a-z]?"}
"""What follows the region in the name of a zone; those of AWS are also Local Zones and Wavelength Zones, as
`us-west-2-lax-1a` and `us-east-1-wl1-bos-wlz-1`."""
REGIONS = re.compile(
    r"\.efs\.(?P<host>[a-z0-9-]+)\.amazonaws\.|\bregions/(?P<path>[a-z0-9-]+)/"
    r"|--region[= ](?P<option>[a-z0-9-]+)|--zone[= ](?P<zone>[a-z0-9-]+)"
)
"""Where a file names its region or zone beside its provider: the host of a file system, a subnetwork, the tunnel to a
node. In another region or zone they are not found."""
LONGEST_IDLE_MINUTES = 60
WATCHER = "rtrain.cluster.spot_watcher"


def public_address(document: Document, around: Around) -> Found:
    provider = document.get("provider", default={})
    for node in nodes(document):
        if not node.cloud.internal(provider, node.config):
            place = ("provider", "use_internal_ips") if provider.get("use_internal_ips") is not True else node.place()
            what = f"{node.name} gets a public address, at which the internet can try Ray's ports"
            mend = "write use_internal_ips: true under provider, and no address of its own under node_config"
            yield document.line(*place), what, mend
            return


def zone(document: Document, around: Around) -> Found:
    provider = document.get("provider", default={})
    region, named = provider.get("region"), provider.get("availability_zone")
    if provider.get("type") not in ("aws", "gcp") or not region or not named:
        return
    zones = [one.strip() for one in str(named).split(",")]
    for one in zones:
        if not re.fullmatch(rf"{re.escape(str(region))}{ZONES[provider['type']]}", one):
            what = f"the zone {one} is not in the region {region}: no node starts"
            yield document.line("provider", "availability_zone"), what, f"name zones of {region}"
    known = {"region": [str(region)], "zone": zones}
    for place, value in document.walk():
        for found in REGIONS.finditer(value) if isinstance(value, str) else ():
            kind, name = "zone" if found["zone"] else "region", found[found.lastgroup or 0]
            if name not in known[kind]:
                what = f"{shown(place)} names the {kind} {name}, and provider {' and '.join(known[kind])}"
                yield document.within(place, name), what, f"write {known[kind][0]}"


def head_without_tasks(document: Document, around: Around) -> Found:
    for node in nodes(document):
        cpus = get(node.kind, "resources", "CPU")
        if node.is_head and cpus != 0 and document.get("max_workers", default=capacity.MAX_WORKERS):
            place = ("available_node_types", node.name, "resources")
            what = "tasks are placed on the head: where they use up its memory, the cluster goes with them"
            yield document.line(*place, "CPU"), what, "write resources: {CPU: 0} for the head"


def resources(document: Document, around: Around) -> Found:
    for node in nodes(document):
        known, said = BY_NAME.get(node.instance or ""), node.kind.get("resources") or {}
        for name, has in (("CPU", known.cpus), ("GPU", known.gpus)) if known else ():
            place = ("available_node_types", node.name, "resources", name)
            if said.get(name, 0) > has:
                what = f"{node.name} says {name}: {said[name]}, and {node.instance} has {has}"
                yield document.line(*place), what, f"write {name}: {has}"
            elif name == "GPU" and has and not said.get(name):
                what = f"{node.instance} has {has} GPU, and {node.name} does not say so: none is started for its sake"
                yield document.line(*place), what, f"write GPU: {has}"


def unbounded(document: Document, around: Around) -> Found:
    if document.get("max_workers") is None and document.get("available_node_types"):
        what = f"there is no max_workers: Ray takes {capacity.MAX_WORKERS}, whatever the node types say"
        yield 1, what, "write max_workers, the upper limit of what an hour can cost"
    idle = document.get("idle_timeout_minutes", default=5)
    if isinstance(idle, int | float) and idle > LONGEST_IDLE_MINUTES:
        what = f"a worker without work is paid for {idle:g} minutes"
        yield document.line("idle_timeout_minutes"), what, f"write {LONGEST_IDLE_MINUTES} or less; 5 is usual"
    kinds = document.get("available_node_types", default={})
    most = document.get("max_workers", default=capacity.MAX_WORKERS)
    for name, kind in kinds.items() if isinstance(kinds, dict) else ():
        least, limit = get(kind, "min_workers") or 0, get(kind, "max_workers")
        may = most if limit is None else min(limit, most)
        if least > may and name != document.get("head_node_type"):
            what = f"{name} asks for {least} nodes at least, and may have {may}"
            yield document.line("available_node_types", name, "min_workers"), what, "lower min_workers"


def spot_head(document: Document, around: Around) -> Found:
    for node in nodes(document):
        if node.is_head and node.is_spot:
            what = "the head is a spot node: with it the whole cluster goes, and its jobs"
            yield document.line(*node.place()), what, "let the head be on demand"


def _spot_workers(document: Document) -> list[Node]:
    return [node for node in nodes(document) if node.is_spot and not node.is_head]


def _watchers(document: Document) -> Iterator[tuple[Command, str | None]]:
    """The commands that start the watcher, and the cloud that each is told."""
    for command in commands(document):
        for listed in parts(command.text):
            if WATCHER in listed and not command.on_head_alone:
                told = [word for word in listed[listed.index(WATCHER) + 1 :] if not word.startswith(("-", ">", "<"))]
                yield command, told[0] if told else None


def spot_watcher(document: Document, around: Around) -> Found:
    spot, cloud = _spot_workers(document), document.get("provider", "type")
    mend = f"start it in the background: python -m {WATCHER} {cloud} --address=$RAY_HEAD_IP:6379 &"
    if spot and not any(_watchers(document)):
        what = f"nobody listens for the spot notice of {spot[0].name}: its last updates are lost"
        yield document.line(WORKER_START), what, mend
    for command, told in _watchers(document) if spot else ():
        if told != cloud:
            does = f"asks the metadata service of {told}" if told else "is told no cloud, and ends at once"
            what = f"the watcher {does}: nobody hears the spot notice of {spot[0].name}"
            yield document.within(command.place, WATCHER), what, mend


def spot_label(document: Document, around: Around) -> Found:
    [(name, value)] = capacity.SPOT.items()
    for node in _spot_workers(document):
        if not capacity.has(node.kind.get("labels"), capacity.SPOT):
            what = f"{node.name} does not say that it is a spot node: each loss without a notice counts as a crash"
            yield document.line("available_node_types", node.name, "labels"), what, f"write labels: {{{name}: {value}}}"
