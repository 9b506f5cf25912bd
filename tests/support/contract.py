"""HTTP contract of an endpoint: requests and their answers, for every kind of server.

`SETTINGS` are those of an endpoint with the model of `tests.support.tiny.make_artifact`, whose name is tiny and whose
labels are a, b and c. No wording is promised: of an error its status, its type and its field are.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

import rtrain

TEXT = "where is my parcel"
INFER = "/v2/models/tiny/infer"
SETTINGS: dict[str, Any] = {"max_inputs": 64, "max_body_bytes": 50_000, "max_text_characters": 20_000}
TYPES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported",
    421: "misdirected",
    422: "invalid",
    431: "too_large",
}
SECURITY_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Exchange(NamedTuple):
    method: str
    path: str
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    field: str | None = None
    """Field of the error."""
    answer: Any = None
    """The JSON of the answer; None where it is not looked at."""
    answer_headers: Mapping[str, str] = {}

    def __str__(self) -> str:
        return f"{self.method} {self.path[:30]} {self.status} {self.body[:60]!r}"


def post(document: object, status: int, field: str | None = None, path: str = "/predict") -> Exchange:
    return Exchange("POST", path, status, json.dumps(document).encode(), field=field)


def tensor(data: object, shape: list[int], datatype: str = "BYTES") -> dict[str, object]:
    return {"name": "text", "shape": shape, "datatype": datatype, "data": data}


def infer(inputs: object, status: int, field: str | None = None, **more: object) -> Exchange:
    return post({"inputs": inputs, **more}, status, field, INFER)


def binary(data: bytes, status: int, field: str | None = None, length: str | None = None) -> Exchange:
    """Texts as Triton's client sends them by default: JSON, then each text's length and bytes."""
    described = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    document = json.dumps({"inputs": [described]}).encode()
    headers = {"inference-header-content-length": length or str(len(document))}
    return Exchange("POST", INFER, status, document + data, headers, field)


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


ONE_ROW = tensor([TEXT], [1])
ROUTES = [
    Exchange("GET", "/v2/health/live", 200, answer={"live": True}),
    Exchange("GET", "/v2/health/ready", 200, answer={"ready": True}),
    Exchange("HEAD", "/v2/health/live", 200),
    Exchange("GET", "/v2/models/tiny/ready", 200, answer={"name": "tiny", "ready": True}),
    Exchange("GET", "/v2", 200, answer={"name": "rtrain", "version": rtrain.__version__, "extensions": []}),
    *(Exchange("GET", path, 200) for path in ("/v2/models/tiny", "/info", "/openapi.json", "/metrics")),
    *(Exchange("GET", path, 200) for path in ("/", "/page.css", "/page.js", "/docs")),
    Exchange("POST", "/v2/repository/index", 200),
    *(Exchange("GET", path, 404) for path in ("/nowhere", "/predict/", "/redoc")),
    *(Exchange("GET", path, 404, field="name") for path in ("/v2/models/other", "/v2/models/other/ready")),
    Exchange("GET", "/v2/models/tiny/versions/0", 404, field="version"),
    Exchange("POST", "/v2/models/other/infer", 404, field="name"),
    Exchange("GET", "/predict", 405, answer_headers={"allow": "POST"}),
    Exchange("DELETE", "/", 405, answer_headers={"allow": "GET"}),
    Exchange("POST", "/", 405, answer_headers={"allow": "GET"}),
    Exchange(
        "GET", "/v2", 200, headers={"x-request-id": "order-4711_a.b"}, answer_headers={"x-request-id": "order-4711_a.b"}
    ),
]
HEADS = [
    Exchange("GET", "/v2", 421, headers={"host": "evil.example"}),
    Exchange("GET", "/v2", 200, headers={"host": "localhost:80"}),
    Exchange("GET", "/v2", 431, headers={"x-long": "a" * 9_000}),
    Exchange("GET", "/" + "a" * 9_000, 431),
    *(
        post({"inputs": TEXT}, status)._replace(headers={"content-encoding": encoding})
        for encoding, status in (("gzip", 415), ("GZIP", 415), ("Identity", 200))
    ),
]
PREDICT = [
    post({"inputs": TEXT}, 200),
    post({"inputs": [TEXT, {"text": TEXT, "text_pair": "at the door"}], "parameters": {"top_k": 1}}, 200),
    post({"inputs": ["short", "long " * 200, "long " * 300]}, 200)._replace(answer_headers={"x-truncated-inputs": "2"}),
    post(None, 422),
    post([], 422),
    *(post({"inputs": wrong}, 422, "inputs") for wrong in (3, None, list[str](), " \n")),
    post({}, 422, "inputs"),
    post({"inputs": [TEXT, 3]}, 422, "inputs.1"),
    post({"inputs": [[TEXT]]}, 422, "inputs.0"),
    post({"inputs": {}}, 422, "inputs.text"),
    post({"inputs": [TEXT, {"text": 3}]}, 422, "inputs.1.text"),
    post({"inputs": {"text": TEXT, "pair": TEXT}}, 422, "inputs.pair"),
    post({"inputs": [TEXT, ""]}, 422, "inputs.1"),
    post({"inputs": TEXT, "input": TEXT}, 422, "input"),
    post({"inputs": TEXT, "parameters": []}, 422, "parameters"),
    post({"inputs": TEXT, "parameters": {"temperature": 1}}, 422, "parameters.temperature"),
    *(
        post({"inputs": TEXT, "parameters": {"top_k": top_k}}, 422, "parameters.top_k")
        for top_k in (0, "3", 1.0, True, -(2**63) - 1)
    ),
    post({"inputs": TEXT, "parameters": {"label": "a"}}, 422, "parameters"),
    post({"inputs": TEXT, "parameters": {"abstain": True}}, 422, "parameters.abstain"),
    post({"inputs": TEXT, "parameters": {"top_k": 2**63}}, 200),
    post({"inputs": [TEXT] * 65}, 413, "inputs"),
    post({"inputs": ["a", "x" * 20_001]}, 413, "inputs.1"),
    post({"inputs": {"text": "x" * 19_000, "text_pair": "y" * 1_001}}, 413, "inputs"),
    post({"inputs": "x" * 50_000}, 413),
    post({"inputs": "x" * 20_000}, 200),
]
BODIES = [
    Exchange("POST", "/predict", status, body)
    for body, status in (
        *((body, 400) for body in (b"", b"{", b"inputs=hello", b'{"inputs": "a"} trailing', b'{"inputs": "\x00"}')),
        *((text.encode(form), 400) for text in ('{"inputs": "a"}',) for form in ("utf-8-sig", "utf-16", "utf-16-le")),
        *((b'{"inputs": %s}' % text, 400) for text in (b'"\xff\xfe"', rb'"\ud800"', rb'["a", "\udc00\ud800"]')),
        (b'{"inputs": ' + b"[" * 40 + b"]" * 40 + b"}", 400),
        (b'{"a":' * 60 + b"1" + b"}" * 60, 400),
        *((b"[" * size, 413) for size in (2_000, 60_000)),
        (b"[1" + b",1" * 600 + b"]", 413),
        (b'{"inputs": "a", "parameters": {' + b'"a": {},' * 600 + b'"b": 1}}', 413),
        *((b'{"inputs": %s}' % text, 200) for text in (rb'"\u0000"', rb'"a\u0000b"', b'"first", "inputs": "second"')),
        ('{"inputs": "' + "🙂" * 10_000 + '"}', 200),
        ('{"inputs": "\u202e\u05d0\u0301\u200b\ufeff\uffff"}', 200),
    )
    for body in [body if isinstance(body, bytes) else body.encode()]
] + [
    Exchange("POST", "/predict", 422, body, field=field)
    for body, field in (
        (b'{"inputs": NaN}', "inputs"),
        *(
            (b'{"inputs": "a", "parameters": {"top_k": %s}}' % value, "parameters.top_k")
            for value in (b"NaN", b"1e308")
        ),
        (b'{"inputs": "a", "' + b"k" * 10_000 + b'": 1}', "k" * 100),
        (rb'{"inputs": "a", "\u001b[31m\n": 1}', "\x1b[31m\n"),
    )
]
PROTOCOL = [
    infer([ONE_ROW], 200),
    infer([ONE_ROW], 200, outputs=[{"name": "label"}, {"name": "scores"}], parameters={"top_k": 2}),
    binary(packed(b"hello"), 200),
    infer([tensor(["short", "long " * 200], [2])], 200)._replace(answer_headers={"x-truncated-inputs": "1"}),
    infer("x" * 50_000, 413),
    infer([tensor([TEXT] * 65, [65])], 413, "inputs"),
    infer([], 422, "inputs"),
    infer([ONE_ROW, ONE_ROW], 422, "inputs.0.name"),
    infer([ONE_ROW, ONE_ROW, ONE_ROW], 422, "inputs"),
    infer([tensor([1.0], [1], "FP32")], 422, "inputs.0.datatype"),
    infer([tensor([TEXT], [2])], 422, "inputs.0.shape"),
    infer([tensor([TEXT], [-1])], 422, "inputs.0.shape.0"),
    infer([tensor([], [0])], 422, "inputs.0.data"),
    infer([tensor(None, [1])], 422, "inputs.0.data"),
    infer([tensor([TEXT, 3], [2])], 422, "inputs.0.data.1"),
    infer([tensor([TEXT, " "], [2])], 422, "inputs.0.data.1"),
    infer([ONE_ROW], 422, "outputs.0.name", outputs=[{"name": "a"}]),
    infer([ONE_ROW], 422, "outputs.0.name", outputs=[{"name": "answer"}]),
    *(binary(data, 422, "inputs.0.data") for data in (packed(b"text")[:-1], b"\xff\xff\xff\xff", b"\x00")),
    binary(packed(b"\xff"), 422, "inputs.0.data.0"),
    *(binary(data, 422, "inputs.0.shape") for data in (packed(b"a", b"b"), b"")),
    binary(bytes(4 * 65), 413, "inputs.0.data"),
    *(binary(b"", 400, None, length) for length in ("-1", "9" * 5000, "100000")),
]
EXCHANGES = [*ROUTES, *HEADS, *PREDICT, *BODIES, *PROTOCOL]


def check(exchange: Exchange, response: httpx.Response) -> None:
    """Raise `AssertionError` where the answer is another one than is promised."""
    context = f"{exchange}: {response.status_code} {response.text[:200]}"
    assert response.status_code == exchange.status, context
    assert SECURITY_HEADERS.items() <= response.headers.items(), context
    assert response.headers["content-security-policy"].startswith("default-src 'none'"), context
    assert (response.headers["x-model-name"], len(response.headers["x-model-version"])) == ("tiny", 12), context
    assert response.headers["x-request-id"], context
    for name, value in exchange.answer_headers.items():
        assert value in response.headers.get_list(name), context  # Ray's proxy adds a number of its own
    if exchange.answer is not None:
        assert response.json() == exchange.answer, context
    if exchange.status < 400:
        return
    assert response.headers["content-type"] == "application/json", context
    assert len(response.content) < 700, context
    error = response.json()["error"]
    if exchange.path.startswith("/v2"):  # the line that the Open Inference Protocol prescribes
        assert isinstance(error, str), context
        assert exchange.field is None or error.startswith(f"{exchange.field}: "), context
    else:
        assert sorted(error) == ["field", "message", "type"], context
        assert (error["type"], error["field"]) == (TYPES[exchange.status], exchange.field), context


def ask(url: str) -> None:
    """Send every request to that address, each over a connection of its own, and check the answers."""
    for exchange in EXCHANGES:
        method, path, _, body, headers, *_ = exchange
        check(exchange, httpx.request(method, url + path, content=body, headers=dict(headers), trust_env=False))
