"""The HTTP application of one model: its routes, limits, errors and metrics. Plain ASGI; what runs it is not its
business, and what it has in common with others is in `base`.

A request passes: body read under the size limit -> parsed and checked (`schema`) -> tokens (`Predictor.encode`) ->
`batcher` -> the task's `decode` -> JSON, by way of `explanations` where it asks why. Each answer, an error too, carries
the model's name and version; each error has the one form of `schema.ErrorReply`.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from rtrain.config import Serve
from rtrain.inference.predictor import Predictor
from serve import abstention, app_base, model_info, ui
from serve.app_base import documented, reply
from serve.auth import middleware
from serve.auth.api_keys import MOUNT
from serve.model import Lasting, Service
from serve.request_context import client_of
from serve.schemas import open_inference, predict as schemas_predict

PREDICT = "/predict"
_Answer = Callable[[Scope, Callable[[], Awaitable[bytes]]], Awaitable[Response]]


def build_app(
    predictor: Predictor, settings: Serve, exposition: app_base.Exposition | None = None, lasting: Lasting | None = None
) -> FastAPI:
    """The application of a loaded model (`Predictor.load`: one that does not give its golden answers gets no app).

    `exposition` replaces this process's metrics on `/metrics`: where there are several replicas, by those of all.
    `lasting`: that of the process, where this is not the only version that it answers with.
    """
    lasting = lasting or Lasting(settings, middleware.door(settings))
    service = Service(predictor, settings, lasting)
    artifact = predictor.artifact

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    bodies = (schemas_predict.PredictRequest, open_inference.InferRequest, open_inference.IndexRequest)
    columns = "; ".join(
        f"`{field}` is what column `{column}` was" for field, column in model_info.columns(predictor).items()
    )
    app = app_base.Application(
        settings,
        bodies,
        title=artifact.name,
        version=artifact.version,
        description=f"Texts of a question, by the training rows: {columns}." if columns else "",
        lifespan=lifespan,
    )
    app.state.service = service

    description: dict[str, Any] | None = None
    write = app_base.labels_to_json if predictor.task.output in app_base.LABELLED else app_base.to_json

    async def answer(scope: Scope, read: Callable[[], Awaitable[bytes]]) -> Response:
        """To a question to /predict, whose body `read` gives."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        asked = schemas_predict.parse(schemas_predict.PredictRequest, await read(), settings.max_inputs)
        several = isinstance(asked.inputs, list)
        texts = asked.texts()
        parameters = asked.parameters.model_dump() if asked.parameters else {}
        if parameters.get("explain"):
            service.explanations.check(len(texts), parameters["label"])
        if parameters.get("abstain"):
            abstention.check(predictor.task, predictor.head)  # refused before the engine has worked for it
        answers, cut = await service.answers(
            texts,
            deadline,
            lambda place: f"inputs.{place}" if several else "inputs",
            parameters,
            scope["state"]["record"],
            client_of(scope),
        )
        if parameters.get("explain"):
            return reply(answers, headers=_cut_header(cut))
        return reply(answers if several else predictor.task.alone(answers[0]), 200, _cut_header(cut), write)

    app.add_middleware(_Shortcut, routes=app.router.routes, answer=answer)
    app.dress(settings, lasting.door, predictor, service.answered, service.spans, service.access_log)

    @app.post(
        PREDICT,
        **documented(schemas_predict.PredictReply | schemas_predict.ExplainedReply, schemas_predict.PredictRequest),
    )
    async def predict(request: Request) -> Response:
        """Labels and scores of each text, in the Hugging Face inference form."""
        return await answer(request.scope, request.body)

    @app.post(
        "/v2/models/{name}/versions/{version}/infer",
        **documented(open_inference.InferReply, open_inference.InferRequest),
    )
    @app.post("/v2/models/{name}/infer", **documented(open_inference.InferReply, open_inference.InferRequest))
    async def infer(request: Request) -> Response:
        """The best label of each text, or all of them, in the Open Inference Protocol."""
        deadline = asyncio.get_running_loop().time() + settings.deadline_s
        service.named(**request.path_params)
        body = await request.body()
        document, binary = open_inference.split(body, request.headers.get("inference-header-content-length"))
        asked = schemas_predict.parse(open_inference.InferRequest, document, settings.max_inputs)
        found, cut = await service.infer(asked, binary, deadline, request.state.record, client_of(request.scope))
        return reply(found, headers=_cut_header(cut))

    @app.get("/v2/models/{name}/versions/{version}", **documented(open_inference.ModelMetadata))
    @app.get("/v2/models/{name}", **documented(open_inference.ModelMetadata))
    async def model_metadata(request: Request) -> Response:
        service.named(**request.path_params)
        return reply(service.metadata())

    @app.get("/v2/models/{name}/versions/{version}/ready", **documented(open_inference.ModelReady))
    @app.get("/v2/models/{name}/ready", **documented(open_inference.ModelReady))
    async def model_ready(request: Request) -> Response:
        service.named(**request.path_params)
        return reply({"name": artifact.name, "ready": service.ready}, 200 if service.ready else 503)

    @app.get("/info", **documented(model_info.About))
    async def info() -> Response:
        """What the model is for and how it is asked: what its page shows."""
        nonlocal description
        if description is None:  # in a thread, since it may read a file of the run
            description = await asyncio.to_thread(model_info.describe, predictor, settings)
        return reply(description)

    app.include_router(app_base.routes(service, settings, exposition))
    app.include_router(ui.MODEL)
    if lasting.door is not None:
        app.include_router(ui.MODEL, prefix=MOUNT + "{name}", include_in_schema=False)  # of no model (`keys`)
    return app


class _Shortcut:
    """Hands a question to /predict to `answer`. The way of all other routes, by the router and what FastAPI puts before
    a function, takes as long as the tokens of a short text."""

    def __init__(self, app: ASGIApp, routes: list[BaseRoute], answer: _Answer):
        self._app, self._routes, self._answer = app, routes, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and middleware.route(scope) == PREDICT:
            scope["route"] = self._route
            answer = await self._answer(scope, functools.partial(_body, receive))
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @functools.cached_property
    def _route(self) -> APIRoute:
        return next(route for route in self._routes if isinstance(route, APIRoute) and route.path == PREDICT)


async def _body(receive: Receive) -> bytes:
    message = await receive()  # all of it (`guard`)
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = message["body"]
    return body


def _cut_header(cut: int) -> dict[str, str]:
    """Neither protocol has a place to say that texts were longer than the model reads."""
    return {"x-truncated-inputs": str(cut)} if cut else {}
