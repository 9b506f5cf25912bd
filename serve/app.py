"""HTTP applications: routes of one model, and of an address with several models. Plain ASGI, for any server.

A request passes: `middleware` -> body parsed and checked (`schemas.predict`) -> tokens, engine, decoding
(`ModelService`) -> JSON. Replies of a model, errors too, have its name and version in their headers, except those to a
client without the key that it needs. Errors have the form of `schemas.predict.ErrorReply`; under /v2 they are a line of
text (`RequestError.to_document`).

The web pages, to try a model, to list several models, and for the API documentation, are static files from `page` and
from the package with Swagger UI; they load nothing from other hosts.
"""

import asyncio
import functools
import importlib.resources
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

import rtrain
from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve import middleware, model_info
from serve.auth import api_keys
from serve.auth.api_keys import MOUNT
from serve.auth.preflight import is_loopback
from serve.ingress.haproxy import PROXY_ERRORS_HEADER
from serve.middleware import AccessLog, RequestMiddleware, RequestRecorder, get_context
from serve.model import ModelService, check_can_abstain
from serve.observability import tracing
from serve.observability.metrics import RequestMetrics, Telemetry, add_proxy_errors
from serve.openapi import (
    ApiRoute,
    DocumentInfo,
    RouteDocs,
    build_document,
    raise_not_found,
    request_line_error,
)
from serve.replies import json_reply, labels_to_json, to_json
from serve.schemas import open_inference, predict as schemas_predict
from serve.schemas.predict import RequestError

V2_PREFIX = "/v2/models/"
SINGLE_MODEL_PATHS = ("/predict", "/info")
"""Routes of a model, which where there are several belong to none."""
FALLBACK_METHODS = ("GET", "POST")
LABEL_OUTPUTS = ("classes", "labels")
"""The outputs of tasks (`Task.output`) whose answers are labels with scores."""
MetricsSource = Callable[[], Awaitable[str]]


class ModelProvider(Protocol):
    """Queries about the whole address: its one model, or all of them."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def model_names(self) -> list[str]: ...

    def list_models(self, ready_only: bool, allowed_models: Collection[str] | None) -> list[dict[str, str]]:
        """Models at this address, in the form of the Open Inference Protocol. `ready_only`: omit models that are not
        ready. `allowed_models`: omit all other models."""
        ...

    def service_for(self, model: str, version: str | None) -> AbstractContextManager[ModelService]:
        """Context of the service that handles one request of another protocol. `version`: the requested version; empty
        for any; None if the request runs no inference. Raises `RequestError` if the model or version does not exist."""
        ...

    def render_metrics(self) -> str:
        """This process's metrics, in Prometheus' text form."""
        ...


class EndpointApp:
    """ASGI application: the routes behind the middleware, and the OpenAPI document."""

    def __init__(
        self,
        info: DocumentInfo,
        routes: Sequence[ApiRoute],
        settings: ServeConfig,
        authenticator: api_keys.Authenticator | None,
        recorder: RequestRecorder,
        predictor: Predictor | None = None,
    ):
        """`predictor`: that of the only model; None for several models."""
        self._info, self._routes, self._requires_keys = info, routes, settings.keys is not None
        router = Router(
            [*routes, ApiRoute("GET", "/openapi.json", self._get_document, None, label="other")],
            redirect_slashes=False,
            default=raise_not_found,
            lifespan=self._lifespan,
        )
        self._app = RequestMiddleware(router, settings, authenticator, recorder, predictor)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        yield

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        return build_document(self._info, self._routes, self._requires_keys)

    async def _get_document(self, request: Request) -> Response:
        root = request.scope.get("root_path", "").rstrip("/")
        return json_reply({**self.document, "servers": [{"url": root}]} if root else self.document)


class ModelApp(EndpointApp):
    """Application of one version of a model."""

    def __init__(
        self,
        service: ModelService,
        authenticator: api_keys.Authenticator | None,
        metrics_source: MetricsSource | None = None,
    ):
        """`metrics_source` replaces this process's metrics on `/metrics` by those of all replicas."""
        predictor, self.service = service.predictor, service
        columns = model_info.text_columns(predictor).items()
        column_docs = "; ".join(f"`{field}` is what column `{column}` was" for field, column in columns)
        description = f"Texts of a question, by the training rows: {column_docs}." if column_docs else ""
        routes = [
            *self._model_routes(),
            *_CommonRoutes(service, service.settings, metrics_source).routes(),
            *_page_routes("index.html", "page.js"),
            # No model's pages, where `api_keys` scopes do not apply.
            *(_page_routes("index.html", "page.js", MOUNT + "{name}") if authenticator is not None else ()),
        ]
        super().__init__(
            DocumentInfo(predictor.artifact.name, predictor.artifact.version, description),
            routes,
            service.settings,
            authenticator,
            service.recorder,
            predictor,
        )
        self._serialize = labels_to_json if predictor.task.output in LABEL_OUTPUTS else to_json
        self._info_document: dict[str, Any] | None = None

    def _model_routes(self) -> list[ApiRoute]:
        infer = RouteDocs(open_inference.InferReply, open_inference.InferRequest)
        metadata, ready = RouteDocs(open_inference.ModelMetadata), RouteDocs(open_inference.ModelReady)
        predict = RouteDocs(
            schemas_predict.PredictReply | schemas_predict.ExplainedReply, schemas_predict.PredictRequest
        )
        return [
            ApiRoute("POST", "/predict", self.predict, predict),
            ApiRoute("POST", "/v2/models/{name}/infer", self.infer, infer),
            ApiRoute("POST", "/v2/models/{name}/versions/{version}/infer", self.infer, infer),
            ApiRoute("GET", "/v2/models/{name}", self.model_metadata, metadata),
            ApiRoute("GET", "/v2/models/{name}/versions/{version}", self.model_metadata, metadata),
            ApiRoute("GET", "/v2/models/{name}/ready", self.model_ready, ready),
            ApiRoute("GET", "/v2/models/{name}/versions/{version}/ready", self.model_ready, ready),
            ApiRoute("GET", "/info", self.info, RouteDocs(model_info.ModelInfo)),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        yield
        self.service.close()

    async def predict(self, request: Request) -> Response:
        """Labels and scores of each text, in the Hugging Face inference form."""
        service, task, deadline = self.service, self.service.predictor.task, self._deadline()
        predict_request = schemas_predict.parse_request(
            schemas_predict.PredictRequest, await _read_body(request), service.settings.max_inputs
        )
        is_list, texts = isinstance(predict_request.inputs, list), predict_request.texts()
        parameters = predict_request.parameters.model_dump() if predict_request.parameters else {}
        explains = parameters.get("explain")
        if explains:
            service.explanations.check_request(len(texts), parameters["label"])
        if parameters.get("abstain"):
            check_can_abstain(task, service.predictor.head)  # refused before the engine has worked for it
        context = get_context(request.scope)
        answers = await service.answer_texts(
            texts, deadline, lambda place: f"inputs.{place}" if is_list else "inputs", parameters, context
        )
        headers = _truncation_headers(context.truncated_inputs)
        if explains:
            return json_reply(answers, headers=headers)
        return json_reply(answers if is_list else task.unwrap_single(answers[0]), 200, headers, self._serialize)

    async def infer(self, request: Request) -> Response:
        """The best label of each text, or all of them, in the Open Inference Protocol."""
        service, deadline, context = self.service, self._deadline(), get_context(request.scope)
        service.check_target(**request.path_params)
        document, binary = open_inference.split_body(
            await _read_body(request), request.headers.get("inference-header-content-length")
        )
        infer_request = schemas_predict.parse_request(
            open_inference.InferRequest, document, service.settings.max_inputs
        )
        reply = await service.infer(infer_request, binary, deadline, context)
        return json_reply(reply, headers=_truncation_headers(context.truncated_inputs))

    async def model_metadata(self, request: Request) -> Response:
        self.service.check_target(**request.path_params)
        return json_reply(self.service.metadata())

    async def model_ready(self, request: Request) -> Response:
        self.service.check_target(**request.path_params)
        is_ready = self.service.is_ready
        return json_reply({"name": self.service.predictor.artifact.name, "ready": is_ready}, 200 if is_ready else 503)

    async def info(self, request: Request) -> Response:
        """Purpose of the model and how to query it; its page shows this."""
        if self._info_document is None:  # in a thread, since it may read a file of the run
            self._info_document = await asyncio.to_thread(
                model_info.build_model_info, self.service.predictor, self.service.settings
            )
        return json_reply(self._info_document)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.service.settings.request_timeout_s


def build_app(
    predictor: Predictor,
    settings: ServeConfig,
    metrics_source: MetricsSource | None = None,
    telemetry: Telemetry | None = None,
    authenticator: api_keys.Authenticator | None = None,
) -> ModelApp:
    """Build the application of a loaded model. `Predictor.load` has already checked its golden answers. `telemetry`:
    metrics that several versions of the model share. `authenticator`: None for that of the settings."""
    authenticator = authenticator or middleware.make_authenticator(settings)
    return ModelApp(ModelService(predictor, settings, telemetry), authenticator, metrics_source)


def build_multi_model_app(
    provider: ModelProvider,
    settings: ServeConfig,
    authenticator: api_keys.Authenticator | None,
    request_metrics: RequestMetrics,
    metrics_source: MetricsSource | None = None,
) -> EndpointApp:
    """Application of an address with several models. `request_metrics`: of requests to no model."""
    pages = _page_routes("index.html", "page.js", MOUNT + "{name}")
    routes = [
        *_CommonRoutes(provider, settings, metrics_source).routes(),
        *_page_routes("models.html", "models.js"),
        *(pages if authenticator is not None else ()),
        *_MultiModelRoutes(provider).routes(),
    ]
    recorder = RequestRecorder(
        request_metrics.count_request, tracing.make_tracer(settings, None), AccessLog(settings.access_log)
    )
    return EndpointApp(DocumentInfo("rtrain", rtrain.__version__), routes, settings, authenticator, recorder)


def build_loading_app(
    settings: ServeConfig, authenticator: api_keys.Authenticator | None, request_metrics: RequestMetrics
) -> ASGIApp:
    """Application that answers for a model while its first artifact is loading: it passes requests through the
    middleware, and refuses them with `not_loaded_error`."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the whole body, under its limits: the client may keep its connection
        raise not_loaded_error()

    recorder = RequestRecorder(request_metrics.count_request, tracing.Tracer(), AccessLog(settings.access_log))
    return RequestMiddleware(refuse, settings, authenticator, recorder)


def not_loaded_error() -> RequestError:
    """Error before the first artifact is loaded: the port opens a moment earlier."""
    return RequestError(503, "no model is loaded yet; try again in a moment", retry_after=1)


def unknown_model_error(names: Iterable[str]) -> RequestError:
    """Error for a model name that does not exist."""
    return RequestError(
        404, f"no model of that name; here are {', '.join(names) or 'none that this key may ask'}", "name"
    )


class _MultiModelRoutes:
    """Routes for requests that name no model, or an unknown one."""

    def __init__(self, provider: ModelProvider):
        self._provider = provider

    def routes(self) -> list[ApiRoute]:
        return [
            *(ApiRoute(FALLBACK_METHODS, path, self.require_model_path, None) for path in SINGLE_MODEL_PATHS),
            ApiRoute("GET", MOUNT + "{name}", self.redirect_to_model, None),
            ApiRoute(FALLBACK_METHODS, MOUNT + "{rest:path}", self.raise_unknown_model, None),
            ApiRoute(FALLBACK_METHODS, V2_PREFIX + "{rest:path}", self.raise_unknown_model, None),
        ]

    async def require_model_path(self, request: Request) -> Response:
        path, names = f"{MOUNT}NAME{middleware.route_path(request.scope)}", " or ".join(self._allowed_names(request))
        raise RequestError(404, f"several models answer here; ask {path}, where NAME is {names}")

    async def redirect_to_model(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        if name not in self._allowed_names(request):
            raise unknown_model_error(self._allowed_names(request))
        return RedirectResponse(f"{name}/")  # beside this one, whatever the host is called

    async def raise_unknown_model(self, request: Request) -> Response:
        raise unknown_model_error(self._allowed_names(request))

    def _allowed_names(self, request: Request) -> list[str]:
        """Models that the key of the request may use."""
        allowed_models = _allowed_models(request)
        return [name for name in self._provider.model_names if allowed_models is None or name in allowed_models]


class _CommonRoutes:
    """Routes that concern no single model."""

    def __init__(self, provider: ModelProvider, settings: ServeConfig, metrics_source: MetricsSource | None):
        self._provider, self._settings, self._metrics_source = provider, settings, metrics_source

    def routes(self) -> list[ApiRoute]:
        index = RouteDocs(open_inference.RepositoryIndex, open_inference.IndexRequest)
        return [
            ApiRoute("GET", "/v2", self.server_metadata, RouteDocs(open_inference.ServerMetadata)),
            ApiRoute("GET", "/v2/health/live", self.live, RouteDocs(open_inference.ServerLive)),
            ApiRoute("GET", "/v2/health/ready", self.ready, RouteDocs(open_inference.ServerReady)),
            ApiRoute("POST", "/v2/repository/index", self.repository_index, index),
            ApiRoute("GET", "/metrics", self.metrics),
            # They describe the service to whoever can reach it.
            *(_swagger_routes() if is_loopback(self._settings.host) else ()),
        ]

    async def server_metadata(self, request: Request) -> Response:
        return json_reply({"name": "rtrain", "version": rtrain.__version__, "extensions": []})

    async def live(self, request: Request) -> Response:
        return json_reply({"live": True})

    async def ready(self, request: Request) -> Response:
        is_ready = self._provider.is_ready
        return json_reply({"ready": is_ready}, 200 if is_ready else 503)

    async def repository_index(self, request: Request) -> Response:
        index_request = schemas_predict.parse_request(open_inference.IndexRequest, await _read_body(request) or b"{}")
        return json_reply(self._provider.list_models(index_request.ready, _allowed_models(request)))

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text form."""
        source = self._metrics_source
        metrics_text = self._provider.render_metrics() if source is None else await source()
        metrics_text = add_proxy_errors(metrics_text, request.headers.get(PROXY_ERRORS_HEADER, ""))
        return Response(metrics_text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _read_body(request: Request) -> bytes:
    message = await request.receive()  # the whole body: the middleware has read it
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = message["body"]
    return body


def _allowed_models(request: Request) -> Collection[str] | None:
    key = get_context(request.scope).key
    return key.models if key else None


def _truncation_headers(truncated_inputs: int) -> dict[str, str]:
    """Neither protocol has a place to say that texts were longer than the model reads."""
    return {"x-truncated-inputs": str(truncated_inputs)} if truncated_inputs else {}


# ------------------------------------------------------------------------------------------------------------- pages

PAGE_FOLDER = importlib.resources.files("serve") / "page"
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
"""Content type by the end of a file's name."""
PAGE_HEADERS = {
    # 'self' alone, and nothing written into the page: a label or a text that holds markup is shown, and never run.
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
SWAGGER_PACKAGE = "fastapi_offline"
"""The package that has Swagger UI in its folder `static`."""
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
SWAGGER_HEADERS = {
    # Swagger UI writes styles into its elements, and has its icons in its style sheet.
    "content-security-policy": PAGE_HEADERS["content-security-policy"].replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    )
}


def _page_routes(page: str, script: str, prefix: str = "") -> list[ApiRoute]:
    """A page at `/`, with the script and the style that it loads; under a prefix the document leaves them out."""

    async def get_page(request: Request) -> Response:
        """A page for a browser."""
        return _file_response(PAGE_FOLDER, page)

    async def get_style(request: Request) -> Response:
        """How the page looks."""
        return _file_response(PAGE_FOLDER, "page.css")

    async def get_script(request: Request) -> Response:
        """Script of the page."""
        return _file_response(PAGE_FOLDER, script)

    handlers = {"/": get_page, "/page.css": get_style, f"/{script}": get_script}
    docs = None if prefix else RouteDocs()
    return [ApiRoute("GET", prefix + path, handler, docs) for path, handler in handlers.items()]


def _swagger_routes() -> list[ApiRoute]:
    """The page of the routes; none where the package with Swagger UI is not installed."""
    if importlib.util.find_spec(SWAGGER_PACKAGE) is None:
        return []

    async def get_docs(request: Request) -> Response:
        return _file_response(PAGE_FOLDER, "docs.html", SWAGGER_HEADERS)

    async def get_docs_script(request: Request) -> Response:
        return _file_response(PAGE_FOLDER, "docs.js")

    async def get_swagger_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in SWAGGER_FILES:
            raise request_line_error(request.scope, 404, "Not Found")
        return _file_response(importlib.resources.files(SWAGGER_PACKAGE) / "static", name, SWAGGER_HEADERS)

    handlers = {"/docs": get_docs, "/docs/docs.js": get_docs_script, "/docs/{name}": get_swagger_file}
    return [ApiRoute("GET", path, handler, None) for path, handler in handlers.items()]


def _file_response(folder: Any, name: str, headers: Mapping[str, str] = PAGE_HEADERS) -> Response:
    return Response(_read_file(folder / name), media_type=CONTENT_TYPES[name.rpartition(".")[2]], headers=headers)


@functools.cache
def _read_file(path: Any) -> bytes:
    return bytes(path.read_bytes())
