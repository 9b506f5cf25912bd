"""HTTP server of a replica behind HAProxy: it calls the application directly.

Ray Serve's own path through a replica gives a request two ids, a route, two tasks and three metrics, and moves its
messages between two event loops; that costs more than a small model. This module does the necessary part: it counts
requests, since Ray waits for them before it stops a replica; it rejects requests above the limit; and it cancels
requests of disconnected clients, to save engine time.
"""

import asyncio
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rtrain import ray_internals
from rtrain.ray_internals import ReplicaServer
from serve.ingress.address import open_listener
from serve.ingress.haproxy import READ_REQUEST_FACTOR
from serve.middleware import CONTEXT, RequestContext
from serve.schemas.predict import RequestError

RESPONSE_PREFIX, CONTINUE_PREFIX = b"HTTP/1.1 ", b"HTTP/1.1 100"
MAX_HEAD_BYTES = 1 << 18
"""Largest request line and headers, in bytes; one read of the socket may exceed it. `serve.middleware` limits
bodies."""
HEAD_TOO_LARGE_RESPONSE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
INVALID_REQUEST_MESSAGE = "Invalid HTTP request received."
PROXY_HEALTH_PATH = "/-/healthz"
"""Path of HAProxy's health check of Ray Serve."""
HEALTH_PATHS = ("/v2/health/live", "/v2/health/ready")
"""Health checks are always answered: a busy replica must not be restarted as dead."""
DISCONNECT_CHECK_DELAY_S = 0.05
"""Seconds after which an unanswered request is checked for a disconnected client. A check from the start would cost
each request a task."""


def install_replica_server(application: ASGIApp, max_requests: int) -> None:
    """Have this process, a replica whose constructor runs, answer by the application; no more than `max_requests`
    questions at a time. Nothing changes where Ray Serve runs the deployment on another event loop than its server."""
    loop = asyncio.get_running_loop()

    async def start(replica_server: ReplicaServer) -> tuple[Any, Any] | None:
        return (
            await start_server(replica_server, DirectIngressApp(application, replica_server, max_requests))
            if replica_server.loop is loop
            else None
        )

    ray_internals.replace_replica_server(start)


async def start_server(replica_server: ReplicaServer, application: ASGIApp) -> tuple[Any, Any]:
    options = replica_server.options
    config = uvicorn.Config(
        application,
        http=HttpProtocol,
        host=options.host,
        port=options.port,
        root_path=options.root_path,
        timeout_keep_alive=options.keep_alive_timeout_s,
        ws="none",
        proxy_headers=False,  # nothing here asks who the client is
        lifespan="off",  # Ray Serve runs the application's
        access_log=False,
        log_level="critical",
        log_config=None,
    )
    server = uvicorn.Server(config)
    try:
        listener = open_listener(options.host, options.port)
    except OSError as error:  # Ray tries another port
        raise RuntimeError(f"cannot listen on {options.host}, port {options.port}") from error
    return replica_server.loop.create_task(server.serve(sockets=[listener])), server


class DirectIngressApp:
    def __init__(self, application: ASGIApp, replica_server: ReplicaServer, max_requests: int):
        self._application = application
        self._default_app = replica_server.application
        self._track_request = replica_server.track_request
        self._active_requests, self._max_requests = 0, max_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == PROXY_HEALTH_PATH:
            await self._default_app(scope, receive, send)
            return
        max_requests = self._max_requests if scope["method"] == "POST" else READ_REQUEST_FACTOR * self._max_requests
        if self._active_requests >= max_requests and not scope["path"].endswith(HEALTH_PATHS):
            # The application says so, which counts and numbers its answers. It reads nothing of the request for that.
            error = RequestError(503, f"{self._active_requests} requests are being answered", retry_after=1)
            scope[CONTEXT] = RequestContext(rejection=error)
            await self._application(scope, receive, send)
            return
        client = _ClientConnection(receive)
        scope[CONTEXT] = RequestContext(is_disconnected=client.is_disconnected)
        self._active_requests += 1
        self._track_request(1)
        try:
            await self._application(scope, client.receive, send)
        except asyncio.CancelledError:
            if not client.has_disconnected:
                raise
        finally:
            client.stop()
            self._active_requests -= 1
            self._track_request(-1)


class _ClientConnection:
    """`receive` of a request that is cancelled when its client leaves after having sent its body."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None
        self._disconnect_task: asyncio.Task[None] | None = None
        self.has_disconnected = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False) and self._timer is None:
            request_task = asyncio.current_task()
            assert request_task is not None
            self._timer = asyncio.get_running_loop().call_later(
                DISCONNECT_CHECK_DELAY_S, self._start_disconnect_task, request_task
            )
        return message

    def is_disconnected(self) -> bool:
        """State by the messages so far; a running check may be due only later."""
        if not self.has_disconnected:
            coroutine: Any = self._receive()
            try:
                coroutine.send(None)  # advances only as far as possible without waiting
            except StopIteration as stopped:
                self.has_disconnected = stopped.value["type"] == "http.disconnect"
            else:
                coroutine.close()
        return self.has_disconnected

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._disconnect_task is not None:
            self._disconnect_task.cancel()

    def _start_disconnect_task(self, request_task: "asyncio.Task[Any]") -> None:
        self._disconnect_task = asyncio.get_running_loop().create_task(self._cancel_on_disconnect(request_task))

    async def _cancel_on_disconnect(self, request_task: "asyncio.Task[Any]") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_disconnected = True
        request_task.cancel()


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with three changes.

    The head of a reply waits for the body, so both leave in one write: a second packet would wake HAProxy twice, and
    HAProxy retries no reply of a killed replica that has begun.

    A request to upgrade is answered as a plain request (RFC 9110, 7.8). The parser assumes that it has no body, and
    would read the body as further requests; HAProxy sees one request, and other clients would get the replies.

    The size of a head is limited: the parser joins the pieces of a long line again for each piece, so a header of 50
    MB, sent without a key, blocks the event loop for ten seconds.
    """

    _head_without_upgrade: bytes
    """The head of a request as if it asked for no other protocol. Empty for CONNECT, which is nothing else."""

    _head_bytes = 0
    """Bytes that were read while a request's head was not whole."""
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_CoalescingTransport(transport, self))

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        size = len(data)
        try:
            while data:
                data = self._feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response(INVALID_REQUEST_MESSAGE)
        self._head_bytes = self._head_bytes + size if self._is_in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(HEAD_TOO_LARGE_RESPONSE)
            self.transport.close()

    def _feed_data(self, data: bytes) -> bytes:
        """Feed data to the parser up to the end of a head that asks for another protocol; returns the rest."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._head_without_upgrade:
                raise httptools.HttpParserInvalidMethodError("CONNECT") from None
            self.parser = httptools.HttpRequestParser(self)  # the old one reads nothing more
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(self._head_without_upgrade)
            return data[upgrade.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            return
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        lines = [b" ".join((method, self.url, b"HTTP/" + version)), *headers, b"", b""]
        self._head_without_upgrade = b"" if method == b"CONNECT" else b"\r\n".join(lines)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()


class _CoalescingTransport(asyncio.Transport):
    """A connection that keeps the head of an answer until the next write, or the end. Questions alone, which are POSTs,
    are answered so: an answer to HEAD has no body for which to wait."""

    def __init__(self, transport: asyncio.Transport, protocol: HttpProtocol):
        super().__init__()
        self._transport, self._protocol, self._buffered_head = transport, protocol, b""

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        if self._buffered_head:
            data, self._buffered_head = self._buffered_head + data, b""
        elif data[:9] == RESPONSE_PREFIX and data[:12] != CONTINUE_PREFIX and self._is_post_response():
            self._buffered_head = bytes(data)
            return
        self._transport.write(data)

    def _is_post_response(self) -> bool:
        cycle = self._protocol.cycle  # None where not even a request's head could be read
        return cycle is not None and not cycle.response_complete and cycle.scope["method"] == "POST"

    def close(self) -> None:
        if self._buffered_head and not self.is_closing():
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
