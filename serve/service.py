"""The endpoint as an application that others deploy: KubeRay, by the import path `serve.service:application`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.serve

import rtrain.artifact
from rtrain import config
from serve.deployment import (
    CONSTRUCTOR_ATTEMPTS,
    DEPLOYMENT,
    HEALTH_PERIOD_S,
    HEALTH_TIMEOUT_S,
)
from serve.door import access
from serve.replica import Replica, most_requests


def application(arguments: Mapping[str, Any]) -> ray.serve.Application:
    """`arguments`: `artifact`, its folder, and settings of the section `serve` by their names, e.g. `threads`.

    Where it listens, and how many replicas there are, is up to who deploys it. Raises as `rtrain serve` does for a
    damaged artefact, and for one that the gate has refused.
    """
    folder = Path(arguments["artifact"])
    given = {f"serve.{name}": value for name, value in arguments.items() if name != "artifact"}
    settings = config.load("intent", given).deploy.serve
    access.admit(rtrain.artifact.read(folder), folder, settings)
    ongoing = most_requests(settings)
    configured = ray.serve.deployment(
        name=DEPLOYMENT,
        user_config={"artifact": str(folder)},
        ray_actor_options={"num_cpus": settings.threads},
        max_ongoing_requests=ongoing,
        max_queued_requests=ongoing,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_ATTEMPTS,
        graceful_shutdown_timeout_s=settings.deadline_s + 1,
    )
    return configured(Replica).bind(settings)
