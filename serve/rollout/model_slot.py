"""Versions of a model in a replica: the current one, and a candidate.

Both live in one process, so a switch is an assignment: no request waits for a model to load, and none is interrupted.
The old version still answers the requests that it has accepted.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from rtrain.core.errors import UserError
from serve import middleware
from serve.model import INFERENCE_SUFFIXES, ModelService
from serve.rollout.shadow import ShadowTest
from serve.schemas.predict import RequestError

BuildVersion = Callable[[Path], Awaitable[FastAPI]]
"""Loads an artifact, proves that it gives its golden answers, and builds its application."""


@dataclass(eq=False)
class ModelVersion:
    folder: str
    app: FastAPI
    active_requests: int = 0
    """How many it has accepted and not answered."""

    @property
    def service(self) -> ModelService:
        service: ModelService = self.app.state.service
        return service

    @property
    def name(self) -> str:
        return self.service.predictor.artifact.version

    def matches(self, folder: str, version_name: str) -> bool:
        """Whether it was made from what that folder has; an empty `version_name` is any version's."""
        return self.folder == folder and version_name in ("", self.name)


class CanaryPlan(NamedTuple):
    """Canary of a candidate beside the current version."""

    folder: str
    """Its folder."""
    traffic_share: float
    """The part of the live texts that both answer."""
    max_latency_ratio: float
    """See `canary.CanaryPolicy`."""
    weight: float
    """Share of the requests that the candidate answers itself."""
    version: str = ""
    """Required version in the folder; empty for any."""


class ModelSlot:
    """An ASGI application: each request goes to the version that answers when it comes."""

    def __init__(self, build_version: BuildVersion):
        self._build_version = build_version
        self._lock = asyncio.Lock()
        self._target = ("", "")
        """The folder and the version that `switch_to` was last asked for."""
        self.current: ModelVersion | None = None
        self.candidate: ModelVersion | None = None
        self.shadow_test: ShadowTest | None = None
        self.weight = 0.0
        """Share of the requests that the candidate answers."""
        self._num_drops = 0
        """How often somebody has given a candidate up."""

    async def load_candidate(self, folder: str, version_name: str = "") -> str:
        """Load the artifact as the candidate, unless it is the current version; returns its version name. Raises the
        errors of loading, and `UserError` if `version_name` is given and the folder holds another version; the current
        version keeps serving."""
        async with self._lock:
            if self.current is not None and self.current.matches(folder, version_name):
                return self.current.name
            num_drops = self._num_drops
            version_name_loaded = (await self._ensure_candidate(folder, version_name)).name
            if self._num_drops != num_drops:  # by a rollout that waits no longer: the late one must not answer anybody
                self._discard_candidate()
                raise UserError(f"the load of {folder} was cancelled", code="cancelled")
            return version_name_loaded

    async def _ensure_candidate(self, folder: str, version_name: str) -> ModelVersion:
        if self.candidate is None or not self.candidate.matches(folder, version_name):
            self._discard_candidate()
            version = ModelVersion(folder, await self._build_version(Path(folder)))
            if not version.matches(folder, version_name):
                version.service.close(wait=False)
                fix = "use --update to serve it, or restore the other version"
                raise UserError(
                    f"{folder} holds version {version.name} instead of {version_name}; {fix}",
                    code="version_mismatch",
                )
            self.candidate = version
        return self.candidate

    def drop_candidate(self) -> None:
        """Drop the candidate, also while it is loading; it still answers the requests that it has accepted."""
        self._num_drops += 1
        self._discard_candidate()

    def _discard_candidate(self) -> None:
        self._end_shadow_test()
        candidate, self.candidate = self.candidate, None
        if candidate is not None and candidate.active_requests == 0:
            candidate.service.close(wait=False)

    async def start_canary(self, plan: CanaryPlan) -> None:
        """Start or continue a canary. Raises the errors of loading. Idempotent, so a replica that started later catches
        up."""
        await self.load_candidate(plan.folder, plan.version)
        if self.shadow_test is None and self.current is not None and self.candidate is not None:
            self.shadow_test = ShadowTest(
                self.current.service, self.candidate.service, plan.traffic_share, plan.max_latency_ratio
            )
        self.weight = plan.weight

    async def switch_to(self, folder: str, version_name: str = "") -> None:
        """Serve that artifact: at once if it is the candidate, else after loading, unless the target changes meanwhile.
        `version_name`: see `load_candidate`."""
        target = self._target = (folder, version_name)
        async with self._lock:
            if self._target != target or (self.current is not None and self.current.matches(folder, version_name)):
                return
            version = await self._ensure_candidate(folder, version_name)
            if self._target != target:
                self._discard_candidate()
                return
            self._end_shadow_test()
            previous, self.current, self.candidate = self.current, version, None
            if previous is not None and previous.active_requests == 0:
                previous.service.close(wait=False)

    def status(self) -> dict[str, Any]:
        """Status of this replica, for a person."""
        current, candidate = self.current, self.candidate
        if current is None:
            return {"version": None}
        shadow_test = self.shadow_test
        shadow_fields = (
            {"stats": shadow_test.collect_stats()._asdict(), "ratio": shadow_test.ratio} if shadow_test else {}
        )
        return {
            "version": current.name,
            "folder": current.folder,
            **current.service.status(),
            "candidate": {"version": candidate.name, "weight": self.weight, **shadow_fields} if candidate else None,
        }

    def _end_shadow_test(self) -> None:
        self.weight = 0.0
        if self.shadow_test is not None:
            self.shadow_test.close()
            self.shadow_test = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        version = self._acquire(self._requested_version(scope))
        try:
            await version.app(scope, receive, send)
        finally:
            self._release(version)

    @contextmanager
    def service_for(self, version: str | None) -> Iterator[ModelService]:
        """Service for one request of another protocol. `version`: the requested version, if it is here; empty: by
        weight; None for a request without inference: the current version. Raises `RequestError` before the first
        artifact is loaded: the port opens a moment earlier."""
        if self.current is None:
            raise RequestError(503, "no model is loaded yet; try again in a moment", retry_after=1)
        acquired = self._acquire(version)
        try:
            yield acquired.service
        finally:
            self._release(acquired)

    def _requested_version(self, scope: Scope) -> str | None:
        """The version that a request names; empty where it leaves that open, None where it asks the model nothing."""
        path = middleware.route_path(scope)
        if "/versions/" in path:
            return path.partition("/versions/")[2].partition("/")[0]
        return "" if path.endswith(INFERENCE_SUFFIXES) and scope["type"] == "http" else None

    def _acquire(self, version_name: str | None) -> ModelVersion:
        """Choose the version for a request and count it; `_release` must follow."""
        version = self.current
        if version is None:  # the server listens a moment before the first artifact is loaded
            raise RuntimeError("no artifact is loaded yet")
        candidate = self.candidate
        if (
            self.weight
            and candidate is not None
            and (version_name == candidate.name or (version_name == "" and random.random() < self.weight))
        ):
            version = candidate
        version.active_requests += 1
        return version

    def _release(self, version: ModelVersion) -> None:
        version.active_requests -= 1
        if version.active_requests == 0 and version not in (self.current, self.candidate):
            version.service.close(wait=False)

    def close(self) -> None:
        """No request comes any more."""
        self._discard_candidate()
        if self.current is not None:
            self.current.service.close()
