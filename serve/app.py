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
from rtrain.predict import InputError, Predictor
from rtrain.tasks.base import Input
from serve import about, abstention, pages, protocol, schema
from serve.batching.batcher import Batcher, EngineError, Expired
from serve.batching.encoding import Encoder, characters_of
from serve.batching.scheduler import Limits, Overloaded
from serve.change.scaling import Meter
from serve.door import guard
from serve.door.access import is_loopback
from serve.envelope import Envelope, Record, client_of
from serve.explanations import Explanations, Row
from serve.schema import RequestError
from serve.watching import tracing
from serve.watching.access_log import AccessLog
from serve.watching.telemetry import OPEN_METRICS, Telemetry

logger = logging.getLogger(__name__)

PREDICT = "/predict"
MOST_SHOWN = 100
"""Characters of a method and of a path that an error repeats."""
Exposition = Callable[[], Awaitable[str]]


class Service:
    """What the routes share: the model, its tokenizer, its batcher, its metrics."""

    def __init__(self, predictor: Predictor, settings: Serve):
        self.predictor, self.settings = predictor, settings
        self.spans = tracing.spans(settings, predictor.artifact)
        self.access_log = AccessLog(settings.access_log)
        self.telemetry = Telemetry(predictor, settings.exemplars)
        self.encoder = Encoder(predictor)
        limits = Limits(
            batch_rows=settings.max_batch_rows,
            batch_tokens=settings.max_batch_tokens,
            batch_s=settings.max_batch_s,
            queue_rows=settings.max_queue_rows,
            queue_tokens=settings.max_queue_tokens,
        )
        run = functools.partial(predictor.run, most_tokens=settings.max_batch_tokens)
        self.batcher = Batcher(run, limits, self.telemetry.on_call)
        self.telemetry.watch(self.batcher)
        self._meter = Meter(time.monotonic())
        self.explanations = Explanations(predictor, self.telemetry.explained.observe)

    def close(self) -> None:
        self.batcher.close()
        self.explanations.close()
        self.spans.close()
        self.access_log.close()

    @property
    def ready(self) -> bool:
        """False while an engine call has run for longer than `serve.deadline_s`: nobody awaits it any more. The golden
        answers were checked when the artefact was loaded."""
        return self.batcher.stalled_s() <= self.settings.deadline_s

    def exposition(self) -> str:
        return self.telemetry.exposition()

    def load(self) -> dict[str, float]:
        """What `scaling.policy` decides by, of the time since the last call."""
        stats = self.batcher.stats
        return self._meter.report(time.monotonic(), self.batcher.waiting_tokens, stats.seconds, stats.tokens)

    async def answers(
        self,
        texts: list[Input],
        deadline: float,
        place: Callable[[int], str],
        parameters: Mapping[str, Any],
        record: Record,
        client: str = "",
    ) -> tuple[list[Any], int]:
        """Answers to `texts`, and how many of them were cut; `place` names the field of a text in the request, and
        `client` whose it is. What is counted of it is put into its `record`."""
        if len(texts) > self.settings.max_inputs:
            raise RequestError(413, f"{len(texts)} texts; send at most {self.settings.max_inputs}", "inputs")
        characters, most = [characters_of(text) for text in texts], self.settings.max_text_characters
        if (longest := max(characters)) > most:
            where = place(characters.index(longest))
            raise RequestError(413, f"a text of {longest} characters; send at most {most}", where)
        try:
            with self.spans.part("tokens"):
                encoded = await self.encoder.encode(texts)
            with self.spans.part("engine"):
                outputs = await self.batcher.submit(encoded, deadline, client)
        except InputError as error:
            raise RequestError(422, str(error), place(error.position)) from None
        except Overloaded as error:
            raise RequestError(503, str(error), retry_after=error.retry_after) from None
        except Expired as error:
            raise RequestError(504, str(error)) from None
        except EngineError:
            logger.exception("the engine failed")
            raise RequestError(500, "the model failed on this request") from None
        record.texts, record.tokens = len(texts), sum(len(row.ids) for row in encoded)
        record.cut = sum(row.truncated for row in encoded)
        self.telemetry.rows.inc(len(texts))
        self.telemetry.drift.observe(outputs, encoded)
        with self.spans.part("answers"):
            answers = self.predictor.decode(outputs, texts, encoded, parameters)
            if parameters.get("abstain"):
                task, head = self.predictor.task, self.predictor.head
                answers = abstention.abstain(answers, task, head, parameters["top_k"])
        if parameters.get("explain"):
            rows = [Row(*row) for row in zip(texts, encoded, outputs, strict=True)]
            with self.spans.part("explanations"):
                found = await self.explanations.submit(rows, parameters["label"], deadline)
            answers = [{"answer": answer, "explanation": why} for answer, why in zip(answers, found, strict=True)]
        return answers, record.cut

    async def infer(
        self, asked: protocol.InferRequest, binary: bytes, deadline: float, record: Record, client: str = ""
    ) -> tuple[dict[str, Any], int]:
        """The reply of the Open Inference Protocol, over HTTP or gRPC, and how many texts were cut."""
        task, artifact = self.predictor.task, self.predictor.artifact
        texts = asked.texts(task.fields, binary, self.settings.max_inputs)
        answers, cut = await self.answers(
            texts, deadline, lambda place: f"inputs.0.data.{place}", {"top_k": 1}, record, client
        )
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
                grpc = importlib.import_module("serve.grpc")
                opened = grpc.serving(lambda: nullcontext(service), settings, settings.grpc_port)
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
    app.add_middleware(guard.Guard, settings=settings, door=guard.door(settings))
    app.add_middleware(
        Envelope,
        predictor=predictor,
        settings=settings,
        telemetry=service.telemetry,
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
