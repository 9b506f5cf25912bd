"""The server of a replica, over real sockets: forwarding, counting, rejection, cancellation."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest
import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rtrain.config import ServeConfig
from rtrain.core.ragged import EncodedRow
from rtrain.inference.predictor import Predictor
from rtrain.ray_internals import ReplicaServer
from rtrain.tasks.base import Input
from serve import middleware
from serve.app import build_app
from serve.ingress import direct
from serve.ingress.address import find_free_address
from tests.support import serving as model

predictor = model.predictor  # fixture

MAX_REQUESTS = 2


class Application:
    """Answers with the body that it was sent, once it is let go."""

    def __init__(self) -> None:
        self.open, self.entered, self.cancelled = asyncio.Event(), asyncio.Semaphore(0), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (refused := scope["state"].get(middleware.REJECTION)) is not None:
            await middleware.error_response(refused, scope["path"])(scope, receive, send)
            return
        body = (await receive())["body"]
        self.entered.release()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await PlainTextResponse(body)(scope, receive, send)


async def proxy_s(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(f"asked {scope['path']}")(scope, receive, send)


@asynccontextmanager
async def serving(application: ASGIApp, counted: list[int], max_requests: int = MAX_REQUESTS) -> AsyncIterator[int]:
    """The application behind the server; gives its port."""
    port = find_free_address("127.0.0.1", 0).port
    options = SimpleNamespace(host="127.0.0.1", port=port, root_path="", keep_alive_timeout_s=60)
    replica_server = ReplicaServer(proxy_s, counted.append, options, asyncio.get_running_loop())
    task, server = await direct.start_server(
        replica_server, direct.DirectIngressApp(application, replica_server, max_requests)
    )
    try:
        yield port
    finally:
        server.should_exit = True
        await task


async def ask(port: int, path: str = "/predict", body: bytes = b"hello", method: str = "POST") -> tuple[int, str, str]:
    """Status, headers and body of the answer, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    headers, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(headers.split()[1]), headers.lower(), text


def run(check: Callable[[Application, list[int], int], Awaitable[None]], within_s: float = 10) -> None:
    async def main() -> None:
        application, counted = Application(), list[int]()
        async with serving(application, counted) as port:
            await asyncio.wait_for(check(application, counted, port), within_s)
        assert sum(counted) == 0

    asyncio.run(main())


def test_a_request_is_answered_and_counted_as_long_as_it_takes() -> None:
    async def check(application: Application, counted: list[int], port: int) -> None:
        requests = asyncio.create_task(ask(port))
        await application.entered.acquire()
        assert counted == [1]
        application.open.set()
        status, _, text = await requests
        assert (status, text) == (200, "hello")
        assert counted == [1, -1]

    run(check)


def test_the_proxy_s_own_questions_go_to_ray_and_are_not_counted() -> None:
    async def check(application: Application, counted: list[int], port: int) -> None:
        assert (await ask(port, "/-/healthz"))[2] == "asked /-/healthz"
        assert counted == []
        application.open.set()
        assert (await ask(port, "/-/routes"))[2] == "hello", "what Ray would tell without a key"

    run(check)


def test_more_requests_than_the_replica_takes_are_told_to_come_back() -> None:
    async def check(application: Application, counted: list[int], port: int) -> None:
        requests = [asyncio.create_task(ask(port)) for _ in range(MAX_REQUESTS)]
        for _ in requests:
            await application.entered.acquire()
        status, headers, text = await ask(port)
        assert (status, "retry-after: 1" in headers) == (503, True)
        assert '"type":"overloaded"' in text
        application.open.set()
        assert [(await request)[0] for request in requests] == [200] * MAX_REQUESTS
        assert (await ask(port))[0] == 200

    run(check)


def test_what_a_full_replica_refuses_is_counted_and_numbered_as_other_answers_are(predictor: Predictor) -> None:
    app = build_app(predictor, ServeConfig())

    async def main() -> None:
        async with serving(app, [], max_requests=0) as port:
            status, headers, text = await ask(port)
            assert (status, "x-request-id: " in headers, "x-content-type-options: " in headers) == (503, True, True)
            assert '"type":"overloaded"' in text

    asyncio.run(main())
    assert app.state.service.telemetry.totals()["requests"]["503"] == 1


def test_who_looks_is_answered_by_a_replica_that_is_full_of_questions() -> None:
    async def check(application: Application, counted: list[int], port: int) -> None:
        requests = [asyncio.create_task(ask(port)) for _ in range(MAX_REQUESTS)]
        looks = [asyncio.create_task(ask(port, path, method="GET")) for path in ("/metrics", "/")]
        for _ in [*requests, *looks]:
            await application.entered.acquire()
        assert [(await ask(port, path, method=method))[0] for method, path in (("GET", "/info"), ("POST", "/"))] == [
            503,
            503,
        ]
        well = [asyncio.create_task(ask(port, f"{at}/v2/health/ready", method="GET")) for at in ("", "/models/a")]
        for _ in well:
            await application.entered.acquire()
        application.open.set()
        assert [(await request)[0] for request in (*requests, *looks, *well)] == [200] * (
            len(requests) + len(looks) + len(well)
        )

    run(check)


def test_a_request_whose_client_has_gone_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DISCONNECT_CHECK_DELAY_S", 0.01)

    async def check(application: Application, counted: list[int], port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nhi")
        await application.entered.acquire()
        requests = asyncio.create_task(ask(port))  # stays: it is answered, though it waits for longer than the other
        await application.entered.acquire()
        writer.close()
        while not application.cancelled:
            await asyncio.sleep(0.01)
        application.open.set()
        assert (await requests)[0] == 200
        assert application.cancelled == 1
        assert counted.count(-1) == 2

    run(check)


def test_a_thousand_clients_that_leave_leave_no_place_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DISCONNECT_CHECK_DELAY_S", 0.001)

    async def check(application: Application, counted: list[int], port: int) -> None:
        left = 0
        while left < 1000:
            clients = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(MAX_REQUESTS)]
            for writer in clients:
                writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nhi")
            for _ in clients:
                await application.entered.acquire()
            for writer in clients:
                writer.close()
            left += MAX_REQUESTS
            while application.cancelled < left or sum(counted) != 0:
                await asyncio.sleep(0.001)
        application.open.set()
        assert [(await request)[0] for request in [asyncio.create_task(ask(port)) for _ in range(MAX_REQUESTS)]] == [
            200
        ] * MAX_REQUESTS

    run(check, within_s=60)


def answered_client(port: int) -> socket.socket:
    """A connection that the server has accepted, since it has answered on it."""
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    return client


def open_at_both_ends(port: int) -> int:
    """How many connections of a server of this process have not been closed by their clients, as the system knows."""
    connections = [
        connection for connection in psutil.Process().net_connections("tcp") if connection.laddr.port == port
    ]
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)


@pytest.mark.parametrize("look_s", [direct.DISCONNECT_CHECK_DELAY_S, 0.0])
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_texts_of_clients_that_have_left_are_not_tokenised(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    look_s: float,
    predictor: Predictor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred send a text each and leave while the replica is busy; one stays. On a slow machine all of them are
    looked after by a watch, which has not had its turn yet, when they would be tokenised."""
    monkeypatch.setattr(direct, "DISCONNECT_CHECK_DELAY_S", look_s)
    tokenised: list[Input] = []
    encode = predictor.encode

    def noted(texts: Sequence[Input]) -> list[EncodedRow]:
        tokenised.extend(texts)
        return encode(texts)

    monkeypatch.setattr(predictor, "encode", noted)
    app = build_app(predictor, ServeConfig())

    async def check(counted: list[int], port: int) -> None:
        left = b'{"inputs": "it has left"}'
        head = f"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(left)}\r\n\r\n".encode()
        clients = [await asyncio.to_thread(answered_client, port) for _ in range(100)]
        assert (await ask(port, body=b'{"inputs": "hello"}'))[0] == 200
        for client in clients:  # the server's loop waits for this one
            client.sendall(head + left)
            client.close()
        while open_at_both_ends(port):  # a busy machine may hand on the text, and the end some moments later
            time.sleep(0.01)
        assert (await ask(port, body=b'{"inputs": "hello"}'))[0] == 200
        assert tokenised == ["hello"] * 2
        assert app.state.service.batcher.stats.dropped_rows == 100
        assert app.state.service.telemetry.totals()["requests"]["499"] == 100

    async def main() -> None:
        counted = list[int]()
        async with serving(app, counted, max_requests=200) as port:
            await asyncio.wait_for(check(counted, port), 60)
        assert sum(counted) == 0

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
