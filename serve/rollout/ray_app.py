"""Ray Serve application of an endpoint: the target artifact of each model, and broadcasts to all replicas."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray.serve
from ray.serve.schema import LoggingConfig

import rtrain.inference.artifact
from rtrain import ray_internals
from rtrain.config import ServeConfig
from rtrain.inference.artifact import Artifact

BROADCAST_TIMEOUT_S = 30.0
"""Seconds in which every replica answers a question that it answers at once."""

VERSIONS_KEY = "versions"
"""Key of `user_config` with the version of each model: the content of a folder may have been replaced since."""


class ArtifactRef(NamedTuple):
    """An artifact at the time of the decision."""

    folder: Path
    artifact: Artifact


class RayApp:
    """Asked by several threads: each model changes by itself."""

    def __init__(
        self,
        deployment: ray.serve.Deployment,
        name: str,
        settings: ServeConfig,
        artifacts: Mapping[str, Path],
        logging_config: LoggingConfig,
    ):
        """`targets`: the first ones, by the models' names."""
        # Ray draws a new code version at each `run`, and starts all replicas anew for it.
        self._deployment = ray_internals.with_version(deployment, "1")
        self.name, self._settings, self._logging_config = name, settings, logging_config
        self.targets = {
            model: ArtifactRef(folder, rtrain.inference.artifact.read_artifact(folder, verify=False))
            for model, folder in artifacts.items()
        }
        """The artifact of each model."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Returns when the replicas are up. Raises what Ray raises where one fails."""
        self._deploy(self.targets)

    def set_target(self, model: str, target: ArtifactRef) -> None:
        """The replicas that there are, and each that is started later, are to answer with that artifact."""
        with self._lock:
            # First: Ray may already know it even if this fails, and the next decision is about another model.
            self.targets = {**self.targets, model: target}
            self._deploy(self.targets)

    def broadcast(self, method: str, *args: Any, timeout_s: float = BROADCAST_TIMEOUT_S) -> list[Any]:
        """Replies of all replicas; exceptions are returned, a `ray.exceptions.RayError` for an ended replica."""
        handle: Any = ray.serve.get_app_handle(self.name)
        replies: list[Any] = handle.broadcast(method, *args).results(timeout_s=timeout_s, return_exceptions=True)
        return replies

    def _deploy(self, targets: Mapping[str, ArtifactRef]) -> None:
        user_config = {
            "models": {name: str(target.folder) for name, target in targets.items()},
            VERSIONS_KEY: {name: target.artifact.version for name, target in targets.items()},
        }
        app = self._deployment.options(user_config=user_config).bind(self._settings, list(targets))
        ray.serve.run(app, name=self.name, route_prefix="/", logging_config=self._logging_config)
