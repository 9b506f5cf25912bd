"""The HTTP server of a replica behind HAProxy: it asks the application itself.

On Ray Serve's own way through a replica a request gets two numbers, a route, two tasks and three metrics, and its
messages go from one event loop to another and back; that costs more than a small model does. What of it is needed is
done here: requests are counted, since Ray waits for them before it ends a replica; beyond a number of them they are
refused; and one whose client has gone is cancelled, so that the engine does not work for nobody.
"""

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rtrain import ray_internals
from rtrain.ray_internals import ReplicaServer
from serve.auth import middleware
from serve.ingress import http_protocol
from serve.ingress.address import listening
from serve.ingress.haproxy import MOST_LOOKS
from serve.request_context import HAS_LEFT
from serve.schemas.predict import RequestError

PROXY_PATH = "/-/healthz"
"""The path by which HAProxy asks Ray Serve whether the replica is well."""
HEALTH = ("/v2/health/live", "/v2/health/ready")
"""Who asks this is always answered: one that is busy is not to be taken for dead, and is not started anew for it."""
LOOK_S = 0.05
"""Seconds after which a request without an answer is asked whether its client is still there. A watch from the start
would cost each request a task."""


def install(application: ASGIApp, most: int) -> None:
    """Have this process, a replica whose constructor runs, answer by the application; no more than `most` questions at
    a time. Nothing changes where Ray Serve runs the deployment on another event loop than its server."""
    own = asyncio.get_running_loop()

    async def start(given: ReplicaServer) -> tuple[Any, Any] | None:
        return await start_server(given, Direct(application, given, most)) if given.loop is own else None

    ray_internals.replace_replica_server(start)


async def start_server(given: ReplicaServer, application: ASGIApp) -> tuple[Any, Any]:
    options = given.options
    config = uvicorn.Config(
        application,
        http=http_protocol.Protocol,
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
        bound = listening(options.host, options.port)
    except OSError as error:  # Ray tries another port
        raise RuntimeError(f"cannot listen on {options.host}, port {options.port}") from error
    return given.loop.create_task(server.serve(sockets=[bound])), server


class Direct:
    def __init__(self, application: ASGIApp, given: ReplicaServer, most: int):
        self._application, self._usual, self._track = application, given.application, given.track
        self._now, self._most = 0, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == PROXY_PATH:
            await self._usual(scope, receive, send)
            return
        most = self._most if scope["method"] == "POST" else MOST_LOOKS * self._most
        if self._now >= most and not scope["path"].endswith(HEALTH):
            # The application says so, which counts and numbers its answers. It reads nothing of the request for that.
            error = RequestError(503, f"{self._now} requests are being answered", retry_after=1)
            scope.setdefault("state", {})[middleware.REFUSED] = error
            await self._application(scope, receive, send)
            return
        client = _Client(receive)
        scope.setdefault("state", {})[HAS_LEFT] = client.has_left
        self._now += 1
        self._track(1)
        try:
            await self._application(scope, client.receive, send)
        except asyncio.CancelledError:
            if not client.gone:
                raise
        finally:
            client.forget()
            self._now -= 1
            self._track(-1)


class _Client:
    """`receive` of a request that is cancelled when its client leaves after having sent its body."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self.gone = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False) and self._timer is None:
            asked = asyncio.current_task()
            assert asked is not None
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look, asked)
        return message

    def has_left(self) -> bool:
        """By what the server has been told so far; a watch may not have had its turn since."""
        if not self.gone:
            step: Any = self._receive()
            try:
                step.send(None)  # as far as it comes without waiting
            except StopIteration as found:
                self.gone = found.value["type"] == "http.disconnect"
            else:
                step.close()
        return self.gone

    def forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _look(self, asked: "asyncio.Task[Any]") -> None:
        self._watch = asyncio.get_running_loop().create_task(self._until_gone(asked))

    async def _until_gone(self, asked: "asyncio.Task[Any]") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        asked.cancel()
