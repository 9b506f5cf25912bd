"""The application of Ray Serve that an endpoint is: which artefact it is to answer with for each model, and how all its
replicas are asked at once."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray.serve
from ray.serve.schema import LoggingConfig

import rtrain.inference.artifact
from rtrain import ray_internals
from rtrain.config import Serve
from rtrain.inference.artifact import Artifact

ASK_S = 30.0
"""Seconds in which every replica answers a question that it answers at once."""

VERSIONS = "versions"
"""The name there of the version of each model: what a folder holds may have been replaced since."""


class Served(NamedTuple):
    """An artefact as it was when it was decided on."""

    folder: Path
    made: Artifact


class Application:
    """Asked by several threads: each model changes by itself."""

    def __init__(
        self,
        deployment: ray.serve.Deployment,
        name: str,
        settings: Serve,
        artifacts: Mapping[str, Path],
        logging_config: LoggingConfig,
    ):
        """`artifacts`: the first ones, by the models' names."""
        # Ray draws a new code version at each `run`, and starts all replicas anew for it.
        self._deployment = ray_internals.with_version(deployment, "1")
        self.name, self._settings, self._logging = name, settings, logging_config
        self.decided = {
            model: Served(folder, rtrain.inference.artifact.read(folder, verify=False))
            for model, folder in artifacts.items()
        }
        """The artefact of each model."""
        self._one_at_a_time = threading.Lock()

    def begin(self) -> None:
        """Returns when the replicas are up. Raises what Ray raises where one fails."""
        self._run(self.decided)

    def decide(self, model: str, artifact: Served) -> None:
        """The replicas that there are, and each that is started later, are to answer with that artefact."""
        with self._one_at_a_time:
            # First: whatever becomes of it, Ray may have been told, and the next decision is about another model.
            self.decided = {**self.decided, model: artifact}
            self._run(self.decided)

    def told(self, method: str, *given: Any, timeout_s: float = ASK_S) -> list[Any]:
        """What each replica answers; what it raises, a `ray.exceptions.RayError` where it has ended."""
        handle: Any = ray.serve.get_app_handle(self.name)
        found: list[Any] = handle.broadcast(method, *given).results(timeout_s=timeout_s, return_exceptions=True)
        return found

    def _run(self, artifacts: Mapping[str, Served]) -> None:
        wish = {
            "models": {name: str(one.folder) for name, one in artifacts.items()},
            VERSIONS: {name: one.made.version for name, one in artifacts.items()},
        }
        decided = self._deployment.options(user_config=wish).bind(self._settings, list(artifacts))
        ray.serve.run(decided, name=self.name, route_prefix="/", logging_config=self._logging)
