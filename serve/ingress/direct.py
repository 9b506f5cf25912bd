"""HTTP server of a replica behind HAProxy: it calls the application directly.

Ray Serve's own path through a replica gives a request two ids, a route, two tasks and three metrics, and moves its
messages between two event loops; that costs more than a small model. This module does the necessary part: it counts
requests, since Ray waits for them before it stops a replica; it rejects requests above the limit; and it cancels
requests of disconnected clients, to save engine time.
"""

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rtrain import ray_internals
from rtrain.ray_internals import ReplicaServer
from serve import middleware
from serve.ingress import http_protocol
from serve.ingress.address import open_listener
from serve.ingress.haproxy import READ_REQUEST_FACTOR
from serve.request_context import CLIENT_DISCONNECTED
from serve.schemas.predict import RequestError

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
        http=http_protocol.HttpProtocol,
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
        self._application, self._default_app, self._track_request = (
            application,
            replica_server.application,
            replica_server.track_request,
        )
        self._active_requests, self._max_requests = 0, max_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == PROXY_HEALTH_PATH:
            await self._default_app(scope, receive, send)
            return
        max_requests = self._max_requests if scope["method"] == "POST" else READ_REQUEST_FACTOR * self._max_requests
        if self._active_requests >= max_requests and not scope["path"].endswith(HEALTH_PATHS):
            # The application says so, which counts and numbers its answers. It reads nothing of the request for that.
            error = RequestError(503, f"{self._active_requests} requests are being answered", retry_after=1)
            scope.setdefault("state", {})[middleware.REJECTION] = error
            await self._application(scope, receive, send)
            return
        client = _ClientConnection(receive)
        scope.setdefault("state", {})[CLIENT_DISCONNECTED] = client.is_disconnected
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
