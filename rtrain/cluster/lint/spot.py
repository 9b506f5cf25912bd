"""Rules about spot nodes: what they are for, who hears that one is taken away, and what becomes of it then."""

from collections.abc import Iterator

from rtrain.cluster import supply
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.clouds import Node, get, nodes
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Found
from rtrain.cluster.lint.shell import WORKER_START, Command, commands, parts

WATCHER = "rtrain.cluster.spot"


def head(document: Document, around: Around) -> Found:
    for node in nodes(document):
        if node.is_head and node.is_spot:
            what = "the head is a spot node: with it the whole cluster goes, and its jobs"
            yield document.line(*node.place()), what, "let the head be on demand"


def _workers(document: Document) -> list[Node]:
    return [node for node in nodes(document) if node.is_spot and not node.is_head]


def _watchers(document: Document) -> Iterator[tuple[Command, str | None]]:
    """The commands that start the watcher, and the cloud that each is told."""
    for command in commands(document):
        for listed in parts(command.text):
            if WATCHER in listed and not command.on_head_alone:
                told = [word for word in listed[listed.index(WATCHER) + 1 :] if not word.startswith(("-", ">", "<"))]
                yield command, told[0] if told else None


def watch(document: Document, around: Around) -> Found:
    spot, cloud = _workers(document), document.get("provider", "type")
    mend = f"start it in the background: python -m {WATCHER} {cloud} --address=$RAY_HEAD_IP:6379 &"
    if spot and not any(_watchers(document)):
        what = f"nobody listens for the spot notice of {spot[0].name}: its last updates are lost"
        yield document.line(WORKER_START), what, mend
    for command, told in _watchers(document) if spot else ():
        if told != cloud:
            does = f"asks the metadata service of {told}" if told else "is told no cloud, and ends at once"
            what = f"the watcher {does}: nobody hears the spot notice of {spot[0].name}"
            yield document.within(command.place, WATCHER), what, mend


def label(document: Document, around: Around) -> Found:
    [(name, value)] = supply.SPOT.items()
    for node in _workers(document):
        if not supply.has(node.kind.get("labels"), supply.SPOT):
            what = f"{node.name} does not say that it is a spot node: each loss without a notice counts as a crash"
            yield document.line("available_node_types", node.name, "labels"), what, f"write labels: {{{name}: {value}}}"


def request(document: Document, around: Around) -> Found:
    """AWS alone: what becomes of the request, and of the node, when it is taken away."""
    for node in nodes(document):
        place = ("InstanceMarketOptions", "SpotOptions")
        options = get(node.config, *place) or {}
        if options.get("SpotInstanceType") == "persistent":
            what = f"the request of {node.name} stays when its node has gone: AWS starts nodes that nobody asked for"
            yield document.line(*node.place(*place, "SpotInstanceType")), what, "write SpotInstanceType: one-time"
        does = options.get("InstanceInterruptionBehavior", "terminate")
        if does != "terminate":
            what = f"a node of {node.name} that is taken away is kept ({does}): it is paid for, and comes back too late"
            line = document.line(*node.place(*place, "InstanceInterruptionBehavior"))
            yield line, what, "write InstanceInterruptionBehavior: terminate"
