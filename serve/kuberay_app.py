"""The endpoint as an application that others deploy: KubeRay, by the import path `serve.kuberay_app:application`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.serve

import rtrain.inference.artifact
from rtrain import config, ray_internals
from rtrain.core.errors import ConfigError, Problem
from serve.auth import preflight
from serve.ray_config import deployment_spec
from serve.replica import ServeReplica


def application(arguments: Mapping[str, Any]) -> ray.serve.Application:
    """Build the application. `arguments`: `artifact`, a folder, or `models`, folders by name; and settings of the
    section `serve` by their names, e.g. `threads`.

    The deployer decides about address and number of replicas. Raises like `rtrain serve` for a damaged artifact, an
    artifact that the gate has rejected, and an address that others can reach without a key; the address is that of Ray
    Serve's proxies, whatever the arguments say.
    """
    assignments = {f"serve.{name}": value for name, value in arguments.items() if name not in ("artifact", "models")}
    settings = config.load_config("intent", assignments).deploy.serve
    if preflight.is_loopback(settings.host):
        settings = settings.model_copy(update={"host": ray_internals.serve_host() or settings.host})
    preflight.check_access(settings)
    artifacts = _parse_artifacts(arguments)
    preflight.check_artifacts(artifacts, settings)
    make_deployment = ray.serve.deployment(
        **deployment_spec(settings, len(artifacts), settings.threads * len(artifacts)),
        user_config={"models": {name: str(folder) for name, folder in artifacts.items()}},
    )
    # How many replicas there are the file says to Ray alone, and a later one may say otherwise.
    return make_deployment(ServeReplica).bind(settings, list(artifacts), has_peers=True)


def _parse_artifacts(arguments: Mapping[str, Any]) -> dict[str, Path]:
    if ("artifact" in arguments) == ("models" in arguments):
        fix = "write artifact, a folder; or models, folders by name"
        raise ConfigError(
            [Problem("args", None, "exactly one of artifact and models is required", fix, code="conflicting_settings")]
        )
    if "models" in arguments:
        models = arguments["models"]
        if not isinstance(models, Mapping) or not all(isinstance(folder, str) for folder in models.values()):
            raise ConfigError(
                [Problem("args.models", models, "not folders by names", "write {NAME: FOLDER}", code="wrong_type")]
            )
        return {str(name): Path(folder) for name, folder in models.items()}
    if not isinstance(arguments["artifact"], str):
        raise ConfigError(
            [Problem("args.artifact", arguments["artifact"], "not a folder", "write its path", code="wrong_type")]
        )
    folder = Path(arguments["artifact"])
    return {rtrain.inference.artifact.read_artifact(folder, verify=False).name: folder}
