"""The head of an answer waits for its body, so that both leave in one write.

uvicorn writes the head as soon as it is given it, and then the body. That is a second call of the system and a second
packet for each answer, for which HAProxy wakes twice; and a replica that is killed between the two leaves half an
answer, for which HAProxy cannot ask another replica any more.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD, CONTINUE = b"HTTP/1.1 ", b"HTTP/1.1 100"


class Protocol(HttpToolsProtocol):
    """Questions alone, which are POSTs, are answered so: an answer to HEAD has no body for which to wait."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joined(transport, self))


class _Joined(asyncio.Transport):
    """A connection that keeps the head of an answer until the next write, or the end."""

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
