"""What every request is wrapped in: its number, the model's name on its answer, metrics, log line, span, last resort.

Nothing here reads a body, and nothing that is counted, logged or traced has a text in it.
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

from rtrain.config import Serve
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor
from serve.auth import middleware
from serve.auth.preflight import STDERR
from serve.observability.tracing import Span, Spans
from serve.schemas.predict import RequestError

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status in the metrics (nginx's) of a request whose client left before the answer."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
"""What a client may send as x-request-id; in place of anything else it gets one of ours."""
HAS_LEFT = "has_left"
"""The key of `scope["state"]` that says, where the server knows, whether the client has left."""
HEADERS = (b"traceparent", b"tracestate", b"x-request-id")


@dataclass
class Record:
    """What is counted of a request on its way; its place is `scope["state"]["record"]`."""

    id: str
    texts: int = 0
    tokens: int = 0
    cut: int = 0
    """Texts that were longer than the model reads."""
    has_left: Callable[[], bool] = lambda: False
    """Whether the client is known to have left."""


class _File(logging.handlers.WatchedFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Raise what has happened: logging would print a traceback for each line."""
        raise  # it is called where one was caught


class AccessLog:
    """A line of JSON for each request, where `serve.access_log` names a file. No text of a request is ever in it."""

    def __init__(self, path: str | None):
        """`path`: a file, which is opened anew when another program has moved it away; `STDERR`; None for no log."""
        self._logger: logging.Logger | None = None
        self._failed = False
        if path is None:
            return
        handler = logging.StreamHandler(sys.stderr) if path == STDERR else _File(path, encoding="utf-8", delay=True)
        handler.setFormatter(logging.Formatter("%(message)s"))
        # It belongs to no hierarchy: a program's settings of logging must not send it elsewhere.
        self._logger = logging.Logger("rtrain.access")
        self._logger.addHandler(handler)

    @property
    def kept(self) -> bool:
        return self._logger is not None

    def write(self, **fields: Any) -> None:
        if self._logger is not None:
            made = time.time()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(made)) + f".{int(made * 1000) % 1000:03d}Z"
            try:
                self._logger.info("%s", json.dumps({"time": stamp, **fields}, ensure_ascii=True))
            except OSError as error:  # its folder is gone, or its disk full: requests are answered all the same
                if not self._failed:
                    sys.stderr.write(f"rtrain: the access log cannot be written: {error}\n")
                self._failed = True
            else:
                self._failed = False

    def close(self) -> None:
        for handler in self._logger.handlers if self._logger else ():
            handler.close()


class Envelope:
    def __init__(
        self,
        app: ASGIApp,
        predictor: Predictor | None,
        settings: Serve,
        answered: Callable[[str, int, float], None],
        spans: Spans,
        access_log: AccessLog,
    ):
        """`answered` is told the route, the status and the seconds of each request. `predictor`: None where what
        answers is no model."""
        self._app, self._answered, self._spans, self._log = app, answered, spans, access_log
        self._security, self._asks_for_keys = middleware.security_headers(settings), settings.keys is not None
        # Not random for each: the system's call for that lets the engine's thread in, and waits until it has done.
        self._process, self._numbers = secrets.token_hex(10), itertools.count()
        names, self._model = {}, {}
        if predictor is not None:
            names, self._model = parts_of(predictor), model_of(predictor.artifact)
        self._headers = [(name.encode(), value.encode()) for name, value in names.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_GONE
        given = {name: value for name, value in scope["headers"] if name in HEADERS}
        asked = given.get(b"x-request-id", b"")
        record = Record(asked.decode() if REQUEST_ID.fullmatch(asked) else f"{self._process}{next(self._numbers):012x}")
        state = scope.setdefault("state", {})
        state["record"] = record
        record.has_left = state.get(HAS_LEFT, record.has_left)

        async def send_enveloped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = middleware.hardened(message["headers"], self._security)
                # Whoever has no key learns no model's name and version.
                known = scope.get("state", {}).get("known", not self._asks_for_keys)
                headers += [*(self._headers if known else ()), (b"x-request-id", record.id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        with self._spans.request(given) as span:
            try:
                await self._app(scope, receive, send_enveloped)
            except ClientDisconnect:
                pass
            except Exception:
                if status != CLIENT_GONE:  # the answer is on its way; only the server can still break it off
                    raise
                logger.exception("unexpected error in %s %r (request %s)", scope["method"], scope["path"], record.id)
                error = RequestError(500, "internal error; the server's log has the cause")
                await middleware.answer(error, middleware.route(scope))(scope, receive, send_enveloped)
            finally:
                self._count(scope, record, span, status, time.monotonic() - began)

    def _count(self, scope: Scope, record: Record, span: Span, status: int, seconds: float) -> None:
        """Count by the route's template, never by the path, which may hold anything."""
        route = getattr(scope.get("route"), "path", "other")
        self._answered(route, status, seconds)
        if span.trace is None and not self._log.kept:
            return
        tell(record, client_of(scope), scope["method"], route, status, seconds, span, self._log, self._model)


def tell(
    record: Record,
    client: str,
    method: str,
    route: str,
    status: int,
    seconds: float,
    span: Span,
    log: AccessLog,
    model: Mapping[str, str],
) -> None:
    """The span, and the line of the log, of a request that has ended."""
    made: Mapping[str, str | int] = {"texts": record.texts, "tokens": record.tokens, "cut": record.cut}
    span.end(
        f"{method} {route}",
        {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "rtrain.request_id": record.id,
            **{f"rtrain.{name}": value for name, value in made.items()},
        },
    )
    log.write(
        id=record.id,
        client=client,
        method=method,
        route=route,
        status=status,
        ms=round(1000 * seconds, 3),
        **made,
        **model,
        **({"trace": span.trace} if span.trace else {}),
    )


def parts_of(predictor: "Predictor") -> dict[str, str]:
    """Headers by which a reply tells the model, and the versions of its parts."""
    revisions = {f"x-{part}-version": digest for part, digest in predictor.revisions.items()}
    return {"x-model-name": quote(predictor.artifact.name), **revisions}


def model_of(made: Artifact) -> dict[str, str]:
    """As the log names it."""
    return {"model": made.name, "version": made.version}


def client_of(scope: Scope) -> str:
    """Who asks, by the name of the key (`guard`); empty where nobody is asked for one."""
    return scope.get("state", {}).get("key") or ""
