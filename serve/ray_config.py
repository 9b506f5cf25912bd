"""The endpoint as a file for Ray's `serve deploy`, of the same settings as `rtrain serve`: for whoever keeps what runs
in a repository. Pure; Ray's own schema of such files is asked in the tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rtrain.config import ServeConfig
from serve.rollout import autoscaling

RAY_SERVE_ENVIRONMENT = {
    # Ray ends a proxy that is not up after 5 s, which a busy machine needs for its imports.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # A dead proxy is replaced after three missed checks; Ray's default of 10 s would make this half a minute.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Interval of load reports for autoscaling; Ray's default of 10 s is slow.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    # The application on the replica's own event loop: nothing of ours blocks it (engine, files and long texts have
    # threads), and a second loop costs every request a hop to it and one back.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Ray Serve's settings of its controller and of all that it starts."""
APPLICATION_NAME = "rtrain"
"""The application's name on Ray Serve. Ray's own proxy tells it without a key (`/-/routes`), so it names no model."""
FILE_HEADER = """\
# For `serve deploy FILE` on a Ray cluster. Written by `rtrain serve ARTIFACT --print-config`.
# New version: change its folder in user_config alone, and deploy again. Each replica loads it beside the current
# version, verifies it and switches. If it refuses it, its log has the reason, and it keeps the current version.
# New name, or one more model: change both args and user_config; the replicas restart.
# Requests go through Ray Serve's own proxy, which is several times slower than HAProxy: only `rtrain serve` starts and
# hardens HAProxy. Start Ray on the head with these variables, as `rtrain serve` does:
{}
"""
EXCLUDED_SETTINGS = {"port", "replicas", "max_replicas", "ingress", "ungated"}
"""Settings that Ray has under names of its own, or that say how a command behaves. Address and certificate Ray has too;
replicas listen with them for gRPC, and tell by them who can reach the endpoint."""


def format_ray_config(artifacts: Mapping[str, Path], settings: ServeConfig) -> str:
    exports = "\n".join(f"#   export {name}={value}" for name, value in RAY_SERVE_ENVIRONMENT.items())
    return FILE_HEADER.format(exports) + yaml.safe_dump(build_ray_config(artifacts, settings), sort_keys=False)


def build_ray_config(artifacts: Mapping[str, Path], settings: ServeConfig) -> dict[str, Any]:
    """`artifacts`: folders by model name. Paths are absolute: each node opens the same path."""
    defaults = ServeConfig().model_dump(mode="json")
    changed_settings = {
        name: value
        for name, value in settings.model_dump(mode="json").items()
        if name not in EXCLUDED_SETTINGS and value != defaults[name]
    }
    tls = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key} if settings.tls_cert else {}
    replica_options: dict[str, Any] = {"num_replicas": settings.min_replicas}
    if settings.max_replicas and settings.max_replicas > settings.min_replicas:
        replica_options = {
            "autoscaling_config": autoscaling.autoscaling_config(settings.min_replicas, settings.max_replicas)
        }
    folders = {name: str(folder.absolute()) for name, folder in artifacts.items()}
    ungated_option = {"ungated": True} if settings.ungated else {}
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
                "name": APPLICATION_NAME,
                "route_prefix": "/",
                "import_path": "serve.kuberay_app:application",
                "args": {"models": dict(folders), **changed_settings, **ungated_option},
                "deployments": [
                    {
                        "name": "rtrain",
                        **replica_options,
                        "ray_actor_options": {
                            **ray_actor_options(settings, settings.threads * len(folders)),
                            "runtime_env": {"env_vars": dict(RAY_SERVE_ENVIRONMENT)},
                        },
                        "user_config": {"models": dict(folders)},
                    }
                ],
            }
        ],
    }


def ray_actor_options(settings: ServeConfig, cpus: int) -> dict[str, Any]:
    """Ray options of a replica: reserved CPUs and GPUs, and node labels."""
    gpus = {"num_gpus": settings.gpus} if settings.gpus else {}
    return {"num_cpus": cpus, **gpus, **({"label_selector": dict(settings.labels)} if settings.labels else {})}


def max_replica_count(settings: ServeConfig) -> int:
    return settings.max_replicas or settings.min_replicas


def max_requests_per_replica(settings: ServeConfig, num_models: int = 1) -> int:
    """Requests of a replica at a time. Each holds a text at least, so that this many reach the models' own queues,
    whose 503 says when to come back."""
    return max(64, settings.max_queued_inputs + 2 * settings.max_batch_size) * num_models
