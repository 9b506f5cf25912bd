"""The HTTP application: routes, limits, errors and metrics of one model. Plain ASGI; what runs it is not its business.

A request passes: body read under the size limit -> parsed and checked (`schema`) -> tokens (`Predictor.encode`) ->
`batcher` -> the task's `decode` -> JSON, by way of `explanations` where it asks why. Each answer, an error too, carries
the model's name and version; each error has the one form of `schema.ErrorReply`.
"""

import asyncio
import functools
import importlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

import rtrain
from rtrain.config import Serve
from rtrain.predict import Predictor
from serve import about, abstention, pages, protocol, schema
from serve.answering import Lasting, Service
from serve.door import guard
from serve.door.access import is_loopback
from serve.envelope import Envelope, client_of
from serve.schema import RequestError
from serve.watching.telemetry import OPEN_METRICS

PREDICT = "/predict"
MOST_SHOWN = 100
"""Characters of a method and of a path that an error repeats."""
Exposition = Callable[[], Awaitable[str]]


def build_app(
    predictor: Predictor, settings: Serve, exposition: Exposition | None = None, lasting: Lasting | None = None
) -> FastAPI:
    """The application of a loaded model (`Predictor.load`: one that does not give its golden answers gets no app).

    `exposition` replaces this process's metrics on `/metrics`: where there are several replicas, by their sum.
    `lasting`: that of the process, where this is not the only version that it answers with.
    """
    lasting = lasting or Lasting(settings)
    service = Service(predictor, settings, lasting)
    artifact = predictor.artifact

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if settings.grpc_port is not None:  # its libraries are an extra
                grpc = importlib.import_module("serve.grpc")
                opened = grpc.serving(lambda version: nullcontext(service), settings, settings.grpc_port, lasting.door)
                app.state.grpc_port = await stack.enter_async_context(opened)
            yield
        service.close()

    app = _App(
        title=artifact.name,
        version=artifact.version,
        # The page loads a script from elsewhere, and describes the service to whoever can reach it.
        docs_url="/docs" if is_loopback(settings.host) else None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses={"default": {"model": schema.ErrorReply, "description": "Error"}},
    )
    app.state.service = service
    app.add_middleware(_Shortcut, routes=app.router.routes)
    app.add_middleware(guard.Guard, settings=settings, door=lasting.door)
    app.add_middleware(
        Envelope,
        predictor=predictor,
        settings=settings,
        answered=service.answered,
        spans=service.spans,
        access_log=service.access_log,
    )
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)

    @app.post(PREDICT, **_documented(schema.PredictReply | schema.ExplainedReply, schema.PredictRequest))
    async def predict(request: Request) -> Response:
        """Labels and scores of each text, in the Hugging Face inference form."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        asked = schema.parse(schema.PredictRequest, await request.body(), settings.max_inputs)
        several = isinstance(asked.inputs, list)
        texts = asked.texts()
        parameters = asked.parameters.model_dump() if asked.parameters else {}
        if parameters.get("explain"):
            service.explanations.check(len(texts), parameters["label"])
        if parameters.get("abstain"):
            abstention.least(predictor.task, predictor.head)  # refused before the engine has worked for it
        answers, cut = await service.answers(
            texts,
            deadline,
            lambda place: f"inputs.{place}" if several else "inputs",
            parameters,
            request.state.record,
            client_of(request.scope),
        )
        lone = not several and not parameters.get("explain")
        return _json(predictor.task.alone(answers[0]) if lone else answers, headers=_cut_header(cut))

    @app.post("/v2/models/{name}/versions/{version}/infer", **_documented(protocol.InferReply, protocol.InferRequest))
    @app.post("/v2/models/{name}/infer", **_documented(protocol.InferReply, protocol.InferRequest))
    async def infer(request: Request) -> Response:
        """The best label of each text, in the Open Inference Protocol."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        service.named(**request.path_params)
        body = await request.body()
        document, binary = protocol.split(body, request.headers.get("inference-header-content-length"))
        asked = schema.parse(protocol.InferRequest, document, settings.max_inputs)
        reply, cut = await service.infer(asked, binary, deadline, request.state.record, client_of(request.scope))
        return _json(reply, headers=_cut_header(cut))

    @app.get("/v2", **_documented(protocol.ServerMetadata))
    async def server_metadata() -> Response:
        return _json({"name": "rtrain", "version": rtrain.__version__, "extensions": []})

    @app.get("/v2/health/live", **_documented(protocol.Live))
    async def live() -> Response:
        return _json({"live": True})

    @app.get("/v2/health/ready", **_documented(protocol.Ready))
    async def ready() -> Response:
        return _json({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/v2/models/{name}/versions/{version}", **_documented(protocol.ModelMetadata))
    @app.get("/v2/models/{name}", **_documented(protocol.ModelMetadata))
    async def model_metadata(request: Request) -> Response:
        service.named(**request.path_params)
        return _json(service.metadata())

    @app.get("/v2/models/{name}/versions/{version}/ready", **_documented(protocol.ModelReady))
    @app.get("/v2/models/{name}/ready", **_documented(protocol.ModelReady))
    async def model_ready(request: Request) -> Response:
        service.named(**request.path_params)
        return _json({"name": artifact.name, "ready": service.ready}, 200 if service.ready else 503)

    @app.post("/v2/repository/index", **_documented(protocol.RepositoryIndex, protocol.IndexRequest))
    async def repository_index(request: Request) -> Response:
        body = await request.body()
        return _json(service.index(schema.parse(protocol.IndexRequest, body or b"{}").ready))

    @app.get("/info", **_documented(about.About))
    async def info() -> Response:
        """What the model is for and how it is asked: what its page shows."""
        return _json(about.describe(predictor, settings))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text form; with exemplars OpenMetrics', where one replica answers for itself."""
        if settings.exemplars and exposition is None:
            return Response(service.telemetry.open_metrics(), media_type=OPEN_METRICS)
        text = service.exposition() if exposition is None else await exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(pages.ROUTER)
    return app


class _Shortcut:
    """Hands a question to /predict to its function. The way of all other routes, by the router and what FastAPI puts
    before a function, takes as long as the tokens of a short text."""

    def __init__(self, app: ASGIApp, routes: list[BaseRoute]):
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = (scope.get("path"), scope.get("method"), scope.get("root_path", ""))
        if asked == (PREDICT, "POST", ""):
            scope["route"] = self._route
            answer: Response = await self._route.endpoint(Request(scope, receive))
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @functools.cached_property
    def _route(self) -> APIRoute:
        return next(route for route in self._routes if isinstance(route, APIRoute) and route.path == PREDICT)


# ----------------------------------------------------------------------------------------------------------- answers


def _json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # allow_nan: a model that gives NaN must not be answered by what no JSON parser reads; the ValueError becomes a 500.
    body = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body.encode(), status, headers, media_type="application/json")


def _cut_header(cut: int) -> dict[str, str]:
    """Neither protocol has a place to say that texts were longer than the model reads."""
    return {"x-truncated-inputs": str(cut)} if cut else {}


async def _answer_error(request: Request, error: Exception) -> Response:
    """For our own errors, and for those of the router: no such path, not that method."""
    if isinstance(error, HTTPException):
        # Not `request.url`, which cannot be made of every Host header.
        method, path = request.method, request.scope["path"]
        hint = "; texts go to /predict" if (method, path) == ("POST", "/") else ""
        asked = f"{method[:MOST_SHOWN]} {path[:MOST_SHOWN]}"
        found = RequestError(error.status_code, f"{asked}: {error.detail}{hint}")
        found.headers.update(error.headers or {})
        return guard.answer(found, path)
    if isinstance(error, RequestError):
        return guard.answer(error, request.scope["path"])
    raise error


# ----------------------------------------------------------------------------------------------------------- OpenAPI


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI describes the bodies that it parses; ours are parsed from bytes and added here."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for model in (schema.PredictRequest, protocol.InferRequest, protocol.IndexRequest):
                described = model.model_json_schema(ref_template=_REFERENCE)
                schemas.update(described.pop("$defs", {}))
                schemas[model.__name__] = described
            if self.state.service.settings.keys:
                schemes = {"key": {"type": "http", "scheme": "bearer"}}
                super().openapi().update(security=[{"key": []}])
                super().openapi()["components"]["securitySchemes"] = schemes
        return super().openapi()


_REFERENCE = "#/components/schemas/{model}"


def _documented(reply: Any, request: type[BaseModel] | None = None) -> dict[str, Any]:
    """A route's part of the OpenAPI document."""
    described: dict[str, Any] = {"responses": {200: {"model": reply}}}
    if getattr(reply, "__module__", "") == protocol.__name__:
        described["responses"]["default"] = {"model": protocol.InferError, "description": "Error"}
    if request is not None:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=request.__name__)}}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described
