"""What stands before the application: keys over HTTP, and limits that cost a client its request, not the others theirs.

The limits are driven message by message, as a server does it; keys and headers through the application with a model.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve import middleware
from serve.app import ModelApp, build_app
from serve.auth import api_keys
from serve.middleware import AccessLog, RequestContext, RequestMiddleware, RequestRecorder
from serve.observability.tracing import Tracer
from serve.schemas.predict import RequestError
from tests.support.serving import TEXT, call, refusal

Step = bytes | float | Message
"""Next action of a client: send bytes, wait, or disconnect."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The least application: answers with the body that it was given."""
    message = await receive()
    if message["type"] == "http.disconnect":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def guard(app: ASGIApp, settings: ServeConfig) -> RequestMiddleware:
    recorder = RequestRecorder(lambda *counts: None, Tracer(), AccessLog(None))
    authenticator = middleware.make_authenticator(settings) if Path(settings.keys or "").is_file() else None
    return RequestMiddleware(app, settings, authenticator, recorder)


def head(path: str = "/predict", headers: Sequence[tuple[bytes, bytes]] = (), **more: object) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": list(headers), **more}


def drive(
    settings: ServeConfig, scope: Scope, steps: Sequence[Step] = (b"",)
) -> tuple[int | None, bytes, dict[str, str]]:
    """Status (None: no answer), body and headers that a client got."""
    left, sent = list(steps), list[Message]()

    async def receive() -> Message:
        while isinstance(step := left.pop(0), float):
            await asyncio.sleep(step)
        if not isinstance(step, bytes):
            return step
        return {"type": "http.request", "body": step, "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(guard(echo, settings)(scope, receive, send))
    if not sent:
        return None, b"", {}
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:]), headers


# ---------------------------------------------------------------------------------------------------------- the limits


def test_a_body_reaches_the_application_whole_and_up_to_the_last_byte_of_the_limit() -> None:
    parts = [b"a" * 400, b"", b"b" * 600]
    assert drive(ServeConfig(max_body_bytes=1000), head(), parts)[:2] == (200, b"a" * 400 + b"b" * 600)
    status, body, headers = drive(ServeConfig(max_body_bytes=999), head(), parts)
    assert (status, headers["connection"]) == (413, "close")
    assert body == b'{"error":{"type":"too_large","message":"the body has more than 999 bytes","field":null}}'


@pytest.mark.parametrize(
    ("declared", "status"),
    [
        (b"1000", 200),
        (b"0000000000000000001000", 200),
        (b"1001", 413),
        (b"9" * 5_000, 413),
        (b"many", 200),
        (b"-1", 200),
        (b"", 200),
    ],
)
def test_a_declared_length_is_refused_before_the_body_is_read_and_otherwise_not_believed(
    declared: bytes, status: int
) -> None:
    never: Message = {"type": "never asked for"}
    steps = [b"a" * 1000] if status == 200 else [never]
    assert drive(ServeConfig(max_body_bytes=1000), head(headers=[(b"content-length", declared)]), steps)[0] == status


LOCAL = (b"localhost", b"LOCALHOST.:80", b"127.0.0.1", b"127.1.2.3:8000", b"[::1]:8000", b"[::1]")
FOREIGN = (
    b"evil.example",
    b"127.0.0.1.evil.example:8000",
    b"192.0.2.1",
    b"localhost.evil.example",
    b"",
    b"[::1",
    b"\xff",
)


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        (ServeConfig(), LOCAL, FOREIGN),
        (ServeConfig(host="::1"), LOCAL, FOREIGN),
        (ServeConfig(allowed_hosts=("models.example",)), (*LOCAL, b"models.example:443", b"Models.Example"), FOREIGN),
        (ServeConfig(host="0.0.0.0", insecure=True), (*LOCAL, *FOREIGN[:2]), ()),
        (ServeConfig(host="0.0.0.0", insecure=True, allowed_hosts=("models.example",)), (b"models.example",), FOREIGN),
        (ServeConfig(keys="keys.json"), (*LOCAL, *FOREIGN), ()),
    ],
)
def test_without_keys_an_endpoint_of_this_machine_answers_no_name_that_a_page_of_the_web_has_given_it(
    settings: ServeConfig, allowed: tuple[bytes, ...], refused: tuple[bytes, ...]
) -> None:
    for host in allowed:
        assert drive(settings, head(headers=[(b"host", host)]))[0] == 200, host
    for host in refused:
        for path in ("/predict", "/v2", "/"):
            assert drive(settings, head(path, [(b"host", host)]))[0] == 421, host
        assert drive(settings, head(headers=[(b"host", b"localhost"), (b"host", host)]))[0] == 421, host
    assert drive(settings, head())[0] == 200, "no browser leaves the header out"


def test_the_deadline_ends_a_body_that_is_fast_enough() -> None:
    status, body, _ = drive(ServeConfig(request_timeout_s=0.05), head(), [b"a", 60.0])
    assert (status, b'"request_timeout","message":"the deadline passed before the body had arrived"' in body) == (
        408,
        True,
    )


def test_a_client_that_leaves_in_mid_body_is_gone_for_the_application_too() -> None:
    assert drive(ServeConfig(), head(), [b"a", {"type": "http.disconnect"}]) == (None, b"", {})


@pytest.mark.parametrize(
    ("scope", "status"),
    [
        (head(headers=[(b"a", b"b" * 900)]), 200),
        (head(headers=[(b"a", b"b" * 1000)]), 431),
        (head(headers=[(b"a" * 1000, b"")]), 431),
        (head("/" + "a" * 1000), 431),
        (head(query_string=b"a" * 1000), 431),
        (head(headers=[(b"", b"")] * 100), 200),
        (head(headers=[(b"", b"")] * 101), 431),
    ],
    ids=range(7),
)
def test_the_head_is_limited(scope: Scope, status: int) -> None:
    assert drive(ServeConfig(max_header_bytes=1000), scope)[0] == status


# ------------------------------------------------------------------------------------------------------------- keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_only_a_known_key_is_answered_and_only_within_its_scopes(predictor: Predictor, path: Path) -> None:
    shop, watch = api_keys.add_key(path, "shop"), api_keys.add_key(path, "watch", ("metrics",))
    locked = build_app(predictor, ServeConfig(keys=str(path)))
    routes = ("/predict", "/metrics", "/v2", "/v2/models/tiny", "/openapi.json", "/docs", "/nowhere", "/")
    got = {
        name: [call(locked, "GET", route, headers=sent).status_code for route in routes]
        for name, sent in {
            "none": {},
            "wrong": {"authorization": f"Bearer {shop[:-1]}"},
            "shop": {"authorization": f"Bearer {shop}"},
            "watch": {"authorization": f"Bearer {watch}"},
        }.items()
    }
    assert got == {
        "none": [401, 401, 401, 401, 401, 401, 401, 200],
        "wrong": [401, 401, 401, 401, 401, 401, 401, 200],
        "shop": [405, 403, 200, 200, 200, 200, 404, 200],
        "watch": [403, 200, 403, 403, 403, 403, 403, 200],
    }
    for probe in ("live", "ready"):
        assert call(locked, "GET", f"/v2/health/{probe}").status_code == 200
    request = {"json": {"inputs": TEXT}, "headers": {"authorization": f"Bearer {shop}"}}
    assert call(locked, "POST", "/predict", **request).status_code == 200
    refused = call(locked, "POST", "/predict", json={"inputs": TEXT})
    assert refusal(refused) == (401, "unauthorized", None)
    assert refused.headers["www-authenticate"] == 'Bearer realm="rtrain"'


def test_the_openapi_document_says_that_a_key_is_asked_for(predictor: Predictor, path: Path, app: ModelApp) -> None:
    headers = {"authorization": f"Bearer {api_keys.add_key(path, 'shop')}"}
    document = call(build_app(predictor, ServeConfig(keys=str(path))), "GET", "/openapi.json", headers=headers).json()
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    open_document = call(app, "GET", "/openapi.json").json()
    assert "security" not in open_document


def test_a_key_past_its_rate_is_answered_429_with_retry_after(predictor: Predictor, path: Path) -> None:
    headers = {"authorization": f"Bearer {api_keys.add_key(path, 'shop', rate='2/hour')}"}
    locked = build_app(predictor, ServeConfig(keys=str(path)))
    answers = [call(locked, "GET", "/openapi.json", headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["type"] == "rate_limited"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 3600
    assert 'rtrain_requests_total{model="tiny",route="other",status="429"} 1.0' in locked.service.render_metrics()


def test_a_body_without_an_end_is_not_read_of_whoever_is_not_let_in(predictor: Predictor, path: Path) -> None:
    api_keys.add_key(path, "shop")
    locked = build_app(predictor, ServeConfig(keys=str(path)))

    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    refused = [call(locked, "POST", "/predict", content=body) for body in (b"{}", chunks())]
    assert [(response.status_code, response.headers.get("connection")) for response in refused] == [
        (401, None),
        (401, "close"),
    ]


def test_a_websocket_is_closed_whatever_its_key(path: Path) -> None:
    plain, sent = api_keys.add_key(path, "shop"), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def never(*_: object) -> Any:
        raise AssertionError

    scope = {**head(headers=[(b"authorization", f"Bearer {plain}".encode())]), "type": "websocket"}
    asyncio.run(guard(never, ServeConfig(keys=str(path)))(scope, never, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_the_address_that_it_is_mounted_at_opens_nothing(path: Path) -> None:
    api_keys.add_key(path, "shop")
    guarded = guard(echo, ServeConfig(keys=str(path)))
    statuses = []
    for root, request_path in (
        ("/a", "/a/v2/health/live"),
        ("/a", "/v2/health/live"),
        ("/v2", "/v2/v2/health/live"),
        ("/a", "/a/predict"),
        ("/a", "/ab/v2/health/live"),
        ("/a", "/a"),
        ("/predict", "/predict/"),
    ):
        sent: list[Message] = []

        async def send(message: Message, to: list[Message] = sent) -> None:
            to.append(message)

        async def receive() -> Message:
            return {"type": "http.request"}

        asyncio.run(guarded(head(request_path, root_path=root), receive, send))
        statuses.append(sent[0]["status"])
    # /predict mounted at itself is the page there, which needs none.
    assert statuses == [200, 200, 200, 401, 401, 401, 200]


# --------------------------------------------------------------------------------------------------------- every answer


def test_neither_texts_nor_keys_are_logged(
    predictor: Predictor, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In every outcome of the request; the root logger receives all log records."""
    caplog.set_level(logging.DEBUG)
    plain, text = api_keys.add_key(path, "shop", rate="40/hour"), "canary"
    locked = build_app(predictor, ServeConfig(keys=str(path)))
    right, wrong = {"authorization": f"Bearer {plain}"}, {"authorization": f"Bearer {plain[:-4]}AAAA"}
    statuses = set()
    for _ in range(8):
        for headers in (right, wrong):
            for body in ({"inputs": text}, {"inputs": [text, 3]}, {text: text}, {"inputs": f"{text} " * 50_000}):
                statuses.add(call(locked, "POST", "/predict", json=body, headers=headers).status_code)
        statuses.add(call(locked, "POST", "/predict", content=f'{{"{text}'.encode(), headers=right).status_code)
        statuses.add(call(locked, "GET", f"/{text}?{text}", headers=right).status_code)
    assert statuses == {200, 400, 401, 404, 413, 422, 429}
    monkeypatch.setattr(predictor.task, "decode", lambda *_: 1 / 0)
    opened = build_app(predictor, ServeConfig())
    assert call(opened, "POST", f"/predict?{text}", json={"inputs": text}, headers=right).status_code == 500
    assert "unexpected error in POST '/predict'" in caplog.text
    log_text = "".join(record.getMessage() + str(record.args) for record in caplog.records if record.name != "httpx")
    for secret in (text, plain, plain[16:]):
        assert secret not in log_text


@pytest.mark.parametrize("asks", [True, False])
def test_in_overload_a_client_is_told_the_model_only_where_no_key_is_asked_for(
    predictor: Predictor, tmp_path: Path, asks: bool
) -> None:
    path = tmp_path / "keys.json"
    api_keys.add_key(path, "shop")
    app = build_app(predictor, ServeConfig(keys=str(path) if asks else None))
    sent = list[Message]()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app({**head(), middleware.CONTEXT: RequestContext(rejection=RequestError(503, "busy"))}, receive, send))
    names = [name for name, _ in sent[0]["headers"] if name.startswith(b"x-model")]
    assert (sent[0]["status"], names == []) == (503, asks)
