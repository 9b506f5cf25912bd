"""`rtrain serve`: an endpoint with the Ray that it needs.

A Ray that is started for it has as many processes ahead as there will be actors. They import Ray Serve while this
command imports its own part, and have the variables of Ray Serve, without which they could not become the actors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.connection import Needs, session, starts_ray
from rtrain.config import Config, Serve
from serve import replica_count
from serve.ingress import ingress_choice
from serve.ray_config import most_replicas, most_requests

if TYPE_CHECKING:
    from serve.deployment import Endpoint

OWN_ACTORS = 2
"""Ray Serve's controller and its proxy."""


@contextmanager
def endpoint(
    config: Config, settings: Serve, artifacts: Mapping[str, Path], tell: Callable[[str], None]
) -> Iterator["Endpoint"]:
    """Serve the artefacts, each by the name that it is given, for the `with` block, by `settings` in place of those of
    `config`. Raises as `deployment.start` does."""
    folders = artifacts.values()
    folder = next(iter(folders)).parent
    chosen, needs = None, Needs()
    if starts_ray(config):
        settings = _sized(settings, folders, replica_count.alone(), tell)
        most, replicas = most_requests(settings, len(artifacts)), most_replicas(settings)
        chosen = ingress_choice.Chosen(ingress_choice.choose(settings, most, replicas, tell, before_ray=True))
        needs = Needs(
            ahead=OWN_ACTORS + settings.copies,
            environment=ingress_choice.variables(chosen.front),
            first=f"{ray_internals.before_actors.__module__}.{ray_internals.before_actors.__name__}",
            meanwhile=_import,
        )
    try:
        with session(config, folder, lambda event: tell(event["text"]), needs=needs):
            from serve import deployment

            if chosen is None:
                where = replica_count.host([one.has for one in capacity.free()], several=ingress_choice.several_nodes())
                settings = _sized(settings, folders, where, tell)
            with deployment.start(artifacts, settings, tell=tell, chosen=chosen) as found:
                yield found
    finally:
        if chosen is not None and chosen.front is not None:
            ingress_choice.remove(chosen.front.folder)  # where Ray did not start, say


def _sized(settings: Serve, folders: Iterable[Path], where: replica_count.Host, tell: Callable[[str], None]) -> Serve:
    """With as many replicas as there is room for, where nobody has said how many."""
    found, line = replica_count.resolved(settings, folders, where)
    if line:
        tell(line)
    return found


def _import() -> None:
    ray_internals.import_serve()
    import serve.deployment  # noqa: F401
