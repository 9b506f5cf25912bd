"""What the applications of a model (`app`) and of an address with several (`models`) have in common: what every request
passes, the error form, the OpenAPI document, and the routes that are about no model in particular.
"""

import functools
import json
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

import rtrain
from rtrain.config import Serve
from rtrain.inference.predictor import Predictor
from serve import ui
from serve.auth import api_keys, middleware
from serve.auth.preflight import is_loopback
from serve.ingress.haproxy import ERRORS
from serve.observability.aggregation import with_haproxy
from serve.observability.tracing import Spans
from serve.request_context import AccessLog, Envelope
from serve.schemas import open_inference, predict
from serve.schemas.predict import RequestError

if TYPE_CHECKING:
    from serve.model import Service

SILENT: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI traces and counts by itself where a process has OpenTelemetry: what is told of requests, `serve.traces` says
alone. To ask for each of them whether it has takes as long as an answer's headers."""
MOST_SHOWN = 100
"""Characters of a method and of a path that an error repeats."""
LABELLED = ("classes", "labels")
"""The outputs of tasks (`Task.output`) whose answers are labels with scores."""
MOST_LABELS = 1 << 16
_ABSTAINED = ',"abstained":true}'
"""End of a label that says that the model abstains."""
Exposition = Callable[[], Awaitable[str]]


class Desk(Protocol):
    """Who is asked about the address as a whole: its one model, or all of them."""

    @property
    def ready(self) -> bool: ...

    def index(self, ready: bool, only: Collection[str] | None) -> list[dict[str, str]]:
        """The models at this address, of the Open Inference Protocol; `ready`: only those that can answer, `only`:
        none but these."""
        ...

    def answering(self, model: str, version: str | None) -> AbstractContextManager["Service"]:
        """The service for one request over another protocol, which stays open until the context is left; of the version
        that the request names, with an empty name of any, with None of what is no question to the model. Raises
        `RequestError` where there is none."""
        ...

    def exposition(self) -> str:
        """This process's metrics, in Prometheus' text form."""
        ...


class Application(FastAPI):
    """Its requests pass the envelope and the guard, in this order, before a route sees them."""

    def __init__(self, settings: Serve, bodies: Iterable[type[BaseModel]], **options: Any):
        """`bodies`: the requests that its routes parse."""
        super().__init__(
            docs_url=None,  # FastAPI's loads its scripts from elsewhere
            redoc_url=None,
            redirect_slashes=False,
            responses={"default": {"model": predict.ErrorReply, "description": "Error"}},
            telemetry=SILENT,
            **options,
        )
        self._bodies, self._keyed = tuple(bodies), settings.keys is not None
        self.add_exception_handler(RequestError, _answer_error)
        self.add_exception_handler(HTTPException, _answer_error)

    def dress(
        self,
        settings: Serve,
        door: api_keys.Door | None,
        predictor: Predictor | None,
        answered: Callable[[str, int, float], None],
        spans: Spans,
        access_log: AccessLog,
    ) -> None:
        """Put envelope and guard before what there is already. `predictor`: None where what answers is no model."""
        model = predictor.artifact.name if predictor else None
        self.add_middleware(middleware.Guard, settings=settings, door=door, model=model)
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

    @router.get("/v2", **documented(open_inference.ServerMetadata))
    async def server_metadata() -> Response:
        return reply({"name": "rtrain", "version": rtrain.__version__, "extensions": []})

    @router.get("/v2/health/live", **documented(open_inference.Live))
    async def live() -> Response:
        return reply({"live": True})

    @router.get("/v2/health/ready", **documented(open_inference.Ready))
    async def ready() -> Response:
        return reply({"ready": desk.ready}, 200 if desk.ready else 503)

    @router.post("/v2/repository/index", **documented(open_inference.RepositoryIndex, open_inference.IndexRequest))
    async def repository_index(request: Request) -> Response:
        asked = predict.parse(open_inference.IndexRequest, await request.body() or b"{}")
        return reply(desk.index(asked.ready, request.state.models))

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Prometheus' text form."""
        text = desk.exposition() if exposition is None else await exposition()
        text = with_haproxy(text, request.headers.get(ERRORS, ""))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    if is_loopback(settings.host):  # it describes the service to whoever can reach it
        router.include_router(ui.docs())
    return router


# ----------------------------------------------------------------------------------------------------------- answers


def to_json(document: object) -> str:
    """Without blanks. Raises `ValueError` for a number that is none, or endless: no JSON parser reads it."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def labels_to_json(answers: Sequence[Sequence[dict[str, Any]]]) -> str:
    """What `to_json` makes of a list of `[{"label", "score"}, ...]`, some of them `abstained`, and as it
    raises. Parts are made once for each label: `json.dumps` takes four times as long for a model of many labels."""
    if not math.isfinite(sum(one["score"] for answer in answers for one in answer)):
        raise ValueError("a score is no number")
    rows = [
        ",".join(
            [f"{_begun(one['label'])}{one['score']!r}{_ABSTAINED if 'abstained' in one else '}'}" for one in answer]
        )
        for answer in answers
    ]
    return f"[[{'],['.join(rows)}]]" if rows else "[]"


@functools.lru_cache(MOST_LABELS)
def _begun(label: str) -> str:
    return f'{{"label":{to_json(label)},"score":'


def reply(
    document: Any,
    status: int = 200,
    headers: dict[str, str] | None = None,
    write: Callable[[Any], str] = to_json,
) -> Response:
    """A model that gives what is no number has `write` raise, which becomes a 500."""
    return Response(write(document).encode(), status, headers, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    """For our own errors, and for those of the router: no such path, not that method."""
    route = middleware.route(request.scope)
    if isinstance(error, HTTPException):
        # Not `request.url`, which cannot be made of every Host header.
        method, path = request.method, request.scope["path"]
        hint = "; texts go to /predict" if (method, route) == ("POST", "/") else ""
        asked = f"{method[:MOST_SHOWN]} {path[:MOST_SHOWN]}"
        found = RequestError(error.status_code, f"{asked}: {error.detail}{hint}")
        found.headers.update(error.headers or {})
        return middleware.answer(found, route)
    if isinstance(error, RequestError):
        return middleware.answer(error, route)
    raise error


# ----------------------------------------------------------------------------------------------------------- OpenAPI

_REFERENCE = "#/components/schemas/{model}"


def documented(reply: Any, request: type[BaseModel] | None = None) -> dict[str, Any]:
    """A route's part of the OpenAPI document."""
    described: dict[str, Any] = {"responses": {200: {"model": reply}}}
    if getattr(reply, "__module__", "") == open_inference.__name__:
        described["responses"]["default"] = {"model": open_inference.InferError, "description": "Error"}
    if request is not None:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=request.__name__)}}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described
