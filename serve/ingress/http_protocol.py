"""HTTP protocol of the endpoint: uvicorn's, with three changes.

The head of a reply waits for the body, so both leave in one write. uvicorn writes the head at once, then the body. That
is a second system call and a second packet per reply, for which HAProxy wakes twice; and a replica that is killed
between the two leaves half a reply, which HAProxy cannot retry on another replica.

A request to upgrade to another protocol is answered as a plain request, which RFC 9110 (7.8) allows. The parser assumes
that it has no body, and would read the body as further requests. HAProxy sees one request there, and reuses the
connection for other clients, who would get the replies to smuggled requests.

The size of a head is limited. uvicorn's parser keeps all data, and joins the pieces of a long line again for each
piece: a header of 50 MB, sent without a key, blocks the event loop for ten seconds.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

RESPONSE_PREFIX, CONTINUE_PREFIX = b"HTTP/1.1 ", b"HTTP/1.1 100"
MAX_HEAD_BYTES = 1 << 18
"""Largest request line and headers, in bytes; one read of the socket may exceed it. `serve.middleware` limits
bodies."""
HEAD_TOO_LARGE_RESPONSE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
INVALID_REQUEST_MESSAGE = "Invalid HTTP request received."


class HttpProtocol(HttpToolsProtocol):
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
