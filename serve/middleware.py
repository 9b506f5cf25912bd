"""Authentication and request limits in front of the application. Plain ASGI, for any server.

Order of the checks: size of the head -> Host -> declared length -> key, scope, rate (`api_keys`) -> body, read whole
under its limits when the application first asks for it. Rejections have the error form that every route shares. Nesting
depth and number of values are checked before JSON is parsed (`predict.measure_json`).
"""

import asyncio
import functools
import json
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rtrain.config import ServeConfig
from serve.auth import api_keys, preflight
from serve.ingress import haproxy
from serve.schemas.predict import RequestError

MAX_HEADERS = 100
CHECKED_HEADERS = (b"authorization", b"content-encoding", b"content-length", b"host", b"transfer-encoding")
"""The headers that are looked at here."""
REJECTION = "rejection"
"""Key of `scope["state"]` with the `RequestError` of a request that the server rejects unread."""
HeaderPairs = list[tuple[bytes, bytes]]
"""Headers, as ASGI has them."""


def make_authenticator(settings: ServeConfig) -> api_keys.Authenticator | None:
    """What asks for keys; None where there is no file of them. Raises `UserError` for a file that is no good."""
    if settings.keys is None:
        return None
    return api_keys.Authenticator(api_keys.KeyStore(Path(settings.keys)), api_keys.RateLimiter())


def security_headers(settings: ServeConfig) -> HeaderPairs:
    """What `add_missing_headers` adds to each answer."""
    headers = haproxy.security_headers(settings.tls_cert is not None)
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def add_missing_headers(headers: HeaderPairs, defaults: HeaderPairs) -> HeaderPairs:
    """`headers`, plus the `defaults` whose names are missing in it."""
    existing = dict(headers)
    return [*headers, *(pair for pair in defaults if pair[0] not in existing)]


def error_response(error: RequestError, path: str) -> Response:
    """The error form of the path."""
    # A path may contain bytes that are not UTF-8.
    body = json.dumps(error.to_document(path), ensure_ascii=False, separators=(",", ":")).encode(
        errors="backslashreplace"
    )
    return Response(body, error.status, error.headers, media_type="application/json")


class AuthLimitsMiddleware:
    """Pass on authorized requests whose bodies are within the limits.

    It sets three keys of `scope["state"]`: `is_authenticated`: the request has a valid key, or the endpoint requires
    none; `key_name`: the key's name, or None; `allowed_models`: the models of the key, or None for all.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeConfig,
        authenticator: api_keys.Authenticator | None,
        model: str | None = None,
    ):
        """`model`: name of the only model behind it; None for an application of several models."""
        self._app, self._settings, self._authenticator, self._model = app, settings, authenticator, model
        self._allows_host = functools.lru_cache(lambda value: preflight.allows_host(settings, value.decode("latin-1")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no route is one
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._check_request(scope)
            await self._app(scope, _BodyReader(receive, self._settings), send)
        except RequestError as error:
            await error_response(error, route_path(scope))(scope, receive, send)

    async def _check_request(self, scope: Scope) -> None:
        settings, headers = self._settings, scope["headers"]
        # A dict of this request alone: the server's own is one for all.
        state = {
            **scope.get("state", {}),
            "is_authenticated": self._authenticator is None,
            "key_name": None,
            "allowed_models": None,
        }
        scope["state"] = state
        if (rejection := state.get(REJECTION)) is not None:
            raise rejection
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
        key = None
        if self._authenticator and (
            required_scope := api_keys.required_scope(_full_route_path(scope), scope["method"])
        ):
            try:
                key = await self._authenticator.authorize(
                    required_scope, checked_headers.get(b"authorization", ()), self._model
                )
            except RequestError as error:  # a body without an end would be read and thrown away without an end
                raise _close_connection_after(error) if b"transfer-encoding" in checked_headers else error from None
        state |= {
            "is_authenticated": self._authenticator is None or key is not None,
            "key_name": key and key.name,
            "allowed_models": key and key.models,
        }
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
        while True:
            message = await self._receive_in_time()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._settings.max_body_bytes:
                raise _body_too_large(self._settings)
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            # Never 5xx: the canary is judged by 5xx, and this request has not reached it.
            raise _close_connection_after(
                RequestError(408, "the deadline passed before the body had arrived")
            ) from None


def _body_too_large(settings: ServeConfig) -> RequestError:
    return _close_connection_after(RequestError(413, f"the body has more than {settings.max_body_bytes} bytes"))


def _close_connection_after(error: RequestError) -> RequestError:
    """Close the connection after this error, so the rest of the request is not read."""
    error.headers["connection"] = "close"
    return error


def _exceeds(digits: bytes, limit: int) -> bool:
    """Whether it is a number, and more than `limit`; one of thousands of digits is never made one."""
    significant = digits.lstrip(b"0")
    return digits.isdigit() and (len(significant) > len(str(limit)) or int(significant or b"0") > limit)


def route_path(scope: Scope) -> str:
    """Path without the mount point, as the router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _full_route_path(scope: Scope) -> str:
    """The path with the model's name where the path has one, also where the model's application answers."""
    root: str = scope.get("root_path", "")
    mount = root.find(api_keys.MOUNT)
    return route_path(scope) if mount < 0 else f"{root[mount:]}{route_path(scope)}"
