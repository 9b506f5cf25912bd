"""Shared code of the applications of one model (`app`) and of several models (`registry`): middleware, the error form,
the OpenAPI document, and routes that concern no single model."""

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
from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve import middleware, ui
from serve.auth import api_keys
from serve.auth.preflight import is_loopback
from serve.ingress.haproxy import PROXY_ERRORS_HEADER
from serve.observability.aggregation import add_proxy_errors
from serve.observability.tracing import Tracer
from serve.request_context import AccessLog, RequestContextMiddleware
from serve.schemas import open_inference, predict
from serve.schemas.predict import RequestError

if TYPE_CHECKING:
    from serve.model import ModelService

NO_FASTAPI_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""Turns off FastAPI's own OpenTelemetry instrumentation: `serve.traces` alone decides about tracing. The check on each
request takes as long as writing the reply's headers."""
MAX_SHOWN_CHARACTERS = 100
"""Characters of a method and of a path that an error repeats."""
LABEL_OUTPUTS = ("classes", "labels")
"""The outputs of tasks (`Task.output`) whose answers are labels with scores."""
MAX_CACHED_LABELS = 1 << 16
_ABSTAINED_SUFFIX = ',"abstained":true}'
"""End of a label that says that the model abstains."""
MetricsSource = Callable[[], Awaitable[str]]


class ModelProvider(Protocol):
    """Queries about the whole address: its one model, or all of them."""

    @property
    def is_ready(self) -> bool: ...

    def list_models(self, ready_only: bool, allowed_models: Collection[str] | None) -> list[dict[str, str]]:
        """Models at this address, in the form of the Open Inference Protocol. `ready_only`: omit models that are not
        ready. `allowed_models`: omit all other models."""
        ...

    def service_for(self, model: str, version: str | None) -> AbstractContextManager["ModelService"]:
        """Context of the service that handles one request of another protocol. `version`: the requested version; empty
        for any; None if the request runs no inference. Raises `RequestError` if the model or version does not exist."""
        ...

    def render_metrics(self) -> str:
        """This process's metrics, in Prometheus' text form."""
        ...


class BaseApp(FastAPI):
    """Requests pass `RequestContextMiddleware` and `AuthLimitsMiddleware`, in this order, before a route."""

    def __init__(self, settings: ServeConfig, request_models: Iterable[type[BaseModel]], **options: Any):
        """`request_models`: request schemas that the routes parse."""
        super().__init__(
            docs_url=None,  # FastAPI's loads its scripts from elsewhere
            redoc_url=None,
            redirect_slashes=False,
            responses={"default": {"model": predict.ErrorReply, "description": "Error"}},
            telemetry=NO_FASTAPI_TELEMETRY,
            **options,
        )
        self._request_models, self._requires_keys = tuple(request_models), settings.keys is not None
        self.add_exception_handler(RequestError, _handle_error)
        self.add_exception_handler(HTTPException, _handle_error)

    def add_default_middleware(
        self,
        settings: ServeConfig,
        authenticator: api_keys.Authenticator | None,
        predictor: Predictor | None,
        on_response: Callable[[str, int, float], None],
        tracer: Tracer,
        access_log: AccessLog,
    ) -> None:
        """Put `RequestContextMiddleware` and `AuthLimitsMiddleware` in front of existing middleware. `predictor`: None
        for an application of several models."""
        model = predictor.artifact.name if predictor else None
        self.add_middleware(
            middleware.AuthLimitsMiddleware, settings=settings, authenticator=authenticator, model=model
        )
        self.add_middleware(
            RequestContextMiddleware,
            predictor=predictor,
            settings=settings,
            on_response=on_response,
            tracer=tracer,
            access_log=access_log,
        )

    def build_middleware_stack(self) -> ASGIApp:
        """Leave out FastAPI's error handler, telemetry and body limit: our middleware does these, with our error
        form."""
        app: ASGIApp = ExceptionMiddleware(
            _HeadAsGetMiddleware(AsyncExitStackMiddleware(self.router)), self.exception_handlers
        )
        for extra_middleware, args, kwargs in reversed(self.user_middleware):
            app = extra_middleware(app, *args, **kwargs)
        return app

    def openapi(self) -> dict[str, Any]:
        """FastAPI describes the bodies that it parses; ours are parsed from bytes and added here."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for model in self._request_models:
                json_schema = model.model_json_schema(ref_template=_SCHEMA_REFERENCE)
                schemas.update(json_schema.pop("$defs", {}))
                schemas[model.__name__] = json_schema
            if self._requires_keys:
                schemes = {"key": {"type": "http", "scheme": "bearer"}}
                super().openapi().update(security=[{"key": []}])
                super().openapi()["components"]["securitySchemes"] = schemes
        return super().openapi()


class _HeadAsGetMiddleware:
    """Answers HEAD as GET: the server leaves the body out. Monitors and `curl -I` ask so; a route of FastAPI's for it
    would be another operation in the OpenAPI document."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        get_scope = {**scope, "method": "GET"}
        try:
            await self._app(get_scope, receive, send)
        finally:
            scope.update({**get_scope, "method": "HEAD"})  # route and state of the request are counted and logged


def build_common_router(
    provider: ModelProvider, settings: ServeConfig, metrics_source: MetricsSource | None
) -> APIRouter:
    """Routes that concern no single model. `metrics_source` replaces its metrics by those of all replicas"""
    router = APIRouter()

    @router.get("/v2", **route_docs(open_inference.ServerMetadata))
    async def server_metadata() -> Response:
        return json_reply({"name": "rtrain", "version": rtrain.__version__, "extensions": []})

    @router.get("/v2/health/live", **route_docs(open_inference.ServerLive))
    async def live() -> Response:
        return json_reply({"live": True})

    @router.get("/v2/health/ready", **route_docs(open_inference.ServerReady))
    async def ready() -> Response:
        return json_reply({"ready": provider.is_ready}, 200 if provider.is_ready else 503)

    @router.post("/v2/repository/index", **route_docs(open_inference.RepositoryIndex, open_inference.IndexRequest))
    async def repository_index(request: Request) -> Response:
        index_request = predict.parse_request(open_inference.IndexRequest, await request.body() or b"{}")
        return json_reply(provider.list_models(index_request.ready, request.state.allowed_models))

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Prometheus' text form."""
        metrics_text = provider.render_metrics() if metrics_source is None else await metrics_source()
        metrics_text = add_proxy_errors(metrics_text, request.headers.get(PROXY_ERRORS_HEADER, ""))
        return Response(metrics_text, media_type="text/plain; version=0.0.4; charset=utf-8")

    if is_loopback(settings.host):  # it describes the service to whoever can reach it
        router.include_router(ui.build_docs_router())
    return router


# ----------------------------------------------------------------------------------------------------------- answers


def to_json(document: object) -> str:
    """Serialize without whitespace. Raises `ValueError` for NaN and infinity, which no JSON parser reads."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def labels_to_json(answers: Sequence[Sequence[dict[str, Any]]]) -> str:
    """What `to_json` makes of a list of `[{"label", "score"}, ...]`, some of them `abstained`, and as it
    raises. Parts are made once for each label: `json.dumps` takes four times as long for a model of many labels."""
    if not math.isfinite(sum(entry["score"] for answer in answers for entry in answer)):
        raise ValueError("a score is NaN or infinite")
    label_lists = [
        ",".join(
            [
                f"{_label_prefix(entry['label'])}{entry['score']!r}{_ABSTAINED_SUFFIX if 'abstained' in entry else '}'}"
                for entry in answer
            ]
        )
        for answer in answers
    ]
    return f"[[{'],['.join(label_lists)}]]" if label_lists else "[]"


@functools.lru_cache(MAX_CACHED_LABELS)
def _label_prefix(label: str) -> str:
    return f'{{"label":{to_json(label)},"score":'


def json_reply(
    document: Any,
    status: int = 200,
    headers: dict[str, str] | None = None,
    serialize: Callable[[Any], str] = to_json,
) -> Response:
    """A NaN or infinity in the answer makes `serialize` raise, which becomes status 500."""
    return Response(serialize(document).encode(), status, headers, media_type="application/json")


async def _handle_error(request: Request, error: Exception) -> Response:
    """For our own errors, and for those of the router: no such path, not that method."""
    route = middleware.route_path(request.scope)
    if isinstance(error, HTTPException):
        # Not `request.url`, which cannot be made of every Host header.
        method, path = request.method, request.scope["path"]
        hint = "; texts go to /predict" if (method, route) == ("POST", "/") else ""
        request_line = f"{method[:MAX_SHOWN_CHARACTERS]} {path[:MAX_SHOWN_CHARACTERS]}"
        request_error = RequestError(error.status_code, f"{request_line}: {error.detail}{hint}")
        request_error.headers.update(error.headers or {})
        return middleware.error_response(request_error, route)
    if isinstance(error, RequestError):
        return middleware.error_response(error, route)
    raise error


# ----------------------------------------------------------------------------------------------------------- OpenAPI

_SCHEMA_REFERENCE = "#/components/schemas/{model}"


def route_docs(reply_model: Any, request_model: type[BaseModel] | None = None) -> dict[str, Any]:
    """A route's part of the OpenAPI document."""
    docs: dict[str, Any] = {"responses": {200: {"model": reply_model}}}
    if getattr(reply_model, "__module__", "") == open_inference.__name__:
        docs["responses"]["default"] = {"model": open_inference.InferError, "description": "Error"}
    if request_model is not None:
        content = {"application/json": {"schema": {"$ref": _SCHEMA_REFERENCE.format(model=request_model.__name__)}}}
        docs["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return docs
