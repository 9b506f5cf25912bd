"""The endpoint as a file for Ray's `serve deploy`, of the same settings as `rtrain serve`: for whoever keeps what runs
in a repository. Pure; Ray's own schema of such files is asked in the tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rtrain.config import Serve
from serve.rollout import autoscaling

RAY_SERVE = {
    # Ray ends a proxy that is not up after 5 s, which a busy machine needs for its imports.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # A proxy that has died is replaced after three misses, of which Ray's own 10 s would make half a minute.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Between two reports of a replica's load, by which the number of replicas is decided; Ray's own 10 s are slow.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    # The application on the replica's own event loop: nothing of ours blocks it (engine, files and long texts have
    # threads), and a second loop costs every request a hop to it and one back.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Ray Serve's settings of its controller and of all that it starts."""
APPLICATION = "rtrain"
"""The application's name on Ray Serve. Ray's own proxy tells it without a key (`/-/routes`), so it names no model."""
HEAD = """\
# serve deploy FILE, on a Ray of the cluster's. Written by `rtrain serve ARTIFACT --print-config`.
# Another version: change its folder in user_config alone, and deploy again. Each replica loads it beside what it
# answers with, and switches when it has proven it; where it refuses it, its log says why, and it goes on as before.
# Another name, or one more model: change both args and user_config; the replicas are started anew.
# Requests go through Ray Serve's own proxy, which takes several times as long as HAProxy: that one is started and
# closed to others by `rtrain serve` alone. Start Ray on the head with what `rtrain serve` has its controller know:
{}
"""
ELSEWHERE = {"port", "replicas", "max_replicas", "ingress", "ungated"}
"""Settings that Ray has under names of its own, or that say how a command behaves. Address and certificate Ray has too;
replicas listen with them for gRPC, and tell by them who can reach the endpoint."""


def text(artifacts: Mapping[str, Path], settings: Serve) -> str:
    known = "\n".join(f"#   export {name}={value}" for name, value in RAY_SERVE.items())
    return HEAD.format(known) + yaml.safe_dump(document(artifacts, settings), sort_keys=False)


def document(artifacts: Mapping[str, Path], settings: Serve) -> dict[str, Any]:
    """`artifacts`: folders by the models' names. Paths are absolute: each node needs them as they are."""
    plain = Serve().model_dump(mode="json")
    changed = {
        name: value
        for name, value in settings.model_dump(mode="json").items()
        if name not in ELSEWHERE and value != plain[name]
    }
    tls = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key} if settings.tls_cert else {}
    number: dict[str, Any] = {"num_replicas": settings.copies}
    if settings.max_replicas and settings.max_replicas > settings.copies:
        number = {"autoscaling_config": autoscaling.bounds(settings.copies, settings.max_replicas)}
    folders = {name: str(folder.absolute()) for name, folder in artifacts.items()}
    ungated = {"ungated": True} if settings.ungated else {}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {
            "host": settings.host,
            "port": settings.port,
            "keep_alive_timeout_s": settings.keep_alive_s,
            **tls,
        },
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": "serve.kuberay_app:application",
                "args": {"models": dict(folders), **changed, **ungated},
                "deployments": [
                    {
                        "name": "rtrain",
                        **number,
                        "ray_actor_options": {
                            **actor_options(settings, settings.threads * len(folders)),
                            "runtime_env": {"env_vars": dict(RAY_SERVE)},
                        },
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


def most_replicas(settings: Serve) -> int:
    return settings.max_replicas or settings.copies


def most_requests(settings: Serve, models: int = 1) -> int:
    """Requests of a replica at a time. Each holds a text at least, so that this many reach the models' own queues,
    whose 503 says when to come back."""
    return max(64, settings.max_queue_rows + 2 * settings.max_batch_rows) * models
