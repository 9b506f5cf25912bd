"""`rtrain serve`: an endpoint, and Ray if none is running.

A Ray started here prestarts one process per actor. These processes import Ray Serve while this command imports its own
part, and inherit the variables of Ray Serve, which actors need.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.connection import LocalClusterOptions, session, would_start_ray
from rtrain.config import Config, ServeConfig
from serve import replica_count
from serve.ingress import ingress_choice
from serve.ray_config import max_replica_count, max_requests_per_replica

if TYPE_CHECKING:
    from serve.deployment import Endpoint

SERVE_ACTORS = 2
"""Ray Serve's controller and its proxy."""


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
        settings = _set_replicas(settings, folders, replica_count.local_host(), notify)
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
                host_capacity = replica_count.ray_host(
                    [host.resources for host in capacity.available_nodes()],
                    is_multi_node=ingress_choice.has_several_nodes(),
                )
                settings = _set_replicas(settings, folders, host_capacity, notify)
            with deployment.start_endpoint(
                artifacts, settings, notify=notify, selected_ingress=selected_ingress
            ) as running_endpoint:
                yield running_endpoint
    finally:
        if selected_ingress is not None and selected_ingress.haproxy is not None:
            ingress_choice.remove(selected_ingress.haproxy.folder)  # where Ray did not start, say


def _set_replicas(
    settings: ServeConfig,
    folders: Iterable[Path],
    host_capacity: replica_count.HostCapacity,
    notify: Callable[[str], None],
) -> ServeConfig:
    """Set the number of replicas from the available capacity, if it is not configured."""
    sized_settings, message = replica_count.resolve_replicas(settings, folders, host_capacity)
    if message:
        notify(message)
    return sized_settings


def _import_serve() -> None:
    ray_internals.import_serve()
    import serve.deployment  # noqa: F401
