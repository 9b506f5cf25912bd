"""A replica of the endpoint: engine, batcher and application of all models and versions that it holds, one process."""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.serve
import ray.serve.exceptions
from fastapi import FastAPI

from rtrain import ray_internals
from rtrain.config import Serve
from rtrain.core import env
from rtrain.core.errors import UserError
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from serve.auth import middleware, preflight
from serve.ingress import direct
from serve.model import Lasting
from serve.observability.aggregation import join_expositions
from serve.ray_config import most_replicas, most_requests
from serve.registry import Models, build_desk, over_grpc
from serve.rollout.model_slot import Plan
from serve.rollout.ray_app import VERSIONS

logger = logging.getLogger(__name__)

RATE_S = 0.5
"""Seconds in which a replica tells what it has let in of a key's rate, for which a request waits."""
ANSWER_S = 2.0
"""Seconds in which a replica answers what it knows at once; one that hangs is not waited for."""
Wish = dict[str, Any]
"""What Ray hands to replicas as `user_config`: `{"models": {NAME: FOLDER}}`, and `VERSIONS`."""


@ray.serve.ingress()
class Replica:
    """Answers with the artefacts that Ray hands it as `user_config`; a bad one never takes traffic. Which models there
    are is settled when it is made: others are another deployment. What others ask it by Ray is `async`, and so runs on
    the loop, where requests are counted: the rest Ray runs in threads."""

    def __init__(self, settings: Serve, names: Sequence[str], *, several: bool | None = None):
        """`several`: whether there may be others, whose counts are told with its own; None: by the settings."""
        self._settings, self._door = settings, middleware.door(settings)
        self._lasting = {name: Lasting(settings, self._door) for name in names}
        several = most_replicas(settings) > 1 if several is None else several
        self._joined = self._join_expositions if several else None
        self._name = secrets.token_hex(4)
        self._models = Models(self._lasting, self._make, self._desk, over_grpc(settings, self._door, shared=True))
        self._changes: set[asyncio.Task[None]] = set()
        if self._door is not None and several:
            self._door.rates.others = self._taken_elsewhere
        direct.install(self._models, most_requests(settings, len(names)))

    def __serve_build_asgi_app__(self) -> Models:
        return self._models

    def _desk(self, models: Models) -> FastAPI:
        return build_desk(models, self._settings, self._door, self._joined)

    async def _make(self, name: str, artifact: Path) -> FastAPI:
        # Ray shows a replica the GPU that it was given, and no other.
        device = "cuda" if self._settings.gpus and not env.gpus_are_counted() else "cpu"
        precision = self._settings.precision if device == "cuda" else "fp32"
        predictor = await asyncio.to_thread(Predictor.load, artifact, self._settings.threads, device, precision)
        # Whoever deploys a file names the artefact in `user_config`, which Ray hands to replicas alone.
        preflight.admit(predictor.artifact, artifact, self._settings)
        predictor.artifact = replace(predictor.artifact, name=name)
        return build_app(predictor, self._settings, self._joined, self._lasting[name])

    async def reconfigure(self, wish: Wish) -> None:
        """At the start, load what is to be served. Later only begin to: Ray routes nothing to a replica while this
        runs, and ends one in which it raises."""
        if not self._models.loaded:
            await self._models.become(wish["models"], wish.get(VERSIONS, {}))
        else:
            change = asyncio.create_task(self._become(wish))
            self._changes.add(change)  # asyncio alone keeps no task from being collected
            change.add_done_callback(self._changes.discard)

    async def _become(self, wish: Wish) -> None:
        try:
            await self._models.become(wish["models"], wish.get(VERSIONS, {}))
        except Exception:  # whatever it is, what answers goes on
            logger.exception("the artefacts %s cannot be served", wish["models"])

    async def load(self, model: str, artifact: str, version: str = "") -> str:
        """Load and prove a candidate; why that fails, or nothing."""
        try:
            await self._models.versions[model].load(artifact, version)
        except UserError as error:
            return str(error)
        except Exception as error:  # of an engine, say: no candidate may end what answers
            logger.exception("the artefact %s cannot be loaded", artifact)
            return f"{type(error).__name__}: {error}"
        return ""

    async def drop(self, model: str) -> None:
        self._models.versions[model].drop()

    async def follow(self, model: str, plan: dict[str, Any]) -> dict[str, Any]:
        """Try a candidate as planned: `refusal`, where it cannot be loaded, or `seen`, a `judge.Tally`, and `ratio`."""
        versions = self._models.versions[model]
        try:
            await versions.follow(Plan(**plan))
        except Exception as error:  # no candidate may end what answers
            return {"refusal": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"}
        trial = versions.trial
        return {"refusal": "", "seen": trial.tally(), "ratio": trial.ratio} if trial else {"refusal": "it has gone"}

    async def status(self) -> dict[str, Any]:
        """What `rtrain serve status` tells of a replica."""
        models = {name: versions.status() for name, versions in self._models.versions.items()}
        return {"process": os.getpid(), "models": models}

    async def serves(self) -> dict[str, tuple[str, str]]:
        """Folder and version of what answers, by the model's name."""
        current = {name: versions.current for name, versions in self._models.versions.items()}
        return {name: (version.folder, version.name) for name, version in current.items() if version is not None}

    def check_health(self) -> None:
        if self._models.loaded and not self._models.ready:
            raise RuntimeError("an engine call has not returned within the deadline")

    async def exposition(self) -> tuple[str, str]:
        """This replica's name among the metrics, and its metrics."""
        return self._name, self._models.exposition()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._models.load()

    async def taken(self, key: str, rate: str) -> tuple[str, int]:
        """This replica's name, and what it has taken of a key's rate."""
        return self._name, 0 if self._door is None else self._door.rates.taken(key, rate)

    async def _taken_elsewhere(self, key: str, rate: str) -> list[int]:
        try:
            taken = dict(await of_all("taken", key, rate, timeout_s=RATE_S))
        except (ray.exceptions.RayError, ray.serve.exceptions.RayServeException, TimeoutError):
            return []  # a client is let in rather than refused for what Ray does not know
        return [count for name, count in taken.items() if name != self._name]

    async def _join_expositions(self) -> str:
        return join_expositions(dict(await of_all("exposition", timeout_s=ANSWER_S)))


async def of_all(method: str, *given: object, timeout_s: float | None = None) -> list[Any]:
    """What each replica of this application answers; one that ends just now, or is late, is left out."""
    context = ray.serve.get_replica_context()
    handle = ray.serve.get_deployment_handle(context.deployment, context.app_name)
    found = await ray_internals.broadcast_results(handle.broadcast(method, *given), timeout_s)
    return [one for one in found if not isinstance(one, BaseException)]
