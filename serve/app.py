"""The HTTP application: routes, limits, errors and metrics of one model. Plain ASGI; what runs it is not its business.

A request passes: body read under the size limit -> parsed and checked (`schema`) -> tokens (`Predictor.encode`) ->
`batcher` -> the task's `decode` -> JSON, by way of `explanations` where it asks why. Each answer, an error too, carries
the model's name and version; each error has the one form of `schema.ErrorReply`.
"""

import asyncio
import functools
import importlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import quote

import prometheus_client
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rtrain
from rtrain.config import Serve
from rtrain.predict import InputError, Predictor
from rtrain.tasks.base import Input
from serve import about, pages, protocol, schema
from serve.access import is_loopback
from serve.batcher import Batcher, EngineError, Expired, Overloaded
from serve.explanations import Explanations, Row
from serve.schema import RequestError

logger = logging.getLogger(__name__)

INLINE_CHARACTERS = 20_000
"""Longer texts are tokenised on another thread: half a second of it would hold up every other request."""
CLIENT_GONE = 499
"""Status in the metrics (nginx's) of a request whose client left before the answer."""
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0, 16.0)

Exposition = Callable[[], Awaitable[str]]


class Service:
    """What the routes share: the model, its batcher, its counters."""

    def __init__(self, predictor: Predictor, settings: Serve):
        self.predictor, self.settings = predictor, settings
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.requests = counter("rtrain_requests", "Requests by route and status.", ["route", "status"])
        self.seconds = histogram("rtrain_request_seconds", "Time to answer.", ["route"], buckets=SECONDS_BUCKETS)
        self.rows = counter("rtrain_rows", "Texts answered.")
        self.engine_seconds = counter("rtrain_engine_seconds", "Time in engine calls.")
        self.batch_rows = histogram("rtrain_batch_rows", "Texts of an engine call.", buckets=BATCH_BUCKETS)
        self.batcher = Batcher(
            functools.partial(predictor.run, most_tokens=settings.max_batch_tokens),
            settings.max_batch_rows,
            settings.max_queue_rows,
            self._on_call,
            settings.max_batch_tokens,
        )
        queue = Gauge("rtrain_queue_rows", "Texts that wait for the engine.", registry=self.registry)
        queue.set_function(lambda: self.batcher.waiting)
        explained = histogram("rtrain_explain_seconds", "Time to explain a text.", buckets=SECONDS_BUCKETS)
        self.explanations = Explanations(predictor, explained.observe)

    def _on_call(self, rows: int, seconds: float) -> None:
        self.batch_rows.observe(rows)
        self.engine_seconds.inc(seconds)

    def close(self) -> None:
        self.batcher.close()
        self.explanations.close()

    @property
    def ready(self) -> bool:
        """False while an engine call has run for longer than `serve.deadline_s`: nobody awaits it any more. The golden
        answers were checked when the artefact was loaded."""
        return self.batcher.stalled_s() <= self.settings.deadline_s

    def exposition(self) -> str:
        return prometheus_client.generate_latest(self.registry).decode()

    def count(self, route: str, status: int | str, seconds: float) -> None:
        """One request that is over."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    async def body(self, request: Request, deadline: float) -> bytes:
        """The body, counted as it arrives: chunked bodies declare no length, and a declared one may be false."""
        limit, body = self.settings.max_body_bytes, bytearray()
        try:
            async with asyncio.timeout_at(deadline):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise RequestError(413, f"the body has more than {limit} bytes")
        except TimeoutError:
            raise RequestError(504, "the deadline passed before the body had arrived") from None
        return bytes(body)

    async def answers(
        self, texts: list[Input], deadline: float, place: Callable[[int], str], parameters: Mapping[str, Any]
    ) -> tuple[list[Any], int]:
        """Answers to `texts`, and how many of them were cut; `place` names the field of a text in the request."""
        if len(texts) > self.settings.max_inputs:
            raise RequestError(413, f"{len(texts)} texts; send at most {self.settings.max_inputs}", "inputs")
        try:
            if sum(map(_characters, texts)) <= INLINE_CHARACTERS:
                encoded = self.predictor.encode(texts)
            else:
                encoded = await asyncio.to_thread(self.predictor.encode, texts)
            outputs = await self.batcher.submit(encoded, deadline)
        except InputError as error:
            raise RequestError(422, str(error), place(error.position)) from None
        except Overloaded as error:
            raise RequestError(503, str(error), retry_after=error.retry_after) from None
        except Expired as error:
            raise RequestError(504, str(error)) from None
        except EngineError:
            logger.exception("the engine failed")
            raise RequestError(500, "the model failed on this request") from None
        self.rows.inc(len(texts))
        answers = self.predictor.decode(outputs, texts, encoded, parameters)
        if parameters.get("explain"):
            rows = [Row(*row) for row in zip(texts, encoded, outputs, strict=True)]
            found = await self.explanations.submit(rows, parameters["label"], deadline)
            answers = [{"answer": answer, "explanation": why} for answer, why in zip(answers, found, strict=True)]
        return answers, sum(row.truncated for row in encoded)

    async def infer(self, asked: protocol.InferRequest, binary: bytes, deadline: float) -> tuple[dict[str, Any], int]:
        """The reply of the Open Inference Protocol, over HTTP or gRPC, and how many texts were cut."""
        task, artifact = self.predictor.task, self.predictor.artifact
        texts = asked.texts(task.fields, binary)
        answers, cut = await self.answers(texts, deadline, lambda place: f"inputs.0.data.{place}", {"top_k": 1})
        tensors = protocol.tensors(answers, task.output)
        if asked.outputs:
            wanted = {output.name for output in asked.outputs}
            tensors = [tensor for tensor in tensors if tensor["name"] in wanted]
        reply = {"model_name": artifact.name, "model_version": artifact.version, "outputs": tensors}
        return (reply if asked.id is None else {**reply, "id": asked.id}), cut

    def metadata(self) -> dict[str, Any]:
        """The model's in the Open Inference Protocol."""
        task, artifact = self.predictor.task, self.predictor.artifact
        return {
            "name": artifact.name,
            "versions": [artifact.version],
            "platform": f"rtrain_{artifact.engine}",
            "inputs": protocol.input_tensors(task.fields, task.needs_pair),
            "outputs": [
                {"name": name, "datatype": datatype, "shape": [-1]}
                for name, datatype in protocol.output_tensors(task.output).items()
            ],
        }

    def index(self, ready: bool) -> list[dict[str, str]]:
        """The models at this address, of the Open Inference Protocol; `ready`: only those that can answer."""
        artifact = self.predictor.artifact
        named = {"name": artifact.name, "version": artifact.version}
        if self.ready:
            return [{**named, "state": "READY", "reason": ""}]
        return [] if ready else [{**named, "state": "UNAVAILABLE", "reason": "an engine call does not return"}]

    def named(self, name: str, version: str = "") -> None:
        """Raise a `RequestError` where another model is asked for, or another version of this one."""
        artifact = self.predictor.artifact
        if name != artifact.name:
            raise RequestError(404, f"no model of that name; this one is {artifact.name}", "name")
        if version not in ("", artifact.version):
            raise RequestError(404, f"no version of that name; this one is {artifact.version}", "version")


def build_app(predictor: Predictor, settings: Serve, exposition: Exposition | None = None) -> FastAPI:
    """The application of a loaded model (`Predictor.load`: one that does not give its golden answers gets no app).

    `exposition` replaces this process's metrics on `/metrics`: where there are several replicas, by their sum.
    """
    service = Service(predictor, settings)
    artifact = predictor.artifact

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if settings.grpc_port is not None:  # its libraries are an extra
                opened = importlib.import_module("serve.grpc").serving(service, settings.host, settings.grpc_port)
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
    app.add_middleware(_Envelope, service=service)
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)

    @app.post("/predict", **_documented(schema.PredictReply | schema.ExplainedReply, schema.PredictRequest))
    async def predict(request: Request) -> Response:
        """Labels and scores of each text, in the Hugging Face inference form."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        asked = schema.parse(schema.PredictRequest, await service.body(request, deadline))
        several = isinstance(asked.inputs, list)
        texts = asked.texts()
        parameters = asked.parameters.model_dump() if asked.parameters else {}
        if parameters.get("explain"):
            service.explanations.check(len(texts), parameters["label"])
        answers, cut = await service.answers(
            texts, deadline, lambda place: f"inputs.{place}" if several else "inputs", parameters
        )
        lone = not several and not parameters.get("explain")
        return _json(predictor.task.alone(answers[0]) if lone else answers, headers=_cut_header(cut))

    @app.post("/v2/models/{name}/versions/{version}/infer", **_documented(protocol.InferReply, protocol.InferRequest))
    @app.post("/v2/models/{name}/infer", **_documented(protocol.InferReply, protocol.InferRequest))
    async def infer(request: Request) -> Response:
        """The best label of each text, in the Open Inference Protocol."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        service.named(**request.path_params)
        body = await service.body(request, deadline)
        document, binary = protocol.split(body, request.headers.get("inference-header-content-length"))
        asked = schema.parse(protocol.InferRequest, document)
        reply, cut = await service.infer(asked, binary, deadline)
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
        body = await service.body(request, asyncio.get_running_loop().time() + settings.deadline_s)
        return _json(service.index(schema.parse(protocol.IndexRequest, body or b"{}").ready))

    @app.get("/info", **_documented(about.About))
    async def info() -> Response:
        """What the model is for and how it is asked: what its page shows."""
        return _json(about.describe(predictor, settings))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text form."""
        text = service.exposition() if exposition is None else await exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(pages.ROUTER)
    return app


# ----------------------------------------------------------------------------------------------------------- answers


def _json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # allow_nan: a model that gives NaN must not be answered by what no JSON parser reads; the ValueError becomes a 500.
    body = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body.encode(), status, headers, media_type="application/json")


def _cut_header(cut: int) -> dict[str, str]:
    """Neither protocol has a place to say that texts were longer than the model reads."""
    return {"x-truncated-inputs": str(cut)} if cut else {}


def _error(error: RequestError, path: str) -> Response:
    return _json(error.document(path), error.status, error.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    """For our own errors, and for those of the router: no such path, not that method."""
    if isinstance(error, HTTPException):
        hint = "; texts go to /predict" if (request.method, request.url.path) == ("POST", "/") else ""
        found = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}{hint}")
        found.headers.update(error.headers or {})
        return _error(found, request.url.path)
    if isinstance(error, RequestError):
        return _error(error, request.url.path)
    raise error


def _characters(text: Input) -> int:
    return len(text) if isinstance(text, str) else sum(len(part or "") for part in text.values())


class _Envelope:
    """Wraps every request: puts the model's name and version on the answer, counts it, answers an unexpected error."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        artifact = service.predictor.artifact
        revisions = {f"x-{part}-version": digest for part, digest in service.predictor.revisions.items()}
        names = {"x-model-name": quote(artifact.name), **revisions}
        self._headers = [(name.encode(), value.encode()) for name, value in names.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_GONE

        async def send_enveloped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_enveloped)
        except ClientDisconnect:
            pass
        except Exception:
            if status != CLIENT_GONE:  # the answer is on its way; only the server can still break it off
                raise
            logger.exception("unexpected error in %s %r", scope["method"], scope["path"])
            answer = _error(RequestError(500, "internal error; the server's log has the cause"), scope["path"])
            await answer(scope, receive, send_enveloped)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._service.count(route, status, time.monotonic() - began)


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
