"""What leaves a connection of the replica's server, write by write."""

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from serve.ingress import http_protocol
from serve.ingress.address import find_free_address, open_listener


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
        config = uvicorn.Config(
            application, http=http_protocol.HttpProtocol, ws="none", lifespan="off", log_level="critical"
        )
        config.load()
        transport = Transport()
        protocol = http_protocol.HttpProtocol(config=config, server_state=ServerState(), app_state={})
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
    num_lines = http_protocol.MAX_HEAD_BYTES // len(line)
    transport = send_requests(b"GET / HTTP/1.1\r\nhost: h\r\nx: ", *[line] * (num_lines + 1))
    assert transport.written == [http_protocol.HEAD_TOO_LARGE_RESPONSE]
    assert transport.closed
    assert not send_requests(b"GET / HTTP/1.1\r\nhost: h\r\nx: ", *[line] * (num_lines - 1)).written


def test_a_long_body_and_many_requests_are_no_head() -> None:
    body = b"x" * (2 * http_protocol.MAX_HEAD_BYTES)
    pieces = [body[place : place + 65536] for place in range(0, len(body), 65536)]
    transport = send_requests(request("POST", body)[: -len(body)], *pieces, *[request("POST", b"bye")] * 3)
    assert [text.rpartition(b"\r\n")[2] for text in transport.written] == [body, b"bye", b"bye", b"bye"]
