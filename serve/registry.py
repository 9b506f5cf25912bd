"""Models of a process, by name, and the versions of each: the current one, and a candidate.

/models/NAME/...     all routes of the model, e.g. /models/NAME/predict, and its page
/v2/models/NAME/...  the same model in the Open Inference Protocol
anything else        the only model; with several models, routes about all of them (`app.build_multi_model_app`)

Both versions live in one process, so a switch is an assignment: no request waits for a model to load, and none is
interrupted. The old version still answers the requests that it has accepted.
"""

import asyncio
import importlib
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from rtrain.config import ServeConfig
from rtrain.core.errors import UserError
from rtrain.inference.predictor import Predictor
from serve import middleware
from serve.app import (
    V2_PREFIX,
    MetricsSource,
    ModelApp,
    build_app,
    build_loading_app,
    build_multi_model_app,
    not_loaded_error,
    unknown_model_error,
)
from serve.auth.api_keys import MOUNT
from serve.model import INFERENCE_SUFFIXES, ModelService
from serve.observability import metrics
from serve.observability.metrics import RequestMetrics, Telemetry
from serve.rollout import autoscaling
from serve.rollout.canary import ShadowTest

LoadPredictor = Callable[[Path], Awaitable[Predictor]]
"""Loads an artifact, and verifies its golden answers."""
BuildVersion = Callable[[Path], Awaitable[ModelApp]]
"""Loads an artifact, and builds its application."""


class ModelRegistry:
    """An ASGI application."""

    def __init__(
        self,
        settings: ServeConfig,
        names: Collection[str],
        load_predictor: LoadPredictor,
        metrics_source: MetricsSource | None = None,
        is_grpc_port_shared: bool = False,
    ):
        """`metrics_source` replaces this process's metrics on `/metrics` by those of all replicas.
        `is_grpc_port_shared`: with other processes."""
        self.authenticator = middleware.make_authenticator(settings)
        self._settings, self._load_predictor, self._metrics_source = settings, load_predictor, metrics_source
        self._is_grpc_port_shared = is_grpc_port_shared
        # In threads side by side, what loading imports for the first time is half there for one of them.
        self._lock = asyncio.Lock()
        telemetries = {name: Telemetry() for name in names}
        self.slots = {
            name: ModelSlot(self._version_builder(name, telemetry)) for name, telemetry in telemetries.items()
        }
        self._registries = {name: telemetry.registry for name, telemetry in telemetries.items()}
        self._only_slot = next(iter(self.slots.values())) if len(self.slots) == 1 else None
        request_metrics = RequestMetrics() if self._only_slot is None else next(iter(telemetries.values()))
        self._loading_app = build_loading_app(settings, self.authenticator, request_metrics)
        if self._only_slot is None:
            self._registries[""] = request_metrics.registry
            self._shared_app = build_multi_model_app(
                self, settings, self.authenticator, request_metrics, metrics_source
            )

    def _version_builder(self, name: str, telemetry: Telemetry) -> BuildVersion:
        async def build_version(folder: Path) -> ModelApp:
            async with self._lock:
                predictor = await self._load_predictor(folder)
            predictor.artifact = replace(predictor.artifact, name=name)
            return build_app(predictor, self._settings, self._metrics_source, telemetry, self.authenticator)

        return build_version

    @property
    def model_names(self) -> list[str]:
        return list(self.slots)

    async def apply(
        self, folders: Mapping[str, str], required_versions: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Have each model answer with its artifact. `required_versions`: the version that a folder has to hold, for the
        models where it is known. Raises `UserError` where these are not the models that there are, and the errors of
        loading."""
        if folders.keys() != self.slots.keys():
            registered_names, configured_names = (", ".join(sorted(names)) for names in (self.slots, folders))
            raise UserError(
                f"args and user_config name the same models; they have {registered_names}, and {configured_names}",
                code="model_mismatch",
            )
        await asyncio.gather(
            *(self.slots[name].switch_to(folder, required_versions.get(name, "")) for name, folder in folders.items())
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = middleware.route_path(scope)
        if path.startswith(MOUNT):
            name, slash, _ = path.removeprefix(MOUNT).partition("/")
            if slash and name in self.slots:
                mounted = {**scope, "root_path": f"{scope.get('root_path', '')}{MOUNT}{name}"}
                await self._app_of(self.slots[name])(mounted, receive, send)
                return
        elif path.startswith(V2_PREFIX) and self._only_slot is None:
            slot = self.slots.get(path.removeprefix(V2_PREFIX).partition("/")[0])
            await self._app_of(slot)(scope, receive, send)
            return
        await self._app_of(self._only_slot)(scope, receive, send)

    def _app_of(self, slot: "ModelSlot | None") -> ASGIApp:
        """The application that answers a request to a model; None for a request to no model, or an unknown one."""
        if slot is None:
            return self._shared_app
        return self._loading_app if slot.current is None else slot

    @contextmanager
    def service_for(self, model: str, version: str | None) -> Iterator[ModelService]:
        """Service for one request of another protocol; `version` as in `ModelSlot.service_for`. A single model accepts
        any name, and checks it itself."""
        slot = self._only_slot or self.slots.get(model)
        if slot is None:
            raise unknown_model_error(self.model_names)
        with slot.service_for(version) as service:
            yield service

    def iter_services(self) -> Iterator[ModelService]:
        """Services of the current versions."""
        for slot in self.slots.values():
            if slot.current is not None:
                yield slot.current.service

    @property
    def is_loaded(self) -> bool:
        return all(slot.current is not None for slot in self.slots.values())

    @property
    def is_ready(self) -> bool:
        return self.is_loaded and all(service.is_ready for service in self.iter_services())

    def list_models(self, ready_only: bool, allowed_models: Collection[str] | None = None) -> list[dict[str, str]]:
        return [entry for service in self.iter_services() for entry in service.list_models(ready_only, allowed_models)]

    def render_metrics(self) -> str:
        return metrics.render_metrics(self._registries)

    def report_load(self) -> dict[str, float]:
        """Load of the model whose engine has most to do, for `autoscaling.policy`."""
        return autoscaling.select_busiest(service.report_load() for service in self.iter_services())

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._serve_grpc():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        for slot in self.slots.values():
            slot.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _serve_grpc(self) -> AbstractAsyncContextManager[Any]:
        """A gRPC server of all models, where the settings have a port for it."""
        if self._settings.grpc_port is None:
            return nullcontext()
        grpc = importlib.import_module("serve.grpc")  # its libraries are an extra
        server: AbstractAsyncContextManager[Any] = grpc.serve_grpc(
            self, self._settings, self._settings.grpc_port, self.authenticator, self._is_grpc_port_shared
        )
        return server


@dataclass(eq=False)
class ModelVersion:
    folder: str
    app: ModelApp
    active_requests: int = 0
    """Number of accepted requests without an answer."""

    @property
    def service(self) -> ModelService:
        return self.app.service

    @property
    def name(self) -> str:
        return self.service.predictor.artifact.version

    def matches(self, folder: str, version_name: str) -> bool:
        """Whether it was made from what that folder has; an empty `version_name` is any version's."""
        return self.folder == folder and version_name in ("", self.name)


class CanaryPlan(NamedTuple):
    """Canary of a candidate beside the current version."""

    folder: str
    traffic_share: float
    """Share of the live texts that both answer."""
    max_latency_ratio: float
    """See `canary.CanaryPolicy`."""
    weight: float
    """Share of the requests that the candidate answers itself."""
    version: str = ""
    """Required version in the folder; empty for any."""


class ModelSlot:
    """An ASGI application: each request goes to the version that answers when it comes. Before the first artifact is
    loaded the registry answers (`app.build_loading_app`)."""

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
                    f"{folder} holds version {version.name} instead of {version_name}; {fix}", code="version_mismatch"
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
        artifact is loaded."""
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
        """Choose the version for a request and count it; `_release` must follow. Raises `RequestError` before the first
        artifact is loaded."""
        version = self.current
        if version is None:
            raise not_loaded_error()
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
