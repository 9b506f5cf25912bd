"""The Ray Serve deployment of the endpoint in plain values, for `rtrain serve`, for KubeRay (`kuberay_app`) and for the
file of Ray's `serve deploy`. No Ray is imported; tests validate the file by Ray's own schema."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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
DEPLOYMENT_NAME = "rtrain"
CONSTRUCTOR_ATTEMPTS = 1
"""What fails while an artifact is loaded fails again; Ray's default of 20 attempts takes minutes."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 5.0
"""A dead replica is replaced after the next check, a hung one after three misses; Ray's defaults need ten seconds and
two minutes for that."""
LOGGING: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}
"""Ray Serve's own logs; `serve.access_log` has the requests."""
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
    folders = {name: str(folder.absolute()) for name, folder in artifacts.items()}
    ungated_option = {"ungated": True} if settings.ungated else {}
    environment = {"runtime_env": {"env_vars": dict(RAY_SERVE_ENVIRONMENT)}}
    spec = deployment_spec(settings, len(folders), settings.threads * len(folders), environment)
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
                    # `kuberay_app.application` gives the deployment all other options.
                    {
                        "name": spec["name"],
                        **replica_options(settings),
                        "ray_actor_options": spec["ray_actor_options"],
                        "user_config": {"models": dict(folders)},
                    }
                ],
            }
        ],
    }


def deployment_spec(
    settings: ServeConfig, num_models: int, cpus: int, actor_options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Options of the Ray Serve deployment, without the number of replicas. `cpus`: reserved by each replica.
    `actor_options`: more Ray options of the replicas."""
    max_requests = max_requests_per_replica(settings, num_models)
    gpus = {"num_gpus": settings.gpus} if settings.gpus else {}
    labels = {"label_selector": dict(settings.labels)} if settings.labels else {}
    return {
        "name": DEPLOYMENT_NAME,
        "max_ongoing_requests": max_requests,
        "max_queued_requests": max_requests,
        "backpressure_config": {"status_code": 503, "retry_after_s": 1},
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": CONSTRUCTOR_ATTEMPTS,
        # Requests end by their deadline; requests that still run after it get no reply.
        "graceful_shutdown_timeout_s": settings.request_timeout_s + 1,
        "graceful_shutdown_wait_loop_s": 0.1,
        "logging_config": dict(LOGGING),
        "ray_actor_options": {"num_cpus": cpus, **gpus, **labels, **actor_options},
    }


def replica_options(settings: ServeConfig) -> dict[str, Any]:
    """Number of replicas: fixed, or bounds and a policy."""
    if max_replica_count(settings) <= settings.min_replicas:
        return {"num_replicas": settings.min_replicas}
    return {"autoscaling_config": autoscaling.autoscaling_config(settings.min_replicas, max_replica_count(settings))}


def max_replica_count(settings: ServeConfig) -> int:
    return settings.max_replicas or settings.min_replicas


def max_requests_per_replica(settings: ServeConfig, num_models: int = 1) -> int:
    """Requests of a replica at a time. Each holds a text at least, so that this many reach the models' own queues,
    whose 503 says when to come back."""
    return max(64, settings.max_queued_inputs + 2 * settings.max_batch_size) * num_models
