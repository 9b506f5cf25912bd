"""`rtrain serve`: an endpoint, its number of replicas, and Ray if none is running.

A Ray started here prestarts one process per actor. These processes import Ray Serve while this command imports its own
part, and inherit the variables of Ray Serve, which actors need.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.connection import LocalClusterOptions, session, would_start_ray
from rtrain.config import Config, ServeConfig
from rtrain.core import engines, env
from serve.ingress import ingress_choice
from serve.ray_config import max_replica_count, max_requests_per_replica

if TYPE_CHECKING:
    from serve.deployment import Endpoint

MAX_DEFAULT_REPLICAS = 4
"""More replicas are wanted by those who have such a load, and know of it."""
REPLICA_BASE_MB = 400.0
"""Memory of a replica beside its models: 416 to 444 MB with one of 18 MB."""
MODEL_MEMORY_FACTOR = 2.0
"""Memory of a loaded model over the size of its files, with another one beside it while it changes."""
SHAPE_PLANS_MB = 350.0
"""Memory of the plans of a graph for all shapes of its calls: 335 MB for 230 shapes of a model of 6 layers of 384, 190
MB for 159 of one of 2 layers of 32 (OpenVINO, an AMD EPYC)."""
SERVE_ACTORS = 2
"""Ray Serve's controller and its proxy."""


class HostCapacity(NamedTuple):
    """Where replicas may run."""

    cores: int
    memory_mb: float
    is_multi_node: bool = False
    """Whether there are several machines, or may be."""


@contextmanager
def launch_endpoint(
    config: Config, settings: ServeConfig, artifacts: Mapping[str, Path], notify: Callable[[str], None]
) -> Iterator["Endpoint"]:
    """Serve the artifacts, each by the name that it is given, for the `with` block, by `settings` in place of those of
    `config`. Raises as `deployment.start_endpoint` does."""
    folders = artifacts.values()
    folder = next(iter(folders)).parent
    selected_ingress, needs = None, LocalClusterOptions()
    if would_start_ray(config):
        settings = resolve_replicas(settings, folders, local_host(), notify)
        max_requests, max_replicas = max_requests_per_replica(settings, len(artifacts)), max_replica_count(settings)
        selected_ingress = ingress_choice.IngressChoice(
            ingress_choice.select_ingress(settings, max_requests, max_replicas, notify, before_ray=True)
        )
        needs = LocalClusterOptions(
            prestarted_workers=SERVE_ACTORS + settings.min_replicas,
            environment=ingress_choice.controller_environment(selected_ingress.haproxy),
            worker_setup_function=f"{ray_internals.prepare_actor_process.__module__}.{ray_internals.prepare_actor_process.__name__}",
            background_task=_import_serve,
        )
    try:
        with session(config, folder, lambda event: notify(event["text"]), options=needs):
            from serve import deployment

            if selected_ingress is None:
                host_capacity = ray_host(
                    [host.resources for host in capacity.available_nodes()],
                    is_multi_node=ingress_choice.has_several_nodes(),
                )
                settings = resolve_replicas(settings, folders, host_capacity, notify)
            with deployment.start_endpoint(
                artifacts, settings, notify=notify, selected_ingress=selected_ingress
            ) as running_endpoint:
                yield running_endpoint
    finally:
        if selected_ingress is not None and selected_ingress.haproxy is not None:
            ingress_choice.remove(selected_ingress.haproxy.folder)  # where Ray did not start, say


def _import_serve() -> None:
    ray_internals.import_serve()
    import serve.deployment  # noqa: F401


def local_host() -> HostCapacity:
    """This machine, before it has a Ray of its own."""
    available, limit = psutil.virtual_memory().available, env.free_memory_bytes()
    return HostCapacity(env.available_cores(), (available if limit is None else min(available, limit)) / 1e6)


def ray_host(free_nodes: Iterable[Mapping[str, float]], is_multi_node: bool) -> HostCapacity:
    """This machine, as part of a Ray that is there. `free_nodes`: what its nodes have free."""
    return HostCapacity(env.available_cores(), sum(node.get("memory", 0.0) for node in free_nodes) / 1e6, is_multi_node)


def resolve_replicas(
    settings: ServeConfig, folders: Collection[Path], host_capacity: HostCapacity, notify: Callable[[str], None]
) -> ServeConfig:
    """The settings with a number of replicas; `notify` gets a line if the machine has decided it.

    One per core, up to `MAX_DEFAULT_REPLICAS`, beside one core for HAProxy if there are more than two: on two, a second
    replica and HAProxy would take the time of the first. One on a cluster, whose nodes may have other work, and one
    with autoscaling.
    """
    if settings.replicas is not None:
        return settings
    cores, memory_mb, is_multi_node = host_capacity
    if is_multi_node or cores <= 2 or settings.max_replicas:
        return settings.model_copy(update={"replicas": 1})
    models_mb = MODEL_MEMORY_FACTOR * sum(map(_folder_size_mb, folders))
    replica_mb = REPLICA_BASE_MB + models_mb + SHAPE_PLANS_MB * sum(map(_has_shape_plans, folders))
    max_by_cores = max(1, min(MAX_DEFAULT_REPLICAS, (cores - 1) // (settings.threads * len(folders))))
    replicas = max(1, min(max_by_cores, int(memory_mb / replica_mb)))
    memory = "" if replicas == max_by_cores else f" and {memory_mb / 1e3:.1f} GB of free memory"
    notify(f"{replicas} {'replica' if replicas == 1 else 'replicas'}, by {cores} cores{memory} (serve.replicas)")
    return settings.model_copy(update={"replicas": replicas})


def _has_shape_plans(folder: Path) -> bool:
    return any(engine.compiles_per_shape and engine.find_files(folder) for engine in engines.ENGINES.values())


def _folder_size_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
