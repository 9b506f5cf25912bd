"""One model takes another's place while requests come in, and goes back.

Every replica loads the candidate beside what it answers with, and proves its golden answers. Only when all of them have
done so is Ray told, by a change of the deployment's `user_config`, which Ray hands to the replicas there are, and to
each that it starts later: a replica that dies in mid-change comes back with what was decided. One refusal, and all of
them drop the candidate and go on.
"""

import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.serve
from ray.serve.schema import LoggingConfig

import rtrain.artifact
from rtrain import ray_internals
from rtrain.config import Serve
from rtrain.errors import UserError
from rtrain.run import shown
from serve.door import access

LOAD_S = 120.0
"""Seconds in which every replica has loaded a candidate, or said why it cannot."""
SWITCH_S = 30.0
"""Seconds in which every replica answers with what was decided, once it is loaded."""
POLL_S = 0.02


class Rollout:
    """What an application of Ray Serve answers with, and what it answered with before."""

    def __init__(self, deployment: ray.serve.Deployment, name: str, settings: Serve, logging_config: LoggingConfig):
        # Ray draws a new code version at each `run`, and starts all replicas anew for it.
        self._deployment = ray_internals.with_version(deployment, "1")
        self.name, self._settings, self._logging = name, settings, logging_config
        self._served: list[Path] = []
        self._one_at_a_time = threading.Lock()

    def begin(self, artifact: Path) -> None:
        """Serve the first artefact; returns when its replicas are up. Raises what Ray raises where one fails."""
        self._decide(artifact)
        self._served.append(artifact)

    def update(self, artifact: Path) -> str:
        """Answer with the artefact from now on; says so. Raises `UserError`, and nothing changes, where it may not be
        served, is another model, or is refused by a replica."""
        with self._one_at_a_time:
            said = self._change(artifact)
            self._served.append(artifact)
        return said

    def back(self) -> str:
        """Answer with what was served before; it is loaded and proven again. Raises `UserError` as `update` does."""
        with self._one_at_a_time:
            if len(self._served) < 2:
                raise UserError("nothing was served before: there is nothing to go back to")
            said = self._change(self._served[-2])
            self._served.pop()
        return said

    def _change(self, artifact: Path) -> str:
        if artifact == self._served[-1]:
            raise UserError(f"{shown(artifact)} is what answers already; an update is another folder")
        made, old = rtrain.artifact.read(artifact), rtrain.artifact.read(self._served[-1])
        access.admit(made, artifact, self._settings)
        if made.name != old.name:
            raise UserError(
                f"{shown(artifact)} is called {made.name}, and clients of this endpoint ask for {old.name}; "
                "serve it at another port"
            )
        handle: Any = ray.serve.get_app_handle(self.name)
        refusals = self._loaded(handle, artifact)
        if refusals:
            handle.broadcast("drop").results(timeout_s=SWITCH_S)
            raise UserError(f"{shown(artifact)} is not served, {old.version} goes on: {refusals[0]}")
        self._decide(artifact)
        give_up = time.monotonic() + SWITCH_S
        while set(handle.broadcast("serves").results(timeout_s=SWITCH_S)) != {str(artifact)}:
            if time.monotonic() > give_up:
                raise UserError(f"not every replica answers with {made.version} after {SWITCH_S:.0f} s; see Ray's logs")
            time.sleep(POLL_S)
        return f"{made.version} answers in place of {old.version}"

    def _loaded(self, handle: Any, artifact: Path) -> list[str]:
        """Why replicas refuse the artefact; empty where all have loaded and proven it."""
        try:
            found: list[str] = handle.broadcast("load", str(artifact)).results(timeout_s=LOAD_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            return [f"a replica did not answer ({type(error).__name__})"]
        return [reason for reason in found if reason]

    def _decide(self, artifact: Path) -> None:
        decided = self._deployment.options(user_config={"artifact": str(artifact)}).bind(self._settings)
        ray.serve.run(decided, name=self.name, route_prefix="/", logging_config=self._logging)
