"""What the applications of a model (`app`) and of an address with several (`desk`) have in common: what every request
passes, the error form, the OpenAPI document, and the routes that are about no model in particular.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

import rtrain
from rtrain.config import Serve
from rtrain.predict import Predictor
from serve import pages, protocol, schema, writing
from serve.door import guard, keys
from serve.door.access import is_loopback
from serve.envelope import Envelope
from serve.front.haproxy import ERRORS
from serve.schema import RequestError
from serve.watching.access_log import AccessLog
from serve.watching.sums import with_haproxy
from serve.watching.telemetry import OPEN_METRICS
from serve.watching.tracing import Spans

SILENT: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI traces and counts by itself where a process has OpenTelemetry: what is told of requests, `serve.traces` says
alone. To ask for each of them whether it has takes as long as an answer's headers."""
MOST_SHOWN = 100
"""Characters of a method and of a path that an error repeats."""
Exposition = Callable[[], Awaitable[str]]


class Desk(Protocol):
    """Who is asked about the address as a whole: its one model, or all of them."""

    @property
    def ready(self) -> bool: ...

    def index(self, ready: bool, only: Collection[str] | None) -> list[dict[str, str]]:
        """The models at this address, of the Open Inference Protocol; `ready`: only those that can answer, `only`:
        none but these."""
        ...

    def exposition(self) -> str:
        """This process's metrics, in Prometheus' text form."""
        ...

    def open_metrics(self) -> str:
        """The same in the form that has exemplars."""
        ...


class Application(FastAPI):
    """Its requests pass the envelope and the guard, in this order, before a route sees them."""

    def __init__(self, settings: Serve, bodies: Iterable[type[BaseModel]], **options: Any):
        """`bodies`: the requests that its routes parse."""
        super().__init__(
            docs_url=None,  # FastAPI's loads its scripts from elsewhere
            redoc_url=None,
            redirect_slashes=False,
            responses={"default": {"model": schema.ErrorReply, "description": "Error"}},
            telemetry=SILENT,
            **options,
        )
        self._bodies, self._keyed = tuple(bodies), settings.keys is not None
        self.add_exception_handler(RequestError, _answer_error)
        self.add_exception_handler(HTTPException, _answer_error)

    def dress(
        self,
        settings: Serve,
        door: keys.Door | None,
        predictor: Predictor | None,
        answered: Callable[[str, int, float, str], None],
        spans: Spans,
        access_log: AccessLog,
    ) -> None:
        """Put envelope and guard before what there is already. `predictor`: None where what answers is no model."""
        model = predictor.artifact.name if predictor else None
        self.add_middleware(guard.Guard, settings=settings, door=door, model=model)
        self.add_middleware(
            Envelope, predictor=predictor, settings=settings, answered=answered, spans=spans, access_log=access_log
        )

    def build_middleware_stack(self) -> ASGIApp:
        """FastAPI's, without its last resort for errors, its telemetry and its limit of bodies: envelope and guard are
        these, in our form."""
        app: ASGIApp = ExceptionMiddleware(_Heads(AsyncExitStackMiddleware(self.router)), self.exception_handlers)
        for added, given, named in reversed(self.user_middleware):
            app = added(app, *given, **named)
        return app

    def openapi(self) -> dict[str, Any]:
        """FastAPI describes the bodies that it parses; ours are parsed from bytes and added here."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for model in self._bodies:
                described = model.model_json_schema(ref_template=_REFERENCE)
                schemas.update(described.pop("$defs", {}))
                schemas[model.__name__] = described
            if self._keyed:
                schemes = {"key": {"type": "http", "scheme": "bearer"}}
                super().openapi().update(security=[{"key": []}])
                super().openapi()["components"]["securitySchemes"] = schemes
        return super().openapi()


class _Heads:
    """Answers HEAD as GET: the server leaves the body out. Monitors and `curl -I` ask so; a route of FastAPI's for it
    would be another operation in the OpenAPI document."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            scope.update({**asked, "method": "HEAD"})  # what the router has found is counted and logged


def routes(desk: Desk, settings: Serve, exposition: Exposition | None) -> APIRouter:
    """Those that are about no model in particular. `exposition` replaces this process's metrics: where there are
    several replicas, by those of all."""
    router = APIRouter()

    @router.get("/v2", **documented(protocol.ServerMetadata))
    async def server_metadata() -> Response:
        return reply({"name": "rtrain", "version": rtrain.__version__, "extensions": []})

    @router.get("/v2/health/live", **documented(protocol.Live))
    async def live() -> Response:
        return reply({"live": True})

    @router.get("/v2/health/ready", **documented(protocol.Ready))
    async def ready() -> Response:
        return reply({"ready": desk.ready}, 200 if desk.ready else 503)

    @router.post("/v2/repository/index", **documented(protocol.RepositoryIndex, protocol.IndexRequest))
    async def repository_index(request: Request) -> Response:
        asked = schema.parse(protocol.IndexRequest, await request.body() or b"{}")
        return reply(desk.index(asked.ready, request.state.models))

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Prometheus' text form; with exemplars OpenMetrics', where one replica answers for itself."""
        told = request.headers.get(ERRORS, "")
        if settings.exemplars and exposition is None:
            return Response(with_haproxy(desk.open_metrics(), told), media_type=OPEN_METRICS)
        text = desk.exposition() if exposition is None else await exposition()
        return Response(with_haproxy(text, told), media_type="text/plain; version=0.0.4; charset=utf-8")

    if is_loopback(settings.host):  # it describes the service to whoever can reach it
        router.include_router(pages.docs())
    return router


# ----------------------------------------------------------------------------------------------------------- answers


def reply(
    document: Any,
    status: int = 200,
    headers: dict[str, str] | None = None,
    write: Callable[[Any], str] = writing.text,
) -> Response:
    """A model that gives what is no number has `write` raise, which becomes a 500."""
    return Response(write(document).encode(), status, headers, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    """For our own errors, and for those of the router: no such path, not that method."""
    route = guard.route(request.scope)
    if isinstance(error, HTTPException):
        # Not `request.url`, which cannot be made of every Host header.
        method, path = request.method, request.scope["path"]
        hint = "; texts go to /predict" if (method, route) == ("POST", "/") else ""
        asked = f"{method[:MOST_SHOWN]} {path[:MOST_SHOWN]}"
        found = RequestError(error.status_code, f"{asked}: {error.detail}{hint}")
        found.headers.update(error.headers or {})
        return guard.answer(found, route)
    if isinstance(error, RequestError):
        return guard.answer(error, route)
    raise error


# ----------------------------------------------------------------------------------------------------------- OpenAPI

_REFERENCE = "#/components/schemas/{model}"


def documented(reply: Any, request: type[BaseModel] | None = None) -> dict[str, Any]:
    """A route's part of the OpenAPI document."""
    described: dict[str, Any] = {"responses": {200: {"model": reply}}}
    if getattr(reply, "__module__", "") == protocol.__name__:
        described["responses"]["default"] = {"model": protocol.InferError, "description": "Error"}
    if request is not None:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=request.__name__)}}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described
