"""The server of a replica, over real sockets: forwarding, counting, rejection, cancellation."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvicorn
import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from rtrain.config import ServeConfig
from rtrain.core.ragged import EncodedRow
from rtrain.inference.predictor import Predictor
from rtrain.ray_internals import ReplicaServer
from rtrain.tasks.base import Input
from serve.app import build_app
from serve.ingress import direct
from serve.ingress.address import find_free_address, open_listener
from serve.middleware import get_context

MAX_REQUESTS = 2


class Application:
    """Answers with the body that it was sent, once it is let go."""

    def __init__(self) -> None:
        self.open, self.entered, self.cancelled = asyncio.Event(), asyncio.Semaphore(0), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (refused := get_context(scope).rejection) is not None:
            await PlainTextResponse(refused.message, refused.status, refused.headers)(scope, receive, send)
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
        status, headers, _ = await ask(port)
        assert (status, "retry-after: 1" in headers) == (503, True)
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
    assert app.service.telemetry.totals()["requests"]["503"] == 1


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
        assert app.service.batcher.stats.dropped_rows == 100
        assert app.service.telemetry.totals()["requests"]["499"] == 100

    async def main() -> None:
        counted = list[int]()
        async with serving(app, counted, max_requests=200) as port:
            await asyncio.wait_for(check(counted, port), 60)
        assert sum(counted) == 0

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


class Transport(asyncio.Transport):
    """Keeps all written bytes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body that it was sent, in pieces where that has several words."""
    more, body = True, b""
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    sized = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": sized})
    if body == b"fail":
        raise RuntimeError(scope["path"])
    pieces = body.split(b" ")
    for number, piece in enumerate(pieces, 1):
        last = number == len(pieces)
        await send({"type": "http.response.body", "body": piece + b" " * (not last), "more_body": not last})


def send_requests(*requests: bytes) -> Transport:
    """The connection, once these bytes have come over it and were answered."""

    async def main() -> Transport:
        config = uvicorn.Config(application, http=direct.HttpProtocol, ws="none", lifespan="off", log_level="critical")
        config.load()
        transport = Transport()
        protocol = direct.HttpProtocol(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(transport)
        for request in requests:
            protocol.data_received(request)
            for _ in range(4000):  # turns of the loop: more than these answers take
                await asyncio.sleep(0)
        if not transport.closed:
            protocol.shutdown()
        return transport

    return asyncio.run(main())


def request(method: str, body: bytes = b"", *more: str) -> bytes:
    lines = [f"{method} /predict HTTP/1.1", "host: here", f"content-length: {len(body)}", *more, "", ""]
    return "\r\n".join(lines).encode() + body


def test_head_and_body_of_an_answer_leave_in_one_write_on_a_connection_that_is_kept() -> None:
    transport = send_requests(request("POST", b"hello"), request("POST"), request("POST", b"bye"))
    assert len(transport.written) == 3
    for text, body in zip(transport.written, (b"hello", b"", b"bye"), strict=True):
        assert text.startswith(b"HTTP/1.1 200 OK\r\n")
        assert text.partition(b"\r\n\r\n")[2] == body
    assert transport.closed


def test_a_body_in_pieces_begins_with_the_head_and_holds_nothing_back() -> None:
    written = send_requests(request("POST", b"one two three")).written
    assert [text.rpartition(b"\r\n")[2] for text in written] == [b"one ", b"two ", b"three"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_looks_gets_the_head_at_once(method: str) -> None:
    written = send_requests(request(method)).written
    assert written[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert written[0].endswith(b"\r\n\r\n")
    assert b"".join(written[1:]) == b""


def test_a_client_that_asks_first_whether_it_may_send_is_told_at_once() -> None:
    message = request("POST", b"hello", "expect: 100-continue")
    written = send_requests(message[:-5], message[-5:]).written
    assert written[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert written[1].endswith(b"\r\n\r\nhello")
    assert len(written) == 2


def test_an_answer_that_fails_after_its_head_is_cut_as_before() -> None:
    transport = send_requests(request("POST", b"fail"))
    [text] = transport.written
    assert text.startswith(b"HTTP/1.1 200 OK\r\n")
    assert text.endswith(b"\r\n\r\n")
    assert transport.closed


def test_what_is_no_request_is_refused_first_and_after_an_answer() -> None:
    for before in ((), (request("POST", b"hello"),)):
        transport = send_requests(*before, b"no request at all\r\n\r\n")
        assert len(transport.written) == len(before) + 1
        assert transport.written[-1].startswith(b"HTTP/1.1 400 ")
        assert transport.closed


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "foo"])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_request_for_another_protocol_is_answered_and_its_body_is_no_request(protocol: str, is_split: bool) -> None:
    body = b"GET /smuggled HTTP/1.1\r\nhost: here\r\n\r\n"
    message = request(
        "POST", body, "connection: upgrade, http2-settings", f"upgrade: {protocol}", "http2-settings: AAMA"
    )
    cut = len(message) - len(body) if is_split else len(message)
    transport = send_requests(*(part for part in (message[:cut], message[cut:]) if part), request("POST", b"hello"))
    texts = b"".join(transport.written).split(b"HTTP/1.1 ")[1:]
    assert [text[:3] for text in texts] == [b"200", b"200"]
    assert [text.partition(b"\r\n\r\n")[2] for text in texts] == [body, b"hello"]


def test_a_tunnel_is_refused() -> None:
    transport = send_requests(b"CONNECT here:80 HTTP/1.1\r\nhost: here\r\n\r\nGET / HTTP/1.1\r\nhost: here\r\n\r\n")
    [text] = transport.written
    assert text.startswith(b"HTTP/1.1 400 ")
    assert transport.closed


def test_requests_that_come_together_are_answered_in_their_order() -> None:
    transport = send_requests(request("HEAD") + request("POST", b"one") + request("GET") + request("POST", b"two"))
    text = b"".join(transport.written)
    assert text.count(b"HTTP/1.1 200 OK") == 4
    assert [part.rpartition(b"\r\n")[2] for part in text.split(b"HTTP/1.1 200 OK")[1:]] == [b"", b"one", b"", b"two"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_is_written_to_a_connection_leaves_at_once(host: str) -> None:
    """asyncio asks for it of sockets that say they are TCP alone, and a listener of Python's own does not say so."""
    port = find_free_address(host, 0).port
    with open_listener(host, port) as bound, socket.create_connection((host, port)), bound.accept()[0] as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("line", [b"a" * 65536, b"name: value\r\n" * 5000])
def test_a_head_without_an_end_is_cut_off(line: bytes) -> None:
    """In one header, whose pieces the parser would join anew with each, and in many."""
    num_lines = direct.MAX_HEAD_BYTES // len(line)
    transport = send_requests(b"GET / HTTP/1.1\r\nhost: h\r\nx: ", *[line] * (num_lines + 1))
    assert transport.written == [direct.HEAD_TOO_LARGE_RESPONSE]
    assert transport.closed
    assert not send_requests(b"GET / HTTP/1.1\r\nhost: h\r\nx: ", *[line] * (num_lines - 1)).written


def test_a_long_body_and_many_requests_are_no_head() -> None:
    body = b"x" * (2 * direct.MAX_HEAD_BYTES)
    pieces = [body[place : place + 65536] for place in range(0, len(body), 65536)]
    transport = send_requests(request("POST", body)[: -len(body)], *pieces, *[request("POST", b"bye")] * 3)
    assert [text.rpartition(b"\r\n")[2] for text in transport.written] == [body, b"bye", b"bye", b"bye"]
