"""CPUs of replicas: how many one reserves, and what is said while replicas wait for nodes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rtrain.cluster import capacity
from rtrain.config import Serve
from rtrain.core.errors import Problem

Nodes = Sequence[capacity.Node]
SAY_EVERY_S = 30.0


def reserved(settings: Serve, free: Nodes, up: Nodes, may: Nodes, models: int = 1) -> tuple[int, str]:
    """How many logical CPUs a replica is to reserve, and what to tell where that is not as many as it has threads, or
    not at once: those of an engine for each model. `free`: what nobody holds of each node that is up; `up`: all that
    these nodes have; `may`: the nodes that there can be.

    Ray starts nodes for what is reserved and missing, where it can. Where it cannot, a replica would wait for ever
    without a word; without a reservation its threads share what processors there are.
    """
    each = settings.threads * models
    now, coming = _room(free, each), _room(may, each) - _room(up, each)
    if now >= settings.copies:
        return each, ""
    beside = f" for each of {models} models" if models > 1 else ""
    wanted = f"serve.replicas={settings.copies} with serve.threads={settings.threads}{beside} ask for more CPUs than"
    if now + coming >= settings.copies:
        return each, f"{wanted} are free: waiting for nodes"
    has = sum(node.get("CPU", 0.0) for node in free)
    return 0, f"{wanted} Ray has free ({has:g}), and no node can come: replicas reserve none, and share what there is"


def without_gpus(settings: Serve, nodes: Nodes) -> Problem | None:
    """The problem of `serve.gpus` where no node has so many, nor may have: replicas would wait for ever."""
    most = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    if settings.gpus <= most:
        return None
    reason = f"the node with most GPUs has {most:g}, and no node with more can come"
    return Problem(
        "serve.gpus", settings.gpus, reason, f"write {most:g}, or start nodes with GPUs", code="too_few_gpus"
    )


def _room(nodes: Nodes, cpus: int) -> int:
    """How many replicas of so many CPUs the nodes have room for."""
    return sum(int(node.get("CPU", 0.0) // cpus) for node in nodes)


@contextmanager
def said(what: Callable[[], str], tell: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, tell every 30 s what `what` returns, if anything."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(SAY_EVERY_S):
            if text := what():
                tell(text)

    thread = threading.Thread(target=look, daemon=True, name="rtrain-waiting")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
