"""Requests that nobody sends in good faith, as ASGI servers hand them on; made by Hypothesis, and by hand."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from starlette.types import ASGIApp, Message

INFER = "/v2/models/tiny/infer"
PREDICT: dict[str, Any] = {"inputs": ["a", {"text": "b", "text_pair": "c"}], "parameters": {"top_k": 1}}
QUESTION: dict[str, Any] = {"inputs": {"question": "who?", "context": "a b"}}
INFERENCE: dict[str, Any] = {
    "id": "1",
    "inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}],
    "outputs": [{"name": "label"}],
}
BINARY: dict[str, Any] = {
    "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}]
}


@dataclass(frozen=True)
class Case:
    body: bytes = b'{"inputs": "a"}'
    path: str = "/predict"
    method: str = "POST"
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    cuts: tuple[int, ...] = ()
    """Where the body is cut into chunks."""
    leaves: bool = False
    """The client is gone before the last chunk."""

    def messages(self) -> Iterator[Message]:
        places = sorted({0, *(cut % (len(self.body) + 1) for cut in self.cuts), len(self.body)})
        chunks = [self.body[start:end] for start, end in itertools.pairwise(places)] or [b""]
        for chunk in chunks[:-1]:
            yield {"type": "http.request", "body": chunk, "more_body": True}
        if not self.leaves:
            yield {"type": "http.request", "body": chunks[-1]}
        yield {"type": "http.disconnect"}


@dataclass
class Reply:
    status: int | None = None
    """None where there was no answer."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def ask(app: ASGIApp, case: Case) -> Reply:
    """The reply to a case; an exception that a server would see is raised."""
    reply, messages = Reply(), case.messages()

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert reply.status is None, "answered twice"
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": case.method,
        "path": case.path,
        "raw_path": case.path.encode("utf-8", "surrogateescape"),
        "query_string": case.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in case.headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    return reply


# -------------------------------------------------------------------------------------------------------- by hand

NUMBERS = (
    b"1e999",
    b"-1e999",
    b"1" + b"0" * 5000,
    b"-0",
    b"1.",
    b".5",
    b"0x10",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"01",
)
TEXTS = (
    *(rb'"\ud800"', rb'"\udc00\ud800"', rb'"\ud83d\ude00"', rb'"\u0000"', rb'"\x41"', rb'"\u12"', rb'"\uD8"', b'"\\'),
    *(
        b'"\xff"',
        b'"\xc0\x80"',
        b'"\xed\xa0\x80"',
        b'"\xf5\x80\x80\x80"',
        b'"\n"',
        b'"\t"',
        b'"\x7f"',
        b'"' + b"\\" * 9999,
    ),
    *('"\u202e\u0301\u200b\ufeff"'.encode(), b'"' + b"\\u0041" * 20_000 + b'"', b'" "', b'""', '"\U000e0001"'.encode()),
)
VALUES = (
    *NUMBERS,
    *TEXTS,
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"[[]]",
    b"[null]",
    b'{"text": null}',
    b"",
    b"\x00",
    b"/**/1",
)
PLACES = (
    b'{"inputs": %s}',
    b'{"inputs": [%s]}',
    b'{"inputs": ["a", {"text": %s}]}',
    b'{"inputs": {"question": %s, "context": "a"}}',
    b'{"inputs": "a", "parameters": %s}',
    b'{"inputs": "a", "parameters": {"top_k": %s}}',
    b'{"inputs": "a", "parameters": {"explain": %s}}',
    b'{"inputs": "a", %s: 1}',
    b"%s",
    b'{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": %s}]}',
    b'{"inputs": [{"name": "text", "shape": %s, "datatype": "BYTES", "data": ["a"]}]}',
    b'{"inputs": [{"name": "text", "shape": [%s], "datatype": "BYTES", "data": ["a"]}]}',
    b'{"id": %s, "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}',
)
PATHS = (
    *("", "//", "/predict/", "//predict", "/./predict", "/a/../predict", "/predict\x00", "/predict ", "/PREDICT"),
    *("/predict;a=b", "/predict?", "/predict#", "/\u202epredict", "/predict\udcff", "/" + "a" * 5000, "/" * 5000),
    *("/v2/models//infer", "/v2/models/../infer", "/v2/models/tiny/../tiny/infer", "/v2/models/\udcff/infer", "/v2/"),
    *("/v2/models/tiny\x00/infer", "/v2/models/%74iny/infer", "/v2/models/" + "x" * 5000, "/metrics/../predict"),
    *("/v2/health/live/", "*", "http://other/predict", "/\r\nset-cookie: a=b", "/../../etc/passwd", "/-/routes"),
)
METHODS = (
    *("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI", "post", "P\u00d6ST", ""),
    *("X" * 1000, "POST ", "POST\r\n"),
)
HEADERS: tuple[tuple[tuple[bytes, bytes], ...], ...] = (
    *(
        ((b"host", host),)
        for host in (b"", b"[", b"[::1", b"a b", b"\xff", b"evil.example:99999", b"@", b"a/../b", b"%00")
    ),
    *(((b"content-type", kind),) for kind in (b"", b"text/plain", b"multipart/form-data", b"\xff", b"application/xml")),
    *(
        ((b"content-length", size),)
        for size in (b"0", b"1", b"-1", b"+5", b"1e3", b"9" * 5000, b"\xb2", b"0x10", b"1, 2")
    ),
    ((b"content-length", b"1"), (b"content-length", b"2")),
    ((b"content-length", b"3"), (b"transfer-encoding", b"chunked")),
    *(((b"transfer-encoding", value),) for value in (b"chunked, gzip", b"xchunked", b"\x0bchunked")),
    *(((b"content-encoding", value),) for value in (b"gzip", b"br", b"", b"\xff", b"identity, gzip")),
    *(((b"inference-header-content-length", size),) for size in (b"0", b"5", b"-1", b"\xb2", b"9" * 5000, b"1.0", b"")),
    *(((b"authorization", value),) for value in (b"", b"Bearer", b"Basic \xff", b"Bearer " + b"a" * 5000)),
    *(((b"x-request-timeout-seconds", seconds),) for seconds in (b"0", b"-1", b"nan", b"\xff")),
    ((b"cookie", b"a=" * 5000),),
    ((b"expect", b"100-continue"), (b"range", b"bytes=0-0"), (b"accept", b"\xff"), (b"upgrade", b"websocket")),
    ((b"x", b""),) * 5000,
    ((b"x", b"y" * 1_000_000),),
    ((b"x" * 100_000, b"y"),),
)


def by_hand() -> Iterator[Case]:
    """Some thousand requests: every bad value in every place, every path by every method, every set of headers."""
    for path in ("/predict", INFER):
        for place in PLACES:
            yield from (Case(place.replace(b"%s", value), path) for value in VALUES)
        for document in (PREDICT, QUESTION, INFERENCE, BINARY):
            body = json.dumps(document).encode()
            yield from (Case(body[:end], path) for end in range(0, len(body), 3))
            yield from (
                Case(body.decode().encode(coding), path) for coding in ("utf-16", "utf-32", "utf-8-sig", "cp037")
            )
        for depth in (30, 33, 200, 100_000):
            for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b'{"inputs":[', b"]}")):
                yield Case(opening * depth + b"1" + closing * depth, path)
                yield Case(opening * depth, path)
        yield from (Case(hostile * 330_000, path) for hostile in (b",", b"]", b'"', b'"",', b"\\", b"{}", b"1,", b" "))
    for path in ("/predict", INFER, "/nowhere"):
        yield from (Case(headers=headers, path=path) for headers in HEADERS)
    for path in PATHS:
        yield from (Case(path=path, method=method) for method in ("POST", *METHODS))
    for method in METHODS:
        yield from (Case(path=path, method=method) for path in ("/", "/predict", INFER, "/metrics", "/v2/health/live"))


# --------------------------------------------------------------------------------------------------- by Hypothesis

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(2**63) - 1, 2**64])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["text", "inputs", "BYTES", "\x00", " ", "\U0001f642" * 99])
)
_NAMES = st.sampled_from(
    ["inputs", "parameters", "text", "text_pair", "question", "context", "data", "shape"]
) | st.text(max_size=5)
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4))


def _places(document: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, child in children:
        yield from _places(child, (*before, name))


def _with(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = dict(document) if isinstance(document, dict) else list(document)
    changed[place[0]] = _with(document[place[0]], place[1:], value)
    return changed


@st.composite
def _documents(draw: st.DrawFn) -> bytes:
    """A request in which one thing or two are something else; as JSON, or what Python takes for it."""
    document = draw(st.sampled_from([PREDICT, QUESTION, INFERENCE, BINARY]))
    for _ in range(draw(st.integers(0, 2))):
        document = _with(document, draw(st.sampled_from(list(_places(document)))), draw(_VALUES))
    return json.dumps(document, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    """A document with some of its bytes lost, doubled or replaced, and perhaps something behind it."""
    body = draw(_documents() | st.binary(max_size=60))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        start, size = draw(st.integers(0, len(body))), draw(st.integers(0, 9))
        body = (
            body[:start]
            + draw(st.sampled_from([b"", body[start : start + size] * 2, b"\xff", b"[", b"\\u", b'"']))
            + (body[start + size :])
        )
    return body + draw(st.sampled_from([b"", b"", b"", b"\x01\x00\x00\x00a", b"\xff" * 9, b"}"]))


_TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(str.encode)
CASES = st.builds(
    Case,
    body=_bodies(),
    path=st.sampled_from(["/predict"] * 60 + [INFER] * 60 + list(PATHS)),
    method=st.sampled_from(["POST"] * 20 + list(METHODS)),
    query=st.sampled_from([b"", b"", b"a=b&a=%ff", b"\xff", b"%" * 99]) | st.binary(max_size=9),
    headers=st.sampled_from([(), (), (), *HEADERS])
    | st.lists(st.tuples(_TOKENS, st.binary(max_size=20)), max_size=5).map(tuple),
    cuts=st.lists(st.integers(0, 500), max_size=4).map(tuple),
    leaves=st.sampled_from([False] * 9 + [True]),
)
