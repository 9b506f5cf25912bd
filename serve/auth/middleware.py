"""What stands before the application: keys, and limits on all that a client sends. Plain ASGI, for any server.

Of a request: size of its head -> its host -> declared length -> key, scope, rate (`keys`) -> the body, read whole under
its limits when the application first asks for it. Whatever is refused is answered here, in the error form that every
route shares. How deep a document is nested and how many values it has is told before it is parsed
(`schema.shape`).
"""

import asyncio
import functools
import json
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rtrain.config import Serve
from serve.auth import api_keys, preflight
from serve.ingress import haproxy
from serve.schemas.predict import RequestError

MOST_HEADERS = 100
READ = (b"authorization", b"content-encoding", b"content-length", b"host", b"transfer-encoding")
"""The headers that are looked at here."""
REFUSED = "refused"
"""In a request's state: the `RequestError` with which the server has it refused before anything of it is looked at."""
Pairs = list[tuple[bytes, bytes]]
"""Headers, as ASGI has them."""


def door(settings: Serve) -> api_keys.Door | None:
    """What asks for keys; None where there is no file of them. Raises `UserError` for a file that is no good."""
    if settings.keys is None:
        return None
    return api_keys.Door(api_keys.Keys(Path(settings.keys)), api_keys.Rates())


def security_headers(settings: Serve) -> Pairs:
    """What `hardened` adds to each answer."""
    added = haproxy.security_headers(settings.tls_cert is not None)
    return [(name.encode(), value.encode()) for name, value in added.items()]


def hardened(headers: Pairs, added: Pairs) -> Pairs:
    """The headers of an answer, and those of `added` of which it has none of its own."""
    own = dict(headers)
    return [*headers, *(pair for pair in added if pair[0] not in own)]


def answer(error: RequestError, path: str) -> Response:
    """The error form of the path."""
    # A path may hold what is no UTF-8.
    body = json.dumps(error.document(path), ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
    return Response(body, error.status, error.headers, media_type="application/json")


class Guard:
    """The application behind it sees requests of known keys alone, and bodies within the limits. Of `request.state`,
    `key` is the key's name, or None where keys are not asked for; `models` those that it is limited to; `known` whether
    there is a key, or none is asked for."""

    def __init__(self, app: ASGIApp, settings: Serve, door: api_keys.Door | None, model: str | None = None):
        """`model`: the name of the one that answers behind it; None where what answers is no model."""
        self._app, self._settings, self._door, self._model = app, settings, door, model
        self._allows_host = functools.lru_cache(lambda value: preflight.allows_host(settings, value.decode("latin-1")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no route is one
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._check(scope)
            await self._app(scope, _Body(receive, self._settings), send)
        except RequestError as error:
            await answer(error, route(scope))(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        settings, headers = self._settings, scope["headers"]
        # A dict of this request alone: the server's own is one for all.
        state = {**scope.get("state", {}), "known": self._door is None, "key": None, "models": None}
        scope["state"] = state
        if (refused := state.get(REFUSED)) is not None:
            raise refused
        size = len(scope["path"]) + len(scope.get("query_string", b""))
        # One walk: this is done for every request.
        sent: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            size += len(name) + len(value)
            if name in READ:
                sent.setdefault(name, []).append(value)
        if size > settings.max_header_bytes or len(headers) > MOST_HEADERS:
            most = f"{settings.max_header_bytes} bytes and {MOST_HEADERS} headers"
            raise _last(RequestError(431, f"the address and the headers are too large; send at most {most}"))
        if not all(map(self._allows_host, sent.get(b"host", ()))):
            raise _last(RequestError(421, "the header Host names another host; allow it in serve.allowed_hosts"))
        # Chunked bodies declare no length, and a declared one may be false: `_Body` counts.
        if any(_is_more(value, settings.max_body_bytes) for value in sent.get(b"content-length", ())):
            raise _too_large(settings)
        key = None
        if self._door and (wanted := api_keys.scope_of(_address(scope), scope["method"])):
            try:
                key = await self._door.admit(wanted, sent.get(b"authorization", ()), self._model)
            except RequestError as error:  # a body without an end would be read and thrown away without an end
                raise _last(error) if b"transfer-encoding" in sent else error from None
        state |= {"known": self._door is None or key is not None, "key": key and key.name, "models": key and key.models}
        if any(value.lower() != b"identity" for value in sent.get(b"content-encoding", ())):
            raise _last(RequestError(415, "the body is compressed; send it as it is"))


class _Body:
    """`receive` whose first message is the whole body, or the client's leaving."""

    def __init__(self, receive: Receive, settings: Serve):
        self._receive, self._settings = receive, settings
        self._deadline = asyncio.get_running_loop().time() + settings.deadline_s
        self._read = False

    async def __call__(self) -> Message:
        if self._read:
            return await self._receive()
        self._read = True
        body = bytearray()
        while True:
            message = await self._next()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._settings.max_body_bytes:
                raise _too_large(self._settings)
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            # Never 5xx, by which a version on trial is judged: it has not been asked yet.
            raise _last(RequestError(408, "the deadline passed before the body had arrived")) from None


def _too_large(settings: Serve) -> RequestError:
    return _last(RequestError(413, f"the body has more than {settings.max_body_bytes} bytes"))


def _last(error: RequestError) -> RequestError:
    """The connection's last answer: what the client still sends is not read."""
    error.headers["connection"] = "close"
    return error


def _is_more(digits: bytes, most: int) -> bool:
    """Whether it is a number, and more than `most`; one of thousands of digits is never made one."""
    significant = digits.lstrip(b"0")
    return digits.isdigit() and (len(significant) > len(str(most)) or int(significant or b"0") > most)


def route(scope: Scope) -> str:
    """The path as the router sees it, behind what the application is mounted at."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _address(scope: Scope) -> str:
    """The path with the model's name where the path has one, also where the model's application answers."""
    root: str = scope.get("root_path", "")
    mount = root.find(api_keys.MOUNT)
    return route(scope) if mount < 0 else f"{root[mount:]}{route(scope)}"
