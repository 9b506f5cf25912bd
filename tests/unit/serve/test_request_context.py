"""Numbers of requests, lines of the access log."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from rtrain.ray_internals import ReplicaServer
from serve.app import build_app
from serve.auth import api_keys
from serve.ingress import direct, haproxy
from tests.support import serving
from tests.support.serving import INFER, TEXT, Gate, call, client, tensor

gate, predictor = serving.gate, serving.predictor  # fixtures


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logged(predictor: Predictor, path: Path, **settings: Any) -> FastAPI:
    return build_app(predictor, ServeConfig(access_log=str(path), **settings))


@pytest.mark.parametrize(
    ("client_id", "is_kept"),
    [
        ("order-4711_a.b", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ('a","status":200', False),
        ("\x1b[31m", False),
        ("", False),
        (None, False),
    ],
)
def test_a_request_keeps_its_number_or_gets_one(predictor: Predictor, client_id: str | None, is_kept: bool) -> None:
    app = build_app(predictor, ServeConfig())
    headers = {} if client_id is None else {"x-request-id": client_id}
    for path in ("/v2", "/nowhere"):
        request_id = call(app, "GET", path, headers=headers).headers["x-request-id"]
        assert request_id == client_id if is_kept else re.fullmatch("[0-9a-f]{32}", request_id)


def test_the_log_has_a_line_for_each_request_and_never_a_text(predictor: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    app = logged(predictor, path)
    secret = "my pin is 4711"
    call(app, "POST", "/predict", json={"inputs": [secret, "long " * 200]}, headers={"x-request-id": "one"})
    call(app, "POST", INFER, json={"inputs": [tensor([secret], [1])]})
    call(app, "POST", "/predict", content=secret.encode())
    call(app, "GET", f"/{secret}?q={secret}", headers={"user-agent": secret})
    text, log_lines = path.read_text(encoding="utf-8"), lines(path)
    assert "pin" not in text
    assert "4711" not in text
    assert [
        (line["method"], line["route"], line["status"], line["inputs"], line["truncated_inputs"]) for line in log_lines
    ] == [
        ("POST", "/predict", 200, 2, 1),
        ("POST", "/v2/models/{name}/infer", 200, 1, 0),
        ("POST", "/predict", 400, 0, 0),
        ("GET", "other", 404, 0, 0),
    ]
    first = log_lines[0]
    assert set(first) == {
        "time", "id", "client", "method", "route", "status", "ms", "inputs", "tokens", "truncated_inputs",
        "model", "version"
    }  # fmt: skip
    assert (first["id"], first["client"], first["version"]) == ("one", "", predictor.artifact.version)
    assert first["tokens"] == sum(len(row.ids) for row in predictor.encode([secret, "long " * 200]))
    assert first["ms"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])


def test_the_log_names_the_key_of_a_request(predictor: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    headers = {"authorization": f"Bearer {api_keys.add_key(tmp_path / 'keys.json', 'shop')}"}
    app = logged(predictor, path, keys=str(tmp_path / "keys.json"))
    call(app, "POST", "/predict", json={"inputs": TEXT}, headers=headers)
    assert [line["client"] for line in lines(path)] == ["shop"]


def test_a_client_that_left_is_logged_with_its_own_status(predictor: Predictor, gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    app = logged(predictor, path)

    async def main() -> None:
        async with client(app) as session:
            gone = asyncio.create_task(session.post("/predict", json={"inputs": TEXT}))
            await gate.entered()
            gone.cancel()
            await asyncio.wait([gone])

    asyncio.run(main())
    gate.open()
    assert [line["status"] for line in lines(path)] == [499]


def test_a_log_that_was_moved_away_is_begun_anew(predictor: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    app = logged(predictor, path)
    call(app, "GET", "/v2")
    path.rename(tmp_path / "access.log.1")
    call(app, "GET", "/v2/health/live")
    assert [line["route"] for line in lines(tmp_path / "access.log.1")] == ["/v2"]
    assert [line["route"] for line in lines(path)] == ["/v2/health/live"]


def test_requests_are_answered_where_the_log_cannot_be_written(
    predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder was removed: one message until a line can be written again."""
    path = tmp_path / "logs" / "access.log"
    path.parent.mkdir()
    app = logged(predictor, path)
    assert call(app, "GET", "/v2").status_code == 200
    shutil.rmtree(path.parent)
    assert [call(app, "GET", "/v2").status_code for _ in range(3)] == [200, 200, 200]
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith("rtrain: the access log cannot be written: [Errno 2]")
    path.parent.mkdir()
    call(app, "GET", "/v2")
    assert len(lines(path)) == 1
    assert capsys.readouterr().err == ""


def test_errors_of_haproxy_s_own_stand_beside_those_of_the_replica(predictor: Predictor) -> None:
    app = build_app(predictor, ServeConfig())
    without_errors = call(app, "GET", "/metrics", headers={haproxy.PROXY_ERRORS_HEADER: "nothing"}).text
    assert "haproxy" not in without_errors
    with_errors = call(app, "GET", "/metrics", headers={haproxy.PROXY_ERRORS_HEADER: "503=12 504=0"}).text
    assert 'rtrain_haproxy_errors_total{status="503"} 12.0' in with_errors.splitlines()
    assert 'rtrain_requests_total{model="tiny",route="/metrics",status="200"} 1.0' in with_errors.splitlines()


@pytest.mark.parametrize(("max_requests", "status", "server_key"), [(1, 200, "is_disconnected"), (0, 503, "rejection")])
def test_a_request_carries_these_keys_through_all_middleware(
    predictor: Predictor, tmp_path: Path, max_requests: int, status: int, server_key: str
) -> None:
    key = api_keys.add_key(tmp_path / "keys.json", "shop", models=["tiny"])
    app = build_app(predictor, ServeConfig(keys=str(tmp_path / "keys.json")))
    sent: list[Message] = []
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps({"inputs": TEXT}).encode(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        server = ReplicaServer(app, lambda change: None, options=None, loop=asyncio.get_running_loop())
        await direct.DirectIngressApp(app, server, max_requests)(scope, receive, send)

    asyncio.run(main())
    assert sent[0]["status"] == status
    state: Any = scope["state"]
    assert state.keys() == {"request_stats", "is_authenticated", "key_name", "allowed_models", server_key}
    if server_key == "is_disconnected":
        assert (state["is_authenticated"], state["key_name"], state["allowed_models"]) == (True, "shop", ("tiny",))
        assert (state["request_stats"].texts, state["request_stats"].is_disconnected) == (1, state[server_key])
