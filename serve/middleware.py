"""The middleware of every request, in this order: request id and span, a refusal by the server, size of the head, Host,
declared length, key with scope and rate (`api_keys`), content encoding, the route, the form of errors, headers, metrics
and the log line. A body is read whole under its limits when the route asks for it.

Plain ASGI, for any server. Metrics, log lines and traces never contain texts. `predict.measure_json` limits depth and
number of values before JSON is parsed.
"""

import asyncio
import functools
import itertools
import json
import logging
import logging.handlers
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rtrain.config import ServeConfig
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor
from serve.auth import api_keys, preflight
from serve.ingress import haproxy
from serve.observability.tracing import RequestSpan, Tracer
from serve.schemas.predict import RequestError

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
CHECKED_HEADERS = (b"authorization", b"content-encoding", b"content-length", b"host", b"transfer-encoding")
CONTEXT_HEADERS = (b"traceparent", b"tracestate", b"x-request-id")
CLIENT_CLOSED_REQUEST = 499
"""Status in the metrics (nginx's) of a request whose client left before the answer."""
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Valid request ids of clients; any other value is replaced by a generated id."""
CONTEXT = "rtrain.request"
"""Key of the ASGI scope with the `RequestContext`."""


@dataclass(slots=True)
class RequestContext:
    """State of one request, over HTTP or gRPC."""

    id: str = ""
    method: str = "POST"
    route: str = "other"
    """Template of the route, never the path, which may hold anything."""
    status: int = CLIENT_CLOSED_REQUEST
    texts: int = 0
    tokens: int = 0
    truncated_inputs: int = 0
    """Texts that were longer than the model reads."""
    is_authenticated: bool = False
    """Whether the request has a valid key, or the endpoint requires none."""
    key: api_keys.ApiKey | None = None
    is_disconnected: Callable[[], bool] = lambda: False
    """Whether the client is known to have left."""
    rejection: RequestError | None = None
    """Error of a request that the server rejects unread."""

    @property
    def client(self) -> str:
        """Name of the key; empty without one."""
        return self.key.name if self.key else ""


def get_context(scope: Scope) -> RequestContext:
    context: RequestContext = scope[CONTEXT]
    return context


class AccessLog:
    """A line of JSON for each request, where `serve.access_log` names a file. No text of a request is ever in it."""

    def __init__(self, path: str | None, artifact: Artifact | None = None):
        """`path`: a file, which is opened anew when another program has moved it away; `preflight.STDERR`; None for no
        log. `artifact`: the model that each line names."""
        self._logger: logging.Logger | None = None
        self.model_fields = {"model": artifact.name, "version": artifact.version} if artifact else {}
        self._failed = False
        if path is None:
            return
        handler = (
            logging.StreamHandler(sys.stderr)
            if path == preflight.STDERR
            else _ReopeningFileHandler(path, encoding="utf-8", delay=True)
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
        # No parent logger: logging settings of the host program must not redirect it.
        self._logger = logging.Logger("rtrain.access")
        self._logger.addHandler(handler)

    @property
    def is_enabled(self) -> bool:
        return self._logger is not None

    def write(self, **fields: Any) -> None:
        if self._logger is None:
            return
        now = time.time()
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        try:
            self._logger.info("%s", json.dumps({"time": timestamp, **fields}, ensure_ascii=True))
            self._failed = False
        except OSError as error:  # its folder is gone, or its disk full: requests are answered all the same
            if not self._failed:
                sys.stderr.write(f"rtrain: the access log cannot be written: {error}\n")
            self._failed = True

    def close(self) -> None:
        for handler in self._logger.handlers if self._logger else ():
            handler.close()


class _ReopeningFileHandler(logging.handlers.WatchedFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the current exception: logging would print a traceback for each line."""
        raise  # Called inside an except block, so this re-raises.


@dataclass(frozen=True)
class RequestRecorder:
    """Metrics, traces and log lines of requests."""

    count: Callable[[str, int, float], None]
    """Receives route, status and seconds of each request."""
    tracer: Tracer
    access_log: AccessLog

    def log(self, context: RequestContext, span: RequestSpan, seconds: float) -> None:
        """Trace and log a finished request."""
        if span.trace_id is None and not self.access_log.is_enabled:
            return
        counts: Mapping[str, str | int] = {
            "inputs": context.texts,
            "tokens": context.tokens,
            "truncated_inputs": context.truncated_inputs,
        }
        span.end(
            f"{context.method} {context.route}",
            {
                "http.request.method": context.method,
                "http.route": context.route,
                "http.response.status_code": context.status,
                "rtrain.request_id": context.id,
                **{f"rtrain.{name}": value for name, value in counts.items()},
            },
        )
        self.access_log.write(
            id=context.id,
            client=context.client,
            method=context.method,
            route=context.route,
            status=context.status,
            ms=round(1000 * seconds, 3),
            **counts,
            **self.access_log.model_fields,
            **({"trace_id": span.trace_id} if span.trace_id else {}),
        )


class RequestMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        settings: ServeConfig,
        authenticator: api_keys.Authenticator | None,
        recorder: RequestRecorder,
        predictor: Predictor | None = None,
    ):
        """`predictor`: that of the only model behind it; None for an application of several models."""
        self._app, self._settings, self._authenticator, self._recorder = app, settings, authenticator, recorder
        self._model = predictor.artifact.name if predictor else None
        self._security_headers = _encode_headers(haproxy.security_headers(settings.tls_cert is not None))
        self._version_headers = _encode_headers(version_headers(predictor) if predictor else {})
        # Prefix and counter: os.urandom per request releases the GIL, then waits for the engine thread.
        self._process_prefix, self._request_counter = secrets.token_hex(10), itertools.count()
        self._allows_host = functools.lru_cache(lambda value: preflight.allows_host(settings, value.decode("latin-1")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no route is one
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        headers = {name: value for name, value in scope["headers"] if name in CONTEXT_HEADERS}
        context: RequestContext = scope.setdefault(CONTEXT, RequestContext())
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if REQUEST_ID_PATTERN.fullmatch(client_id):
            context.id = client_id
        else:
            context.id = f"{self._process_prefix}{next(self._request_counter):012x}"
        context.method, context.is_authenticated = scope["method"], self._authenticator is None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message = {**message, "headers": self._add_headers(message["headers"], context)}
            await send(message)

        with self._recorder.tracer.request_span(headers) as span:
            try:
                await self._check_request(scope, context)
                # The server leaves the body of an answer to HEAD out. Monitors and `curl -I` send it.
                route_scope = {**scope, "method": "GET"} if context.method == "HEAD" else scope
                await self._app(route_scope, _BodyReader(receive, self._settings), send_with_headers)
            except ClientDisconnect:
                pass
            except Exception as error:
                if context.status != CLIENT_CLOSED_REQUEST:  # the answer is on its way; the server breaks it off
                    raise
                await _error_response(error, scope, context)(scope, receive, send_with_headers)
            finally:
                seconds = time.monotonic() - started_at
                self._recorder.count(context.route, context.status, seconds)
                self._recorder.log(context, span, seconds)

    def _add_headers(self, headers: list[tuple[bytes, bytes]], context: RequestContext) -> list[tuple[bytes, bytes]]:
        route_headers = dict(headers)
        return [
            *headers,
            *(pair for pair in self._security_headers if pair[0] not in route_headers),
            # A client without a key learns no model's name and version.
            *(self._version_headers if context.is_authenticated else ()),
            (b"x-request-id", context.id.encode()),
        ]

    async def _check_request(self, scope: Scope, context: RequestContext) -> None:
        if context.rejection is not None:
            raise context.rejection
        settings, headers = self._settings, scope["headers"]
        size = len(scope["path"]) + len(scope.get("query_string", b""))
        # One walk: this is done for every request.
        checked_headers: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            size += len(name) + len(value)
            if name in CHECKED_HEADERS:
                checked_headers.setdefault(name, []).append(value)
        if size > settings.max_header_bytes or len(headers) > MAX_HEADERS:
            limits = f"{settings.max_header_bytes} bytes and {MAX_HEADERS} headers"
            raise _close_connection_after(
                RequestError(431, f"the address and the headers are too large; send at most {limits}")
            )
        if not all(map(self._allows_host, checked_headers.get(b"host", ()))):
            raise _close_connection_after(
                RequestError(421, "the header Host names another host; allow it in serve.allowed_hosts")
            )
        # Chunked bodies declare no length, and a declared one may be false: `_BodyReader` counts.
        if any(_exceeds(value, settings.max_body_bytes) for value in checked_headers.get(b"content-length", ())):
            raise _body_too_large(settings)
        if self._authenticator and (
            required_scope := api_keys.required_scope(_full_route_path(scope), scope["method"])
        ):
            try:
                context.key = await self._authenticator.authorize(
                    required_scope, checked_headers.get(b"authorization", ()), self._model
                )
            except RequestError as error:
                # Otherwise the server would drain an endless chunked body.
                raise _close_connection_after(error) if b"transfer-encoding" in checked_headers else error from None
            context.is_authenticated = True
        if any(value.lower() != b"identity" for value in checked_headers.get(b"content-encoding", ())):
            raise _close_connection_after(RequestError(415, "the body is compressed; send it as it is"))


class _BodyReader:
    """`receive` whose first message is the whole body, or the client's leaving."""

    def __init__(self, receive: Receive, settings: ServeConfig):
        self._receive, self._settings = receive, settings
        self._deadline = asyncio.get_running_loop().time() + settings.request_timeout_s
        self._is_read = False

    async def __call__(self) -> Message:
        if self._is_read:
            return await self._receive()
        self._is_read = True
        body = bytearray()
        try:
            async with asyncio.timeout_at(self._deadline):
                while (message := await self._receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > self._settings.max_body_bytes:
                        raise _body_too_large(self._settings)
                    if not message.get("more_body", False):
                        return {"type": "http.request", "body": bytes(body), "more_body": False}
        except TimeoutError:
            # Never 5xx: the canary is judged by 5xx, and this request has not reached it.
            raise _close_connection_after(
                RequestError(408, "the deadline passed before the body had arrived")
            ) from None
        return message


def _error_response(error: Exception, scope: Scope, context: RequestContext) -> Response:
    """An error in the form of the path; any error other than `RequestError` has status 500."""
    if not isinstance(error, RequestError):
        logger.error(
            "unexpected error in %s %r (request %s)", context.method, scope["path"], context.id, exc_info=error
        )
        error = RequestError(500, "internal error; the server's log has the cause")
    document = json.dumps(error.to_document(route_path(scope)), ensure_ascii=False, separators=(",", ":"))
    # A path may contain bytes that are not UTF-8.
    body = document.encode(errors="backslashreplace")
    return Response(body, error.status, error.headers, media_type="application/json")


def _body_too_large(settings: ServeConfig) -> RequestError:
    return _close_connection_after(RequestError(413, f"the body has more than {settings.max_body_bytes} bytes"))


def _close_connection_after(error: RequestError) -> RequestError:
    """Close the connection after this error, so the rest of the request is not read."""
    error.headers["connection"] = "close"
    return error


def _exceeds(digits: bytes, limit: int) -> bool:
    """Whether it is a number above `limit`, without parsing numbers of thousands of digits."""
    significant = digits.lstrip(b"0")
    return digits.isdigit() and (len(significant) > len(str(limit)) or int(significant or b"0") > limit)


def route_path(scope: Scope) -> str:
    """Path without the mount point, as the router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _full_route_path(scope: Scope) -> str:
    """The path with /models/NAME, also inside the mounted app, where it is in root_path."""
    root: str = scope.get("root_path", "")
    mount = root.find(api_keys.MOUNT)
    return route_path(scope) if mount < 0 else f"{root[mount:]}{route_path(scope)}"


def make_authenticator(settings: ServeConfig) -> api_keys.Authenticator | None:
    """None without `serve.keys`. Raises `UserError` for an invalid key file."""
    if settings.keys is None:
        return None
    return api_keys.Authenticator(api_keys.KeyStore(Path(settings.keys)), api_keys.RateLimiter())


def version_headers(predictor: Predictor) -> dict[str, str]:
    """Reply headers with the model's name and the versions of its parts."""
    revisions = {f"x-{part}-version": digest for part, digest in predictor.revisions.items()}
    return {"x-model-name": quote(predictor.artifact.name), **revisions}


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
