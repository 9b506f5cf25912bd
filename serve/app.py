"""The HTTP application: routes, limits, errors and metrics of one model. Plain ASGI; what runs it is not its business.

A request passes: body read under the size limit -> parsed and checked (`schema`) -> tokens (`Predictor.encode`) ->
`batcher` -> the task's `decode` -> JSON, by way of `explanations` where it asks why. Each answer, an error too, carries
the model's name and version; each error has the one form of `schema.ErrorReply`.
"""

import asyncio
import functools
import importlib.resources
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

import rtrain
from rtrain.config import Serve
from rtrain.predict import InputError, Predictor
from rtrain.tasks.base import Input
from serve import abstention, protocol, schema, tracing
from serve.access import is_loopback
from serve.access_log import AccessLog
from serve.batcher import Batcher, EngineError, Expired
from serve.encoding import Encoder
from serve.envelope import Envelope, Record, client_of
from serve.explanations import Explanations, Row
from serve.scaling import Meter
from serve.scheduler import Limits, Overloaded
from serve.schema import RequestError
from serve.telemetry import OPEN_METRICS, Telemetry

logger = logging.getLogger(__name__)

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
        """What `serve.scaling.policy` decides by, of the time since the last call."""
        stats = self.batcher.stats
        return self._meter.report(time.monotonic(), self.batcher.waiting_tokens, stats.seconds, stats.tokens)

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
        self,
        texts: list[Input],
        deadline: float,
        place: Callable[[int], str],
        parameters: Mapping[str, Any],
        scope: Scope,
    ) -> tuple[list[Any], int]:
        """Answers to `texts`, and how many of them were cut; `place` names the field of a text in the request, whose
        `scope` has its record and its client."""
        if len(texts) > self.settings.max_inputs:
            raise RequestError(413, f"{len(texts)} texts; send at most {self.settings.max_inputs}", "inputs")
        try:
            with self.spans.part("tokens"):
                encoded = await self.encoder.encode(texts)
            with self.spans.part("engine"):
                outputs = await self.batcher.submit(encoded, deadline, client_of(scope))
        except InputError as error:
            raise RequestError(422, str(error), place(error.position)) from None
        except Overloaded as error:
            raise RequestError(503, str(error), retry_after=error.retry_after) from None
        except Expired as error:
            raise RequestError(504, str(error)) from None
        except EngineError:
            logger.exception("the engine failed")
            raise RequestError(500, "the model failed on this request") from None
        record: Record = scope["state"]["record"]
        record.texts, record.tokens = len(texts), sum(len(row.ids) for row in encoded)
        record.cut = sum(row.truncated for row in encoded)
        self.telemetry.rows.inc(len(texts))
        self.telemetry.drift.observe(outputs, encoded)
        task, head = self.predictor.task, self.predictor.head
        with self.spans.part("answers"):
            answers = task.decode(outputs, texts, encoded, head, parameters)
            if parameters.get("abstain"):
                answers = abstention.abstain(answers, task, head, parameters["top_k"])
        if parameters.get("explain"):
            rows = [Row(*row) for row in zip(texts, encoded, outputs, strict=True)]
            with self.spans.part("explanations"):
                found = await self.explanations.submit(rows, parameters["label"], deadline)
            answers = [{"answer": answer, "explanation": why} for answer, why in zip(answers, found, strict=True)]
        return answers, record.cut


def build_app(predictor: Predictor, settings: Serve, exposition: Exposition | None = None) -> FastAPI:
    """The application of a loaded model (`Predictor.load`: one that does not give its golden answers gets no app).

    `exposition` replaces this process's metrics on `/metrics`: where there are several replicas, by their sum.
    """
    service = Service(predictor, settings)
    artifact = predictor.artifact

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
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
    app.add_middleware(
        Envelope,
        artifact=artifact,
        telemetry=service.telemetry,
        spans=service.spans,
        access_log=service.access_log,
        last_resort=_error(RequestError(500, "internal error; the server's log has the cause")),
    )
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
        if parameters.get("abstain"):
            abstention.least(predictor.task, predictor.head)  # refused before the engine has worked for it
        answers, cut = await service.answers(
            texts, deadline, lambda place: f"inputs.{place}" if several else "inputs", parameters, request.scope
        )
        lone = not several and predictor.task.needs_pair
        return _json(answers[0] if lone else answers, headers=_cut_header(cut))

    @app.post("/v2/models/{name}/infer", **_documented(protocol.InferReply, protocol.InferRequest))
    async def infer(request: Request, name: str) -> Response:
        """The best label of each text, in the Open Inference Protocol."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        _check_name(name, artifact.name)
        body = await service.body(request, deadline)
        document, binary = protocol.split(body, request.headers.get("inference-header-content-length"))
        asked = schema.parse(protocol.InferRequest, document)
        answers, cut = await service.answers(
            asked.texts(binary), deadline, lambda place: f"inputs.0.data.{place}", {"top_k": 1}, request.scope
        )
        tensors = protocol.tensors(answers, predictor.task.output)
        if asked.outputs:
            wanted = {output.name for output in asked.outputs}
            tensors = [tensor for tensor in tensors if tensor["name"] in wanted]
        reply = {"model_name": artifact.name, "model_version": artifact.version, "outputs": tensors}
        return _json(reply if asked.id is None else {**reply, "id": asked.id}, headers=_cut_header(cut))

    @app.get("/v2", **_documented(protocol.ServerMetadata))
    async def server_metadata() -> Response:
        return _json({"name": "rtrain", "version": rtrain.__version__, "extensions": []})

    @app.get("/v2/health/live", **_documented(protocol.Live))
    async def live() -> Response:
        return _json({"live": True})

    @app.get("/v2/health/ready", **_documented(protocol.Ready))
    async def ready() -> Response:
        return _json({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/v2/models/{name}", **_documented(protocol.ModelMetadata))
    async def model_metadata(name: str) -> Response:
        _check_name(name, artifact.name)
        return _json(
            {
                "name": artifact.name,
                "versions": [artifact.version],
                "platform": f"rtrain_{artifact.engine}",
                "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
                "outputs": [
                    {"name": name, "datatype": datatype, "shape": [-1]}
                    for name, datatype in protocol.output_tensors(predictor.task.output).items()
                ],
            }
        )

    @app.get("/v2/models/{name}/ready", **_documented(protocol.ModelReady))
    async def model_ready(name: str) -> Response:
        _check_name(name, artifact.name)
        return _json({"name": artifact.name, "ready": service.ready}, 200 if service.ready else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text form; with exemplars OpenMetrics', where one replica answers for itself."""
        if settings.exemplars and exposition is None:
            return Response(service.telemetry.open_metrics(), media_type=OPEN_METRICS)
        text = service.exposition() if exposition is None else await exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=Response)
    async def page() -> Response:
        """A page to try the model."""
        return Response(_page(), media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    return app


# ----------------------------------------------------------------------------------------------------------- answers

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def _json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # allow_nan: a model that gives NaN must not be answered by what no JSON parser reads; the ValueError becomes a 500.
    body = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body.encode(), status, headers, media_type="application/json")


def _cut_header(cut: int) -> dict[str, str]:
    """Neither protocol has a place to say that texts were longer than the model reads."""
    return {"x-truncated-inputs": str(cut)} if cut else {}


def _error(error: RequestError) -> Response:
    detail = {"type": schema.ERROR_TYPES[error.status], "message": error.message, "field": error.field}
    return _json({"error": detail}, error.status, error.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    """For our own errors, and for those of the router: no such path, not that method."""
    if isinstance(error, HTTPException):
        hint = "; texts go to /predict" if (request.method, request.url.path) == ("POST", "/") else ""
        found = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}{hint}")
        found.headers.update(error.headers or {})
        return _error(found)
    if isinstance(error, RequestError):
        return _error(error)
    raise error


def _check_name(asked: str, name: str) -> None:
    if asked != name:
        raise RequestError(404, f"no model of that name; this one is {name}", "name")


@functools.cache
def _page() -> str:
    return (importlib.resources.files("serve") / "page" / "index.html").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- OpenAPI


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI describes the bodies that it parses; ours are parsed from bytes and added here."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for model in (schema.PredictRequest, protocol.InferRequest):
                described = model.model_json_schema(ref_template=_REFERENCE)
                schemas.update(described.pop("$defs", {}))
                schemas[model.__name__] = described
        return super().openapi()


_REFERENCE = "#/components/schemas/{model}"


def _documented(reply: Any, request: type[BaseModel] | None = None) -> dict[str, Any]:
    """A route's part of the OpenAPI document."""
    described: dict[str, Any] = {"responses": {200: {"model": reply}}}
    if request is not None:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=request.__name__)}}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described
