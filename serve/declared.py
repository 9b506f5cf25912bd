"""The endpoint as a file for Ray's `serve deploy`, of the same settings as `rtrain serve`: for whoever keeps what runs
in a repository. Pure; Ray's own schema of such files is asked in the tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rtrain.config import Serve
from serve.change import scaling

HEAD = """\
# serve deploy FILE, on a Ray of the cluster's. Written by `rtrain serve ARTIFACT --print-config`.
# Another version: change its folder in user_config alone, and deploy again. Replicas load it beside what they answer
# with. Another name, or one more model: change both args and user_config; the replicas are started anew.
"""
ELSEWHERE = {"host", "port", "replicas", "max_replicas", "tls_cert", "tls_key", "ingress", "insecure", "ungated"}
"""Settings that Ray has under names of its own, or that say how a command behaves."""


def text(artifacts: Mapping[str, Path], settings: Serve) -> str:
    return HEAD + yaml.safe_dump(document(artifacts, settings), sort_keys=False)


def document(artifacts: Mapping[str, Path], settings: Serve) -> dict[str, Any]:
    """`artifacts`: folders by the models' names. Paths are absolute: each node needs them as they are."""
    plain = Serve()
    changed = {
        name: value
        for name, value in settings.model_dump(mode="json").items()
        if name not in ELSEWHERE and value != getattr(plain, name)
    }
    tls = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key} if settings.tls_cert else {}
    number: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas and settings.max_replicas > settings.replicas:
        number = {"autoscaling_config": scaling.bounds(settings.replicas, settings.max_replicas)}
    folders = {name: str(folder.absolute()) for name, folder in artifacts.items()}
    ungated = {"ungated": True} if settings.ungated else {}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": settings.host, "port": settings.port, **tls},
        "applications": [
            {
                "name": "-".join(folders),
                "route_prefix": "/",
                "import_path": "serve.service:application",
                "args": {"models": dict(folders), **changed, **ungated},
                "deployments": [
                    {
                        "name": "rtrain",
                        **number,
                        "ray_actor_options": actor_options(settings, settings.threads * len(folders)),
                        "user_config": {"models": dict(folders)},
                    }
                ],
            }
        ],
    }


def actor_options(settings: Serve, cpus: int) -> dict[str, Any]:
    """What Ray is told of a replica's place: the CPUs and GPUs that it reserves, and the labels of its node."""
    gpus = {"num_gpus": settings.gpus} if settings.gpus else {}
    return {"num_cpus": cpus, **gpus, **({"label_selector": dict(settings.labels)} if settings.labels else {})}
