"""The endpoint as an application that others deploy: KubeRay, by the import path `serve.kuberay_app:application`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.serve

import rtrain.inference.artifact
from rtrain import config, ray_internals
from rtrain.core.errors import ConfigError, Problem
from serve import model_specs
from serve.auth import preflight
from serve.deployment import deployment_options
from serve.ray_config import actor_options
from serve.replica import Replica


def application(arguments: Mapping[str, Any]) -> ray.serve.Application:
    """`arguments`: `artifact`, its folder, or `models`, folders by the names that they are asked for; and settings of
    the section `serve` by their names, e.g. `threads`.

    Where it listens, and how many replicas there are, is up to who deploys it. Raises as `rtrain serve` does for a
    damaged artefact, for one that the gate has refused, and for an address that others can reach without a key: that of
    Ray Serve's proxies counts, whatever address the arguments have.
    """
    given = {f"serve.{name}": value for name, value in arguments.items() if name not in ("artifact", "models")}
    settings = config.load("intent", given).deploy.serve
    if preflight.is_loopback(settings.host):
        settings = settings.model_copy(update={"host": ray_internals.serve_host() or settings.host})
    preflight.check(settings)
    artifacts = _artifacts(arguments)
    model_specs.admit(artifacts, settings)
    configured = ray.serve.deployment(
        **deployment_options(settings, len(artifacts)),
        user_config={"models": {name: str(folder) for name, folder in artifacts.items()}},
        ray_actor_options=actor_options(settings, settings.threads * len(artifacts)),
    )
    # How many replicas there are the file says to Ray alone, and a later one may say otherwise.
    return configured(Replica).bind(settings, list(artifacts), several=True)


def _artifacts(arguments: Mapping[str, Any]) -> dict[str, Path]:
    if ("artifact" in arguments) == ("models" in arguments):
        fix = "write artifact, a folder; or models, folders by name"
        raise ConfigError(
            [
                Problem(
                    "args", None, "it has to say what is served, in one of two ways", fix, code="conflicting_settings"
                )
            ]
        )
    if "models" in arguments:
        models = arguments["models"]
        if not isinstance(models, Mapping) or not all(isinstance(one, str) for one in models.values()):
            raise ConfigError(
                [Problem("args.models", models, "not folders by names", "write {NAME: FOLDER}", code="wrong_type")]
            )
        return {str(name): Path(folder) for name, folder in models.items()}
    if not isinstance(arguments["artifact"], str):
        raise ConfigError(
            [Problem("args.artifact", arguments["artifact"], "not a folder", "write its path", code="wrong_type")]
        )
    folder = Path(arguments["artifact"])
    return {rtrain.inference.artifact.read(folder, verify=False).name: folder}
