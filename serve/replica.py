"""A replica of the endpoint: engine, batcher and application of each version that it holds, in one process."""

import asyncio
import contextlib
import importlib
import logging
import os
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.serve
import ray.serve.exceptions
from fastapi import FastAPI

from rtrain.config import Serve
from rtrain.errors import UserError
from rtrain.predict import Predictor
from serve.answering import Lasting
from serve.app import build_app
from serve.change.versions import Plan, Versions
from serve.front import direct
from serve.watching.sums import sum_expositions

logger = logging.getLogger(__name__)

COUNT_S = 5.0
"""Seconds between two counts of the replicas, which share out the rates of keys."""


def most_replicas(settings: Serve) -> int:
    return settings.max_replicas or settings.replicas


def most_requests(settings: Serve) -> int:
    """Requests of a replica at a time. Each holds a text at least, so that this many reach our own queue, whose 503
    says when to come back."""
    return max(64, settings.max_queue_rows + 2 * settings.max_batch_rows)


@ray.serve.ingress()
class Replica:
    """Answers with the artefact that Ray hands it as `user_config`; a bad one never takes traffic. What others ask it
    by Ray is `async`, and so runs on the loop, where requests are counted: the rest Ray runs in threads."""

    def __init__(self, settings: Serve):
        self._settings, self._lasting = settings, Lasting(settings)
        self._versions = Versions(self._make, self._beside)
        self._changes: set[asyncio.Task[None]] = set()
        self._counting: asyncio.Task[None] | None = None
        direct.install(self._versions, most_requests(settings))

    def __serve_build_asgi_app__(self) -> Versions:
        return self._versions

    def _beside(self, versions: Versions) -> AbstractAsyncContextManager[Any]:
        if self._settings.grpc_port is None:
            return nullcontext()
        grpc = importlib.import_module("serve.grpc")  # its libraries are an extra
        opened: AbstractAsyncContextManager[Any] = grpc.serving(
            versions.answering, self._settings, self._settings.grpc_port, self._lasting.door
        )
        return opened

    async def _make(self, artifact: Path) -> FastAPI:
        predictor = await asyncio.to_thread(Predictor.load, artifact, self._settings.threads)
        several = most_replicas(self._settings) > 1
        return build_app(predictor, self._settings, self._sum_of_replicas if several else None, self._lasting)

    async def reconfigure(self, wish: dict[str, str]) -> None:
        """At the start, load what is to be served. Later only note the wish: Ray routes nothing to a replica while this
        runs, and ends one in which it raises."""
        if self._versions.current is None:
            await self._versions.become(wish["artifact"])
            if self._lasting.door is not None:
                self._counting = asyncio.create_task(self._count_replicas())
        else:
            change = asyncio.create_task(self._become(wish["artifact"]))
            self._changes.add(change)  # asyncio alone keeps no task from being collected
            change.add_done_callback(self._changes.discard)

    async def _become(self, artifact: str) -> None:
        try:
            await self._versions.become(artifact)
        except Exception:  # whatever it is, what answers goes on
            logger.exception("the artefact %s cannot be served", artifact)

    async def load(self, artifact: str) -> str:
        """Load and prove a candidate; why that fails, or nothing."""
        try:
            await self._versions.load(artifact)
        except UserError as error:
            return str(error)
        except Exception as error:  # of an engine, say: no candidate may end what answers
            logger.exception("the artefact %s cannot be loaded", artifact)
            return f"{type(error).__name__}: {error}"
        return ""

    async def drop(self) -> None:
        self._versions.drop()

    async def follow(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Try a candidate as planned: `refusal`, where it cannot be loaded, or `seen`, a `judge.Tally`, and `ratio`."""
        try:
            await self._versions.follow(Plan(**plan))
        except Exception as error:  # no candidate may end what answers
            return {"refusal": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"}
        trial = self._versions.trial
        return {"refusal": "", "seen": trial.tally(), "ratio": trial.ratio} if trial else {"refusal": "it has gone"}

    async def status(self) -> dict[str, Any]:
        """What `rtrain serve status` tells of a replica."""
        return {"process": os.getpid(), **self._versions.status()}

    async def serves(self) -> str:
        return self._versions.current.folder if self._versions.current else ""

    def check_health(self) -> None:
        current = self._versions.current
        if current is not None and not current.service.ready:
            raise RuntimeError("an engine call has not returned within the deadline")

    async def exposition(self) -> str:
        return self._lasting.telemetry.exposition()

    def record_autoscaling_stats(self) -> dict[str, float]:
        current = self._versions.current
        return current.service.load() if current else {}

    async def _count_replicas(self) -> None:
        """Each sees its own part of a key's requests. How many there are is up to whoever deploys them, and changes."""
        door = self._lasting.door
        while door is not None:
            await asyncio.sleep(COUNT_S)
            with contextlib.suppress(ray.exceptions.RayError, ray.serve.exceptions.RayServeException):
                door.shared_by(len(await of_all("serves")))

    async def _sum_of_replicas(self) -> str:
        return sum_expositions(await of_all("exposition"))


async def of_all(method: str) -> list[Any]:
    """What each replica of this application answers; one that ends just now is left out."""
    context = ray.serve.get_replica_context()
    handle = ray.serve.get_deployment_handle(context.deployment, context.app_name)
    found = await handle.broadcast(method).results_async(return_exceptions=True)
    return [one for one in found if not isinstance(one, BaseException)]
