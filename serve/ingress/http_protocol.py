"""A connection of the endpoint's HTTP server: uvicorn's, but for three things.

The head of an answer waits for its body, so that both leave in one write. uvicorn writes the head as soon as it is
given it, and then the body. That is a second call of the system and a second packet for each answer, for which HAProxy
wakes twice; and a replica that is killed between the two leaves half an answer, for which HAProxy cannot ask another
replica any more.

A request to change to another protocol is answered as if it did not ask for that, which RFC 9110 (7.8) allows. The
parser takes it for one without a body: what follows its head would be read as further requests. HAProxy sees one
request there, and gives the connection to other clients, who would get the answers to what the first one has put
behind its head.

The head of a request has an end: uvicorn's parser keeps whatever it is sent, and joins the pieces of a long line anew
with each of them, so that 50 MB of a header, for which no key is asked, take ten seconds of the one loop.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD, CONTINUE = b"HTTP/1.1 ", b"HTTP/1.1 100"
MOST_HEAD = 1 << 18
"""Bytes that are read of a request's line and headers, but for what one reading of the socket brings beyond."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
INVALID = "Invalid HTTP request received."


class Protocol(HttpToolsProtocol):
    _replayed: bytes
    """The head of a request as if it asked for no other protocol. Empty for CONNECT, which is nothing else."""

    _head = 0
    """Bytes that were read while a request's head was not whole."""
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joined(transport, self))

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        size = len(data)
        try:
            while data:
                data = self._rest(data)
        except httptools.HttpParserError:
            self.send_400_response(INVALID)
        self._head = self._head + size if self._is_in_head else 0
        if self._head > MOST_HEAD and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def _rest(self, data: bytes) -> bytes:
        """Have the data read up to the end of a head that asks for another protocol; returns what is behind it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as found:
            if not self._replayed:
                raise httptools.HttpParserInvalidMethodError("CONNECT") from None
            self.parser = httptools.HttpRequestParser(self)  # the old one reads nothing more
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(self._replayed)
            return data[found.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head, self._is_in_head = 0, True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            return
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        lines = [b" ".join((method, self.url, b"HTTP/" + version)), *kept, b"", b""]
        self._replayed = b"" if method == b"CONNECT" else b"\r\n".join(lines)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()


class _Joined(asyncio.Transport):
    """A connection that keeps the head of an answer until the next write, or the end. Questions alone, which are POSTs,
    are answered so: an answer to HEAD has no body for which to wait."""

    def __init__(self, transport: asyncio.Transport, protocol: Protocol):
        super().__init__()
        self._transport, self._protocol, self._head = transport, protocol, b""

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data[:9] == HEAD and data[:12] != CONTINUE and self._answers_a_question():
            self._head = bytes(data)
            return
        self._transport.write(data)

    def _answers_a_question(self) -> bool:
        cycle = self._protocol.cycle  # None where not even a request's head could be read
        return cycle is not None and not cycle.response_complete and cycle.scope["method"] == "POST"

    def close(self) -> None:
        if self._head and not self.is_closing():
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
