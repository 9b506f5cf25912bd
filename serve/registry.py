"""The models that a replica answers with, each by its name, with versions and counters of its own.

/models/NAME/...     all that the model answers where it is alone, e.g. /models/NAME/predict, and its page
/v2/models/NAME/...  the same model in the Open Inference Protocol
anything else        where there is one model, that one; else what is said of all of them (`build_desk`)
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
from rtrain.config import Serve
from rtrain.core.errors import UserError
from serve import app_base, ui
from serve.auth import api_keys, middleware
from serve.auth.api_keys import MOUNT
from serve.model import Lasting, Service
from serve.observability import aggregation, tracing
from serve.observability.metrics import Requests
from serve.request_context import AccessLog
from serve.rollout import autoscaling
from serve.rollout.model_slot import Versions
from serve.schemas import open_inference
from serve.schemas.predict import RequestError

PROTOCOL = "/v2/models/"
ALONE = ("/predict", "/info")
"""Routes of a model, which where there are several belong to none."""
METHODS = ["GET", "POST"]
Make = Callable[[str, Path], Awaitable[FastAPI]]
"""As `versions.Make`, of the model of that name."""
Beside = Callable[["Models"], AbstractAsyncContextManager[Any]]


def over_grpc(settings: Serve, door: api_keys.Door | None, *, shared: bool) -> Beside:
    """A gRPC server of all models, where the settings have a port for it. `shared`: with other processes."""

    def beside(models: Models) -> AbstractAsyncContextManager[Any]:
        if settings.grpc_port is None:
            return nullcontext()
        grpc = importlib.import_module("serve.grpc")  # its libraries are an extra
        opened: AbstractAsyncContextManager[Any] = grpc.serving(
            models, settings, settings.grpc_port, door, len(models.names), shared=shared
        )
        return opened

    return beside


class Models:
    """An ASGI application."""

    def __init__(
        self,
        lasting: Mapping[str, Lasting],
        make: Make,
        desk: Callable[["Models"], ASGIApp],
        beside: Beside = lambda models: nullcontext(),
    ):
        """`lasting`: what is kept of each model, by its name. `desk` makes the application that answers for several;
        `beside`: what listens beside the ASGI server, as long as that does."""
        self.versions = {name: Versions(functools.partial(self._load, name)) for name in lasting}
        self._make = make
        # In threads side by side, what loading imports for the first time is half there for one of them.
        self._one_at_a_time = asyncio.Lock()
        self._registries = {name: one.telemetry.registry for name, one in lasting.items()}
        self._beside = beside
        self._alone = next(iter(self.versions.values())) if len(self.versions) == 1 else None
        self._desk = self._alone or desk(self)

    @property
    def names(self) -> list[str]:
        return list(self.versions)

    async def become(self, wish: Mapping[str, str], decided: Mapping[str, str] = MappingProxyType({})) -> None:
        """Have each model answer with its artefact; `decided`: the version that it has to be, of those of which that is
        known. Raises what loading one of them raises, and what `check` raises."""
        self.check(wish)
        await asyncio.gather(
            *(self.versions[name].become(folder, decided.get(name, "")) for name, folder in wish.items())
        )

    def check(self, wish: Mapping[str, str]) -> None:
        """Raise `UserError` where these are not the models that there are."""
        if wish.keys() != self.versions.keys():
            made, wanted = (", ".join(sorted(names)) for names in (self.versions, wish))
            raise UserError(
                f"args and user_config name the same models; they have {made}, and {wanted}", code="other_model"
            )

    async def _load(self, name: str, folder: Path) -> FastAPI:
        async with self._one_at_a_time:
            return await self._make(name, folder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = middleware.route(scope)
        if path.startswith(MOUNT):
            name, slash, _ = path.removeprefix(MOUNT).partition("/")
            if slash and name in self.versions:
                mounted = {**scope, "root_path": f"{scope.get('root_path', '')}{MOUNT}{name}"}
                await self.versions[name](mounted, receive, send)
                return
        elif path.startswith(PROTOCOL) and self._alone is None:
            named = self.versions.get(path.removeprefix(PROTOCOL).partition("/")[0])
            await (named or self._desk)(scope, receive, send)
            return
        await self._desk(scope, receive, send)

    @contextmanager
    def answering(self, model: str, version: str | None) -> Iterator[Service]:
        """The service for one request over another protocol, of the version as `Versions.answering` has it. One model
        alone is asked whatever the name is, and says itself that it has another."""
        versions = self._alone or self.versions.get(model)
        if versions is None:
            raise RequestError(404, self.unknown(self.names), "name")
        with versions.answering(version) as service:
            yield service

    @staticmethod
    def unknown(names: Iterable[str]) -> str:
        """What is said of a name that no model has."""
        return f"no model of that name; here are {', '.join(names) or 'none that this key may ask'}"

    def services(self) -> Iterator[Service]:
        """Those that answer."""
        for versions in self.versions.values():
            if versions.current is not None:
                yield versions.current.service

    @property
    def loaded(self) -> bool:
        return all(versions.current is not None for versions in self.versions.values())

    @property
    def ready(self) -> bool:
        return self.loaded and all(service.ready for service in self.services())

    def index(self, ready: bool, only: Collection[str] | None = None) -> list[dict[str, str]]:
        return [entry for service in self.services() for entry in service.index(ready, only)]

    def count_beside(self, requests: Requests) -> None:
        """Expose these counters too: of requests to no model."""
        self._registries[""] = requests.registry

    def exposition(self) -> str:
        return aggregation.exposition(self._registries)

    def load(self) -> dict[str, float]:
        """What `scaling.policy` decides by: of the model whose engine has most to do."""
        return autoscaling.busiest(service.load() for service in self.services())

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._beside(self):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        for versions in self.versions.values():
            versions.close()
        await send({"type": "lifespan.shutdown.complete"})


def build_desk(
    models: Models, settings: Serve, door: api_keys.Door | None, exposition: app_base.Exposition | None = None
) -> FastAPI:
    """The application of an address with several models: what is said of all of them, and where each one is asked.
    `exposition`: as `base.routes` has it."""
    counters = Requests()
    models.count_beside(counters)
    app = app_base.Application(settings, (open_inference.IndexRequest,), title="rtrain", version=rtrain.__version__)
    app.dress(settings, door, None, counters.count, tracing.spans(settings, None), AccessLog(settings.access_log))
    app.include_router(app_base.routes(models, settings, exposition))
    app.include_router(ui.SEVERAL)
    if door is not None:
        app.include_router(ui.MODEL, prefix=MOUNT + "{name}", include_in_schema=False)  # of no model (`keys`)

    def named(request: Request) -> list[str]:
        """Those that the request's key may ask."""
        only: Collection[str] | None = request.state.models
        return [name for name in models.names if only is None or name in only]

    async def which(request: Request) -> Response:
        """Several models answer at this address, each under a path of its own."""
        path = f"{MOUNT}NAME{middleware.route(request.scope)}"
        raise RequestError(404, f"several models answer here; ask {path}, where NAME is {' or '.join(named(request))}")

    for path in ALONE:
        app.add_api_route(path, which, methods=METHODS, include_in_schema=False)

    @app.get(MOUNT + "{name}", include_in_schema=False)
    async def model(name: str, request: Request) -> Response:
        if name not in named(request):
            raise RequestError(404, models.unknown(named(request)), "name")
        return RedirectResponse(f"{name}/")  # beside this one, whatever the host is called

    @app.api_route(PROTOCOL + "{rest:path}", methods=METHODS, include_in_schema=False)
    @app.api_route(MOUNT + "{rest:path}", methods=METHODS, include_in_schema=False)
    async def unknown(request: Request) -> Response:
        raise RequestError(404, models.unknown(named(request)), "name")

    return app
