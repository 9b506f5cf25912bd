"""Routes with their part of the OpenAPI document.

Bodies are parsed from bytes under limits (`schemas.predict.parse_request`), so the document is written from the same
pydantic models, and no framework parses anything.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve.middleware import get_context
from serve.schemas import open_inference, predict
from serve.schemas.predict import RequestError

MAX_SHOWN_CHARACTERS = 100
"""Characters of a method and of a path that an error repeats."""
_SCHEMA_REFERENCE = "#/components/schemas/{model}"
RouteHandler = Callable[[Request], Awaitable[Response]]


class RouteDocs(NamedTuple):
    """A route's part of the OpenAPI document."""

    reply: Any = None
    """Model of the reply, or a union of models; None for other replies than JSON."""
    request: type[BaseModel] | None = None


class ApiRoute(Route):
    """A route that answers exactly its methods. `docs`: None for a route that the document leaves out. `label`: name
    in metrics and logs, by default the path."""

    def __init__(
        self,
        methods: str | Sequence[str],
        path: str,
        handler: RouteHandler,
        docs: RouteDocs | None = RouteDocs(),  # noqa: B008  # immutable
        label: str | None = None,
    ):
        super().__init__(path, handler, name=handler.__name__)
        self.methods = {methods} if isinstance(methods, str) else set(methods)
        self.handler, self.docs, self.label = handler, docs, label or path

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        get_context(scope).route = self.label
        if scope["method"] not in (self.methods or ()):
            raise request_line_error(scope, 405, "Method Not Allowed", {"Allow": ", ".join(self.methods or ())})
        response = await self.handler(Request(scope, receive))
        await response(scope, receive, send)


async def raise_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise request_line_error(scope, 404, "Not Found")


def request_line_error(scope: Scope, status: int, reason: str, headers: dict[str, str] | None = None) -> RequestError:
    """An error that repeats method and path. Not `request.url`, which cannot be made of every Host header."""
    method, path = get_context(scope).method, scope["path"]
    is_page = get_context(scope).route == "/" and method == "POST"
    hint = "; texts go to /predict" if is_page else ""
    error = RequestError(status, f"{method[:MAX_SHOWN_CHARACTERS]} {path[:MAX_SHOWN_CHARACTERS]}: {reason}{hint}")
    error.headers.update(headers or {})
    return error


class DocumentInfo(NamedTuple):
    """Title and version of the document."""

    title: str
    version: str
    description: str = ""


def build_document(info: DocumentInfo, routes: Iterable[ApiRoute], requires_keys: bool) -> dict[str, Any]:
    """OpenAPI document of the routes."""
    paths: dict[str, dict[str, Any]] = {}
    replies: set[type[BaseModel]] = {predict.ErrorReply}
    requests: set[type[BaseModel]] = set()
    for route in routes:
        if route.docs is None:
            continue
        for method in route.methods or ():
            paths.setdefault(route.path, {})[method.lower()] = _describe_operation(route, route.docs, method)
        replies.update((*_models_of_reply(route.docs.reply), _error_model(route.docs)))
        requests.update([route.docs.request] if route.docs.request else [])
    # A default null says nothing of a reply.
    reply_schemas = json.loads(
        json.dumps(_build_schemas(replies, "serialization")),
        object_hook=lambda entries: {key: value for key, value in entries.items() if value is not None},
    )
    schemas = {**reply_schemas, **_build_schemas(requests, "validation")}
    security = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if requires_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {name: value for name, value in info._asdict().items() if value},
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items())), **security},
        **({"security": [{"key": []}]} if requires_keys else {}),
    }


def _build_schemas(models: Iterable[type[BaseModel]], mode: JsonSchemaMode) -> dict[str, Any]:
    document = models_json_schema([(model, mode) for model in models], ref_template=_SCHEMA_REFERENCE)[1]
    return dict(document.get("$defs", {}))


def _models_of_reply(reply: Any) -> tuple[type[BaseModel], ...]:
    return get_args(reply) or ((reply,) if reply else ())


def _error_model(docs: RouteDocs) -> type[BaseModel]:
    is_protocol = getattr(docs.reply, "__module__", "") == open_inference.__name__
    return open_inference.InferError if is_protocol else predict.ErrorReply


def _describe_operation(route: ApiRoute, docs: RouteDocs, method: str) -> dict[str, Any]:
    title = route.name.replace("_", " ").title()
    operation_id = re.sub(r"\W", "_", f"{route.name}{route.path}") + f"_{method.lower()}"
    success: dict[str, Any] = {"description": "Successful Response"}
    if references := [_reference(model) for model in _models_of_reply(docs.reply)]:
        union = {"anyOf": references, "title": f"Response 200 {operation_id.replace('_', ' ').title()}"}
        success["content"] = _json_content(union if len(references) > 1 else references[0])
    error = {"description": "Error", "content": _json_content(_reference(_error_model(docs)))}
    description = {"description": route.handler.__doc__} if route.handler.__doc__ else {}
    body = (
        {"requestBody": {"required": True, "content": _json_content(_reference(docs.request))}} if docs.request else {}
    )
    responses = {"200": success, "default": error}
    return {"summary": title, **description, "operationId": operation_id, **body, "responses": responses}


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _SCHEMA_REFERENCE.format(model=model.__name__)}
