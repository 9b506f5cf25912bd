"""The endpoint as a file for Ray's `serve deploy`, of the same settings as `rtrain serve`: for whoever keeps what runs
in a repository. Pure; Ray's own schema of such files is asked in the tests."""

from pathlib import Path
from typing import Any

import yaml

from rtrain.artifact import read
from rtrain.config import Serve
from serve.change import scaling

HEAD = """\
# serve deploy FILE, on a Ray of the cluster's. Written by `rtrain serve ARTIFACT --print-config`.
# Another model: change user_config.artifact alone, and deploy again. Replicas load it beside what they answer with.
"""
ELSEWHERE = {"host", "port", "replicas", "max_replicas", "tls_cert", "tls_key", "ingress", "insecure", "ungated"}
"""Settings that Ray has under names of its own, or that say how a command behaves."""


def text(folder: Path, settings: Serve) -> str:
    return HEAD + yaml.safe_dump(document(folder, settings), sort_keys=False)


def document(folder: Path, settings: Serve) -> dict[str, Any]:
    """Paths are absolute: each node needs them as they are."""
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
    path = str(folder.absolute())
    ungated = {"ungated": True} if settings.ungated else {}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": settings.host, "port": settings.port, **tls},
        "applications": [
            {
                "name": read(folder).name,
                "route_prefix": "/",
                "import_path": "serve.service:application",
                "args": {"artifact": path, **changed, **ungated},
                "deployments": [
                    {
                        "name": "rtrain",
                        **number,
                        "ray_actor_options": {"num_cpus": settings.threads},
                        "user_config": {"artifact": path},
                    }
                ],
            }
        ],
    }
