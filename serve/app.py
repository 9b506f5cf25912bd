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

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rtrain
from rtrain.config import Serve
from rtrain.predict import InputError, Predictor
from rtrain.tasks.base import Input
from serve import about, abstention, guard, pages, protocol, schema
from serve.access import is_loopback
from serve.batcher import Batcher, EngineError, Expired
from serve.encoding import Encoder, characters_of
from serve.explanations import Explanations, Row
from serve.scheduler import Limits, Overloaded
from serve.schema import RequestError
from serve.telemetry import Telemetry

logger = logging.getLogger(__name__)

MOST_SHOWN = 100
"""Characters of a method and of a path that an error repeats."""
CLIENT_GONE = 499
"""Status in the metrics (nginx's) of a request whose client left before the answer."""

Exposition = Callable[[], Awaitable[str]]


class Service:
    """What the routes share: the model, its tokenizer, its batcher, its metrics."""

    def __init__(self, predictor: Predictor, settings: Serve):
        self.predictor, self.settings = predictor, settings
        self.telemetry = Telemetry(predictor)
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
        self.explanations = Explanations(predictor, self.telemetry.explained.observe)

    def close(self) -> None:
        self.batcher.close()
        self.explanations.close()

    @property
    def ready(self) -> bool:
        """False while an engine call has run for longer than `serve.deadline_s`: nobody awaits it any more. The golden
        answers were checked when the artefact was loaded."""
        return self.batcher.stalled_s() <= self.settings.deadline_s

    def exposition(self) -> str:
        return self.telemetry.exposition()

    def count(self, route: str, status: int | str, seconds: float) -> None:
        """One request that is over."""
        self.telemetry.requests.labels(route, str(status)).inc()
        self.telemetry.seconds.labels(route).observe(seconds)

    async def answers(
        self,
        texts: list[Input],
        deadline: float,
        place: Callable[[int], str],
        parameters: Mapping[str, Any],
        client: str,
    ) -> tuple[list[Any], int]:
        """Answers to `texts`, and how many of them were cut; `place` names the field of a text in the request."""
        if len(texts) > self.settings.max_inputs:
            raise RequestError(413, f"{len(texts)} texts; send at most {self.settings.max_inputs}", "inputs")
        characters, most = [characters_of(text) for text in texts], self.settings.max_text_characters
        if (longest := max(characters)) > most:
            where = place(characters.index(longest))
            raise RequestError(413, f"a text of {longest} characters; send at most {most}", where)
        try:
            encoded = await self.encoder.encode(texts)
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
        self.telemetry.rows.inc(len(texts))
        self.telemetry.drift.observe(outputs, encoded)
        answers = self.predictor.decode(outputs, texts, encoded, parameters)
        if parameters.get("abstain"):
            task, head = self.predictor.task, self.predictor.head
            answers = abstention.abstain(answers, task, head, parameters["top_k"])
        if parameters.get("explain"):
            rows = [Row(*row) for row in zip(texts, encoded, outputs, strict=True)]
            found = await self.explanations.submit(rows, parameters["label"], deadline)
            answers = [{"answer": answer, "explanation": why} for answer, why in zip(answers, found, strict=True)]
        return answers, sum(row.truncated for row in encoded)

    async def infer(
        self, asked: protocol.InferRequest, binary: bytes, deadline: float, client: str = ""
    ) -> tuple[dict[str, Any], int]:
        """The reply of the Open Inference Protocol, over HTTP or gRPC, and how many texts were cut."""
        task, artifact = self.predictor.task, self.predictor.artifact
        texts = asked.texts(task.fields, binary, self.settings.max_inputs)
        answers, cut = await self.answers(texts, deadline, lambda place: f"inputs.0.data.{place}", {"top_k": 1}, client)
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
    app.add_middleware(guard.Guard, settings=settings, door=guard.door(settings))
    app.add_middleware(_Envelope, service=service)
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)

    @app.post("/predict", **_documented(schema.PredictReply | schema.ExplainedReply, schema.PredictRequest))
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
            texts, deadline, lambda place: f"inputs.{place}" if several else "inputs", parameters, _client(request)
        )
        lone = not several and predictor.task.lone_answer and not parameters.get("explain")
        return _json(answers[0] if lone else answers, headers=_cut_header(cut))

    @app.post("/v2/models/{name}/versions/{version}/infer", **_documented(protocol.InferReply, protocol.InferRequest))
    @app.post("/v2/models/{name}/infer", **_documented(protocol.InferReply, protocol.InferRequest))
    async def infer(request: Request) -> Response:
        """The best label of each text, in the Open Inference Protocol."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        service.named(**request.path_params)
        body = await request.body()
        document, binary = protocol.split(body, request.headers.get("inference-header-content-length"))
        asked = schema.parse(protocol.InferRequest, document, settings.max_inputs)
        reply, cut = await service.infer(asked, binary, deadline, _client(request))
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


def _client(request: Request) -> str:
    """Who asks, by the name of the key (`guard`); empty where nobody is asked for one."""
    return request.state.key or ""


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
        send = guard.hardened(send, self._service.settings)

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
            error = RequestError(500, "internal error; the server's log has the cause")
            await guard.answer(error, scope["path"])(scope, receive, send_enveloped)
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
