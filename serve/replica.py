"""A replica of the endpoint: engine, batcher and application of all models and versions that it holds, one process."""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.serve
import ray.serve.exceptions

from rtrain import ray_internals
from rtrain.config import ServeConfig
from rtrain.core import env
from rtrain.core.errors import UserError
from rtrain.inference.predictor import Predictor
from serve.auth import preflight
from serve.ingress import direct
from serve.observability.metrics import merge_expositions
from serve.ray_config import max_replica_count, max_requests_per_replica
from serve.registry import CanaryPlan, ModelRegistry
from serve.rollout.controller import VERSIONS_KEY

logger = logging.getLogger(__name__)

RATE_QUERY_TIMEOUT_S = 0.5
"""Timeout for a replica's used count of a rate limit; a request waits for it."""
METRICS_TIMEOUT_S = 2.0
"""Timeout for the metrics of a replica; a replica that hangs is skipped."""
UserConfig = dict[str, Any]
"""What Ray hands to replicas as `user_config`: `{"models": {NAME: FOLDER}}`, and `VERSIONS_KEY`."""


@ray.serve.ingress()
class ServeReplica:
    """Ray Serve deployment: serves the artifacts that Ray passes as `user_config`. An invalid artifact never gets
    traffic. The set of models is fixed at construction. Methods that Ray calls are `async`, so they run on the event
    loop that counts requests; Ray runs others in threads."""

    def __init__(self, settings: ServeConfig, names: Sequence[str], *, has_peers: bool | None = None):
        """`has_peers`: whether other replicas may exist, whose metrics and rates are merged; None: derived from the
        settings."""
        self._settings = settings
        has_peers = max_replica_count(settings) > 1 if has_peers is None else has_peers
        self._name = secrets.token_hex(4)
        self._model_registry = ModelRegistry(
            settings,
            names,
            self._load_predictor,
            self._merge_replica_metrics if has_peers else None,
            is_grpc_port_shared=True,
        )
        self._change_tasks: set[asyncio.Task[None]] = set()
        authenticator = self._model_registry.authenticator
        self._rate_limiter = authenticator.rate_limiter if authenticator else None
        if self._rate_limiter is not None and has_peers:
            self._rate_limiter.fetch_other_counts = self._fetch_other_counts
        direct.install_replica_server(self._model_registry, max_requests_per_replica(settings, len(names)))

    def __serve_build_asgi_app__(self) -> ModelRegistry:
        return self._model_registry

    async def _load_predictor(self, folder: Path) -> Predictor:
        # Ray shows a replica the GPU that it was given, and no other.
        device = "cuda" if self._settings.gpus and not env.uses_fake_gpus() else "cpu"
        precision = self._settings.precision if device == "cuda" else "fp32"
        predictor = await asyncio.to_thread(Predictor.load, folder, self._settings.threads, device, precision)
        # Whoever deploys a file names the artifact in `user_config`, which Ray hands to replicas alone.
        preflight.require_servable(predictor.artifact, folder, self._settings)
        return predictor

    async def reconfigure(self, user_config: UserConfig) -> None:
        """Load the configured artifacts: at the start before returning, later in a task. Ray routes nothing to a
        replica while this runs, and stops the replica if it raises."""
        if not self._model_registry.is_loaded:
            await self._model_registry.apply(user_config["models"], user_config.get(VERSIONS_KEY, {}))
        else:
            change = asyncio.create_task(self._apply(user_config))
            self._change_tasks.add(change)  # asyncio alone keeps no task from being collected
            change.add_done_callback(self._change_tasks.discard)

    async def _apply(self, user_config: UserConfig) -> None:
        try:
            await self._model_registry.apply(user_config["models"], user_config.get(VERSIONS_KEY, {}))
        except Exception:  # whatever it is, the current version keeps serving
            logger.exception("the artifacts %s cannot be served", user_config["models"])

    async def load_candidate(self, model: str, folder: str, version: str = "") -> str:
        """Load and prove a candidate; why that fails, or nothing."""
        try:
            await self._model_registry.slots[model].load_candidate(folder, version)
        except UserError as error:
            return str(error)
        except Exception as error:  # of an engine, say: no candidate may end what answers
            logger.exception("the artifact %s cannot be loaded", folder)
            return f"{type(error).__name__}: {error}"
        return ""

    async def drop_candidate(self, model: str) -> None:
        self._model_registry.slots[model].drop_candidate()

    async def start_canary(self, model: str, plan: dict[str, Any]) -> dict[str, Any]:
        """Try a candidate as planned: `refusal`, where it cannot be loaded, or `stats`, a `canary.CanaryStats`,
        and `ratio`."""
        slot = self._model_registry.slots[model]
        try:
            await slot.start_canary(CanaryPlan(**plan))
        except Exception as error:  # no candidate may end what answers
            return {"refusal": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"}
        shadow_test = slot.shadow_test
        return (
            {"refusal": "", "stats": shadow_test.collect_stats(), "ratio": shadow_test.ratio}
            if shadow_test
            else {"refusal": "it has gone"}
        )

    async def status(self) -> dict[str, Any]:
        """What `rtrain serve status` tells of a replica."""
        models = {name: versions.status() for name, versions in self._model_registry.slots.items()}
        return {"process": os.getpid(), "models": models}

    async def serving_versions(self) -> dict[str, tuple[str, str]]:
        """Folder and version of each model that is served, by name."""
        current = {name: versions.current for name, versions in self._model_registry.slots.items()}
        return {name: (version.folder, version.name) for name, version in current.items() if version is not None}

    def check_health(self) -> None:
        if self._model_registry.is_loaded and not self._model_registry.is_ready:
            raise RuntimeError("an engine call has not returned within the deadline")

    async def render_metrics(self) -> tuple[str, str]:
        """This replica's name among the metrics, and its metrics."""
        return self._name, self._model_registry.render_metrics()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._model_registry.report_load()

    async def count_used(self, key_id: str, rate: str) -> tuple[str, int]:
        """This replica's name, and its used count of a key's rate."""
        return self._name, self._rate_limiter.count_used(key_id, rate) if self._rate_limiter else 0

    async def _fetch_other_counts(self, key_id: str, rate: str) -> list[int]:
        try:
            counts = dict(await broadcast("count_used", key_id, rate, timeout_s=RATE_QUERY_TIMEOUT_S))
        except (ray.exceptions.RayError, ray.serve.exceptions.RayServeException, TimeoutError):
            return []  # a client is let in rather than refused for what Ray does not know
        return [count for name, count in counts.items() if name != self._name]

    async def _merge_replica_metrics(self) -> str:
        return merge_expositions(dict(await broadcast("render_metrics", timeout_s=METRICS_TIMEOUT_S)))


async def broadcast(method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
    """Replies of all replicas of this application; late and stopping replicas are left out."""
    context = ray.serve.get_replica_context()
    handle = ray.serve.get_deployment_handle(context.deployment, context.app_name)
    replies = await ray_internals.collect_broadcast_results(handle.broadcast(method, *args), timeout_s)
    return [reply for reply in replies if not isinstance(reply, BaseException)]
