"""HTTP application of one model: routes, limits, errors and metrics. Plain ASGI, for any server; `app_base` holds the
code shared with the application of several models.

A request passes: body read under the size limit -> parsed and checked (`schemas.predict`) -> tokens
(`Predictor.encode`) -> `batcher` -> the task's `decode` -> JSON; with `explain`, `explanations` run before the JSON.
Each reply, an error too, carries the model's name and version. Each error has the form of `schemas.predict.ErrorReply`.
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

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve import abstention, app_base, middleware, model_info, ui
from serve.app_base import json_reply, route_docs
from serve.auth.api_keys import MOUNT
from serve.model import ModelService, ModelState
from serve.request_context import client_name
from serve.schemas import open_inference, predict as schemas_predict

PREDICT = "/predict"
_AnswerRequest = Callable[[Scope, Callable[[], Awaitable[bytes]]], Awaitable[Response]]


def build_app(
    predictor: Predictor,
    settings: ServeConfig,
    metrics_source: app_base.MetricsSource | None = None,
    model_state: ModelState | None = None,
) -> FastAPI:
    """Build the application of a loaded model. `Predictor.load` has already checked its golden answers.

    `metrics_source` replaces this process's metrics on `/metrics` by those of all replicas. `model_state`: state that
    several versions of the model in this process share.
    """
    model_state = model_state or ModelState(settings, middleware.make_authenticator(settings))
    service = ModelService(predictor, settings, model_state)
    artifact = predictor.artifact

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    request_models = (schemas_predict.PredictRequest, open_inference.InferRequest, open_inference.IndexRequest)
    column_docs = "; ".join(
        f"`{field}` is what column `{column}` was" for field, column in model_info.text_columns(predictor).items()
    )
    app = app_base.BaseApp(
        settings,
        request_models,
        title=artifact.name,
        version=artifact.version,
        description=f"Texts of a question, by the training rows: {column_docs}." if column_docs else "",
        lifespan=lifespan,
    )
    app.state.service = service

    description: dict[str, Any] | None = None
    serialize = app_base.labels_to_json if predictor.task.output in app_base.LABEL_OUTPUTS else app_base.to_json

    async def answer_request(scope: Scope, read_body: Callable[[], Awaitable[bytes]]) -> Response:
        """To a question to /predict, whose body `read_body` gives."""
        deadline = asyncio.get_running_loop().time() + settings.request_timeout_s
        predict_request = schemas_predict.parse_request(
            schemas_predict.PredictRequest, await read_body(), settings.max_inputs
        )
        is_list = isinstance(predict_request.inputs, list)
        texts = predict_request.texts()
        parameters = predict_request.parameters.model_dump() if predict_request.parameters else {}
        if parameters.get("explain"):
            service.explanations.check_request(len(texts), parameters["label"])
        if parameters.get("abstain"):
            abstention.check_can_abstain(predictor.task, predictor.head)  # refused before the engine has worked for it
        answers, truncated_inputs = await service.answer_texts(
            texts,
            deadline,
            lambda place: f"inputs.{place}" if is_list else "inputs",
            parameters,
            scope["state"]["request_stats"],
            client_name(scope),
        )
        if parameters.get("explain"):
            return json_reply(answers, headers=_truncation_headers(truncated_inputs))
        return json_reply(
            answers if is_list else predictor.task.unwrap_single(answers[0]),
            200,
            _truncation_headers(truncated_inputs),
            serialize,
        )

    app.add_middleware(_PredictFastPath, routes=app.router.routes, answer_request=answer_request)
    app.add_default_middleware(
        settings, model_state.authenticator, predictor, service.record_response, service.tracer, service.access_log
    )

    @app.post(
        PREDICT,
        **route_docs(schemas_predict.PredictReply | schemas_predict.ExplainedReply, schemas_predict.PredictRequest),
    )
    async def predict(request: Request) -> Response:
        """Labels and scores of each text, in the Hugging Face inference form."""
        return await answer_request(request.scope, request.body)

    @app.post(
        "/v2/models/{name}/versions/{version}/infer",
        **route_docs(open_inference.InferReply, open_inference.InferRequest),
    )
    @app.post("/v2/models/{name}/infer", **route_docs(open_inference.InferReply, open_inference.InferRequest))
    async def infer(request: Request) -> Response:
        """The best label of each text, or all of them, in the Open Inference Protocol."""
        deadline = asyncio.get_running_loop().time() + settings.request_timeout_s
        service.check_target(**request.path_params)
        body = await request.body()
        document, binary = open_inference.split_body(body, request.headers.get("inference-header-content-length"))
        infer_request = schemas_predict.parse_request(open_inference.InferRequest, document, settings.max_inputs)
        reply_document, truncated_inputs = await service.infer(
            infer_request, binary, deadline, request.state.request_stats, client_name(request.scope)
        )
        return json_reply(reply_document, headers=_truncation_headers(truncated_inputs))

    @app.get("/v2/models/{name}/versions/{version}", **route_docs(open_inference.ModelMetadata))
    @app.get("/v2/models/{name}", **route_docs(open_inference.ModelMetadata))
    async def model_metadata(request: Request) -> Response:
        service.check_target(**request.path_params)
        return json_reply(service.metadata())

    @app.get("/v2/models/{name}/versions/{version}/ready", **route_docs(open_inference.ModelReady))
    @app.get("/v2/models/{name}/ready", **route_docs(open_inference.ModelReady))
    async def model_ready(request: Request) -> Response:
        service.check_target(**request.path_params)
        return json_reply({"name": artifact.name, "ready": service.is_ready}, 200 if service.is_ready else 503)

    @app.get("/info", **route_docs(model_info.ModelInfo))
    async def info() -> Response:
        """Purpose of the model and how to query it; its page shows this."""
        nonlocal description
        if description is None:  # in a thread, since it may read a file of the run
            description = await asyncio.to_thread(model_info.build_model_info, predictor, settings)
        return json_reply(description)

    app.include_router(app_base.build_common_router(service, settings, metrics_source))
    app.include_router(ui.MODEL_PAGE)
    if model_state.authenticator is not None:
        app.include_router(
            ui.MODEL_PAGE, prefix=MOUNT + "{name}", include_in_schema=False
        )  # no model: `api_keys` scopes do not apply
    return app


class _PredictFastPath:
    """Calls `answer_request` for POST /predict. Other routes go through the router of FastAPI, which takes as
    long as the tokenization of a short text."""

    def __init__(self, app: ASGIApp, routes: list[BaseRoute], answer_request: _AnswerRequest):
        self._app, self._routes, self._answer_request = app, routes, answer_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and middleware.route_path(scope) == PREDICT:
            scope["route"] = self._route
            response = await self._answer_request(scope, functools.partial(_read_body, receive))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @functools.cached_property
    def _route(self) -> APIRoute:
        return next(route for route in self._routes if isinstance(route, APIRoute) and route.path == PREDICT)


async def _read_body(receive: Receive) -> bytes:
    message = await receive()  # the whole body: `serve.middleware` has read it
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = message["body"]
    return body


def _truncation_headers(truncated_inputs: int) -> dict[str, str]:
    """Neither protocol has a place to say that texts were longer than the model reads."""
    return {"x-truncated-inputs": str(truncated_inputs)} if truncated_inputs else {}
