"""Context of every request: request id, version headers, metrics, access log, trace, and the last error handler.

It reads no bodies. Metrics, log lines and traces never contain texts.
"""

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
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rtrain.config import ServeConfig
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor
from serve import middleware
from serve.auth.preflight import STDERR
from serve.observability.tracing import RequestSpan, Tracer
from serve.schemas.predict import RequestError

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status in the metrics (nginx's) of a request whose client left before the answer."""
REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._-]{1,128}")
"""Valid values of x-request-id from a client; any other value is replaced by a generated id."""
CLIENT_DISCONNECTED = "is_disconnected"
"""The key of `scope["state"]` that says, where the server knows, whether the client has left."""
READ_HEADERS = (b"traceparent", b"tracestate", b"x-request-id")


@dataclass
class RequestStats:
    """Counters of a request, in `scope["state"]["request_stats"]`."""

    id: str
    texts: int = 0
    tokens: int = 0
    truncated_inputs: int = 0
    """Texts that were longer than the model reads."""
    is_disconnected: Callable[[], bool] = lambda: False
    """Whether the client is known to have left."""


class _ReopeningFileHandler(logging.handlers.WatchedFileHandler):
    def handleError(self, request_stats: logging.LogRecord) -> None:
        """Raise the current exception: logging would print a traceback for each line."""
        raise  # it is called where one was caught


class AccessLog:
    """A line of JSON for each request, where `serve.access_log` names a file. No text of a request is ever in it."""

    def __init__(self, path: str | None):
        """`path`: a file, which is opened anew when another program has moved it away; `STDERR`; None for no log."""
        self._logger: logging.Logger | None = None
        self._failed = False
        if path is None:
            return
        handler = (
            logging.StreamHandler(sys.stderr)
            if path == STDERR
            else _ReopeningFileHandler(path, encoding="utf-8", delay=True)
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
        # It belongs to no hierarchy: a program's settings of logging must not send it elsewhere.
        self._logger = logging.Logger("rtrain.access")
        self._logger.addHandler(handler)

    @property
    def is_enabled(self) -> bool:
        return self._logger is not None

    def write(self, **fields: Any) -> None:
        if self._logger is not None:
            now = time.time()
            timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
            try:
                self._logger.info("%s", json.dumps({"time": timestamp, **fields}, ensure_ascii=True))
            except OSError as error:  # its folder is gone, or its disk full: requests are answered all the same
                if not self._failed:
                    sys.stderr.write(f"rtrain: the access log cannot be written: {error}\n")
                self._failed = True
            else:
                self._failed = False

    def close(self) -> None:
        for handler in self._logger.handlers if self._logger else ():
            handler.close()


class RequestContextMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        predictor: Predictor | None,
        settings: ServeConfig,
        on_response: Callable[[str, int, float], None],
        tracer: Tracer,
        access_log: AccessLog,
    ):
        """`on_response` receives route, status and seconds of each request. `predictor`: None for an application of
        several models."""
        self._app, self._on_response, self._tracer, self._access_log = app, on_response, tracer, access_log
        self._security_headers, self._requires_keys = middleware.security_headers(settings), settings.keys is not None
        # Not random for each: the system's call for that lets the engine's thread in, and waits until it has done.
        self._process_prefix, self._request_counter = secrets.token_hex(10), itertools.count()
        names, self._model_fields = {}, {}
        if predictor is not None:
            names, self._model_fields = version_headers(predictor), model_log_fields(predictor.artifact)
        self._version_headers = [(name.encode(), value.encode()) for name, value in names.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at, status = time.monotonic(), CLIENT_CLOSED_REQUEST
        request_headers = {name: value for name, value in scope["headers"] if name in READ_HEADERS}
        client_request_id = request_headers.get(b"x-request-id", b"")
        request_stats = RequestStats(
            client_request_id.decode()
            if REQUEST_ID_PATTERN.fullmatch(client_request_id)
            else f"{self._process_prefix}{next(self._request_counter):012x}"
        )
        state = scope.setdefault("state", {})
        state["request_stats"] = request_stats
        request_stats.is_disconnected = state.get(CLIENT_DISCONNECTED, request_stats.is_disconnected)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = middleware.add_missing_headers(message["headers"], self._security_headers)
                # Whoever has no key learns no model's name and version.
                is_authenticated = scope.get("state", {}).get("is_authenticated", not self._requires_keys)
                headers += [
                    *(self._version_headers if is_authenticated else ()),
                    (b"x-request-id", request_stats.id.encode()),
                ]
                message = {**message, "headers": headers}
            await send(message)

        with self._tracer.request_span(request_headers) as span:
            try:
                await self._app(scope, receive, send_with_headers)
            except ClientDisconnect:
                pass
            except Exception:
                if status != CLIENT_CLOSED_REQUEST:  # the answer is on its way; only the server can still break it off
                    raise
                logger.exception(
                    "unexpected error in %s %r (request %s)", scope["method"], scope["path"], request_stats.id
                )
                error = RequestError(500, "internal error; the server's log has the cause")
                await middleware.error_response(error, middleware.route_path(scope))(scope, receive, send_with_headers)
            finally:
                self._count_response(scope, request_stats, span, status, time.monotonic() - started_at)

    def _count_response(
        self, scope: Scope, request_stats: RequestStats, span: RequestSpan, status: int, seconds: float
    ) -> None:
        """Count by the route's template, never by the path, which may hold anything."""
        route = getattr(scope.get("route"), "path", "other")
        self._on_response(route, status, seconds)
        if span.trace_id is None and not self._access_log.is_enabled:
            return
        log_request(
            request_stats,
            client_name(scope),
            scope["method"],
            route,
            status,
            seconds,
            span,
            self._access_log,
            self._model_fields,
        )


def log_request(
    request_stats: RequestStats,
    client: str,
    method: str,
    route: str,
    status: int,
    seconds: float,
    span: RequestSpan,
    access_log: AccessLog,
    model_fields: Mapping[str, str],
) -> None:
    """The span, and the line of the log, of a request that has ended."""
    counts: Mapping[str, str | int] = {
        "inputs": request_stats.texts,
        "tokens": request_stats.tokens,
        "truncated_inputs": request_stats.truncated_inputs,
    }
    span.end(
        f"{method} {route}",
        {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "rtrain.request_id": request_stats.id,
            **{f"rtrain.{name}": value for name, value in counts.items()},
        },
    )
    access_log.write(
        id=request_stats.id,
        client=client,
        method=method,
        route=route,
        status=status,
        ms=round(1000 * seconds, 3),
        **counts,
        **model_fields,
        **({"trace_id": span.trace_id} if span.trace_id else {}),
    )


def version_headers(predictor: "Predictor") -> dict[str, str]:
    """Reply headers with the model's name and the versions of its parts."""
    revisions = {f"x-{part}-version": digest for part, digest in predictor.revisions.items()}
    return {"x-model-name": quote(predictor.artifact.name), **revisions}


def model_log_fields(artifact: Artifact) -> dict[str, str]:
    """As the log names it."""
    return {"model": artifact.name, "version": artifact.version}


def client_name(scope: Scope) -> str:
    """Who asks, by the name of the key (`guard`); empty where nobody is asked for one."""
    return scope.get("state", {}).get("key_name") or ""
