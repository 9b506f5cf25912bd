"""CPU reservations of replicas, and messages while replicas wait for nodes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rtrain.cluster import capacity
from rtrain.config import ServeConfig
from rtrain.core.errors import Problem

NodeResources = Sequence[capacity.NodeResources]
NOTIFY_INTERVAL_S = 30.0


def choose_cpu_reservation(
    settings: ServeConfig,
    free_nodes: NodeResources,
    live_nodes: NodeResources,
    potential_nodes: NodeResources,
    models: int = 1,
) -> tuple[int, str]:
    """CPUs that a replica reserves, and a message if it reserves fewer than its threads or must wait. A replica has the
    threads of one engine per model. `free_nodes`: free resources of live nodes; `live_nodes`: all their resources;
    `potential_nodes`: nodes that may exist.

    Where possible, Ray starts nodes for reservations that do not fit. Elsewhere a replica would wait forever without a
    message; without a reservation its threads share the available processors.
    """
    cpus_per_replica = settings.threads * models
    fitting_now, fitting_later = (
        _count_fitting_replicas(free_nodes, cpus_per_replica),
        _count_fitting_replicas(potential_nodes, cpus_per_replica)
        - _count_fitting_replicas(live_nodes, cpus_per_replica),
    )
    if fitting_now >= settings.min_replicas:
        return cpus_per_replica, ""
    models_text = f" for each of {models} models" if models > 1 else ""
    request_text = (
        f"serve.replicas={settings.min_replicas} with serve.threads={settings.threads}{models_text} ask "
        "for more CPUs than"
    )
    if fitting_now + fitting_later >= settings.min_replicas:
        return cpus_per_replica, f"{request_text} are free: waiting for nodes"
    free_cpus = sum(node.get("CPU", 0.0) for node in free_nodes)
    return (
        0,
        f"{request_text} Ray has free ({free_cpus:g}), and no node can come: replicas reserve none, and share what "
        "there is",
    )


def check_gpus(settings: ServeConfig, nodes: NodeResources) -> Problem | None:
    """The problem of `serve.gpus` where no node has so many, nor may have: replicas would wait for ever."""
    max_gpus = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    if settings.gpus <= max_gpus:
        return None
    reason = f"the node with most GPUs has {max_gpus:g}, and no node with more can come"
    return Problem(
        "serve.gpus", settings.gpus, reason, f"write {max_gpus:g}, or start nodes with GPUs", code="too_few_gpus"
    )


def _count_fitting_replicas(nodes: NodeResources, cpus: int) -> int:
    """How many replicas of so many CPUs the nodes have room for."""
    return sum(int(node.get("CPU", 0.0) // cpus) for node in nodes)


@contextmanager
def notify_periodically(get_message: Callable[[], str], notify: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, tell every 30 s what `get_message` returns, if anything."""
    stop_event = threading.Event()

    def notify_until_stopped() -> None:
        while not stop_event.wait(NOTIFY_INTERVAL_S):
            if message := get_message():
                notify(message)

    thread = threading.Thread(target=notify_until_stopped, daemon=True, name="rtrain-waiting")
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
