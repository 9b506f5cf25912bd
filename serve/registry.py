"""Models of a replica, by name; each has its own versions and counters.

/models/NAME/...     all routes of the model, e.g. /models/NAME/predict, and its page
/v2/models/NAME/...  the same model in the Open Inference Protocol
anything else        the only model; with several models, routes about all of them (`build_multi_model_app`)
"""

import asyncio
import functools
import importlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import rtrain
from rtrain.config import ServeConfig
from rtrain.core.errors import UserError
from serve import app_base, middleware, ui
from serve.auth import api_keys
from serve.auth.api_keys import MOUNT
from serve.model import ModelService, ModelState
from serve.observability import aggregation, tracing
from serve.observability.metrics import RequestMetrics
from serve.request_context import AccessLog
from serve.rollout import autoscaling
from serve.rollout.model_slot import ModelSlot
from serve.schemas import open_inference
from serve.schemas.predict import RequestError

V2_PREFIX = "/v2/models/"
SINGLE_MODEL_PATHS = ("/predict", "/info")
"""Routes of a model, which where there are several belong to none."""
FALLBACK_METHODS = ["GET", "POST"]
BuildModelVersion = Callable[[str, Path], Awaitable[FastAPI]]
"""As `model_slot.BuildVersion`, of the model of that name."""
SideServer = Callable[["ModelRegistry"], AbstractAsyncContextManager[Any]]


def grpc_side_server(
    settings: ServeConfig, authenticator: api_keys.Authenticator | None, *, is_port_shared: bool
) -> SideServer:
    """A gRPC server of all models, where the settings have a port for it. `is_port_shared`: with other processes."""

    def open_side_server(model_registry: ModelRegistry) -> AbstractAsyncContextManager[Any]:
        if settings.grpc_port is None:
            return nullcontext()
        grpc = importlib.import_module("serve.grpc")  # its libraries are an extra
        server: AbstractAsyncContextManager[Any] = grpc.serve_grpc(
            model_registry,
            settings,
            settings.grpc_port,
            authenticator,
            len(model_registry.model_names),
            is_port_shared=is_port_shared,
        )
        return server

    return open_side_server


class ModelRegistry:
    """An ASGI application."""

    def __init__(
        self,
        model_states: Mapping[str, ModelState],
        build_version: BuildModelVersion,
        build_shared_app: Callable[["ModelRegistry"], ASGIApp],
        side_server: SideServer = lambda models: nullcontext(),
    ):
        """`model_states`: state of each model, by name. `build_shared_app` builds the application for requests to no
        single model. `side_server`: a server that runs as long as the ASGI server."""
        self.slots = {name: ModelSlot(functools.partial(self._build_locked, name)) for name in model_states}
        self._build_version = build_version
        # In threads side by side, what loading imports for the first time is half there for one of them.
        self._lock = asyncio.Lock()
        self._registries = {name: state.telemetry.registry for name, state in model_states.items()}
        self._side_server = side_server
        self._only_slot = next(iter(self.slots.values())) if len(self.slots) == 1 else None
        self._default_app = self._only_slot or build_shared_app(self)

    @property
    def model_names(self) -> list[str]:
        return list(self.slots)

    async def apply(
        self, folders: Mapping[str, str], required_versions: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Have each model answer with its artifact; `required_versions`: the version that it has to be, of those of
        which that is known. Raises what loading one of them raises, and what `check_names` raises."""
        self.check_names(folders)
        await asyncio.gather(
            *(self.slots[name].switch_to(folder, required_versions.get(name, "")) for name, folder in folders.items())
        )

    def check_names(self, folders: Mapping[str, str]) -> None:
        """Raise `UserError` where these are not the models that there are."""
        if folders.keys() != self.slots.keys():
            registered_names, configured_names = (", ".join(sorted(names)) for names in (self.slots, folders))
            raise UserError(
                f"args and user_config name the same models; they have {registered_names}, and {configured_names}",
                code="model_mismatch",
            )

    async def _build_locked(self, name: str, folder: Path) -> FastAPI:
        async with self._lock:
            return await self._build_version(name, folder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = middleware.route_path(scope)
        if path.startswith(MOUNT):
            name, slash, _ = path.removeprefix(MOUNT).partition("/")
            if slash and name in self.slots:
                mounted = {**scope, "root_path": f"{scope.get('root_path', '')}{MOUNT}{name}"}
                await self.slots[name](mounted, receive, send)
                return
        elif path.startswith(V2_PREFIX) and self._only_slot is None:
            slot = self.slots.get(path.removeprefix(V2_PREFIX).partition("/")[0])
            await (slot or self._default_app)(scope, receive, send)
            return
        await self._default_app(scope, receive, send)

    @contextmanager
    def service_for(self, model: str, version: str | None) -> Iterator[ModelService]:
        """Service for one request of another protocol; `version` as in `ModelSlot.service_for`. A single model accepts
        any name, and checks it itself."""
        slot = self._only_slot or self.slots.get(model)
        if slot is None:
            raise RequestError(404, self.unknown_model_message(self.model_names), "name")
        with slot.service_for(version) as service:
            yield service

    @staticmethod
    def unknown_model_message(names: Iterable[str]) -> str:
        """Message for a model name that does not exist."""
        return f"no model of that name; here are {', '.join(names) or 'none that this key may ask'}"

    def iter_services(self) -> Iterator[ModelService]:
        """Services of the current versions."""
        for slot in self.slots.values():
            if slot.current is not None:
                yield slot.current.service

    @property
    def is_loaded(self) -> bool:
        return all(versions.current is not None for versions in self.slots.values())

    @property
    def is_ready(self) -> bool:
        return self.is_loaded and all(service.is_ready for service in self.iter_services())

    def list_models(self, ready_only: bool, allowed_models: Collection[str] | None = None) -> list[dict[str, str]]:
        return [entry for service in self.iter_services() for entry in service.list_models(ready_only, allowed_models)]

    def add_request_metrics(self, request_metrics: RequestMetrics) -> None:
        """Expose these counters too: of requests to no model."""
        self._registries[""] = request_metrics.registry

    def render_metrics(self) -> str:
        return aggregation.render_metrics(self._registries)

    def report_load(self) -> dict[str, float]:
        """What `scaling.policy` decides by: of the model whose engine has most to do."""
        return autoscaling.select_busiest(service.report_load() for service in self.iter_services())

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._side_server(self):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        for slot in self.slots.values():
            slot.close()
        await send({"type": "lifespan.shutdown.complete"})


def build_multi_model_app(
    model_registry: ModelRegistry,
    settings: ServeConfig,
    authenticator: api_keys.Authenticator | None,
    metrics_source: app_base.MetricsSource | None = None,
) -> FastAPI:
    """Application of an address with several models. `metrics_source`: see `app_base.build_common_router`."""
    request_metrics = RequestMetrics()
    model_registry.add_request_metrics(request_metrics)
    app = app_base.BaseApp(settings, (open_inference.IndexRequest,), title="rtrain", version=rtrain.__version__)
    app.add_default_middleware(
        settings,
        authenticator,
        None,
        request_metrics.count_request,
        tracing.make_tracer(settings, None),
        AccessLog(settings.access_log),
    )
    app.include_router(app_base.build_common_router(model_registry, settings, metrics_source))
    app.include_router(ui.MODEL_LIST)
    if authenticator is not None:
        app.include_router(ui.MODEL_PAGE, prefix=MOUNT + "{name}", include_in_schema=False)  # of no model (`keys`)

    def allowed_names(request: Request) -> list[str]:
        """Models that the key of the request may use."""
        allowed_models: Collection[str] | None = request.state.allowed_models
        return [name for name in model_registry.model_names if allowed_models is None or name in allowed_models]

    async def require_model_path(request: Request) -> Response:
        """Several models answer at this address, each under a path of its own."""
        path = f"{MOUNT}NAME{middleware.route_path(request.scope)}"
        raise RequestError(
            404, f"several models answer here; ask {path}, where NAME is {' or '.join(allowed_names(request))}"
        )

    for path in SINGLE_MODEL_PATHS:
        app.add_api_route(path, require_model_path, methods=FALLBACK_METHODS, include_in_schema=False)

    @app.get(MOUNT + "{name}", include_in_schema=False)
    async def redirect_to_model(name: str, request: Request) -> Response:
        if name not in allowed_names(request):
            raise RequestError(404, model_registry.unknown_model_message(allowed_names(request)), "name")
        return RedirectResponse(f"{name}/")  # beside this one, whatever the host is called

    @app.api_route(V2_PREFIX + "{rest:path}", methods=FALLBACK_METHODS, include_in_schema=False)
    @app.api_route(MOUNT + "{rest:path}", methods=FALLBACK_METHODS, include_in_schema=False)
    async def unknown_model(request: Request) -> Response:
        raise RequestError(404, model_registry.unknown_model_message(allowed_names(request)), "name")

    return app
