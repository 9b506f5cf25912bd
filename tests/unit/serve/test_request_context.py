"""Numbers of requests, lines of the access log."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from serve.auth import api_keys
from serve.ingress import haproxy
from tests.support.serving import INFER, TEXT, Gate, call, client, tensor


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "access.log"


@pytest.fixture
def app(predictor: Predictor, path: Path) -> Iterator[ModelApp]:
    """It writes an access log."""
    path.parent.mkdir()
    app = build_app(predictor, ServeConfig(access_log=str(path)))
    yield app
    app.service.close()


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


def test_the_log_has_a_line_for_each_request_and_never_a_text(app: ModelApp, predictor: Predictor, path: Path) -> None:
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
    app = build_app(predictor, ServeConfig(access_log=str(path), keys=str(tmp_path / "keys.json")))
    call(app, "POST", "/predict", json={"inputs": TEXT}, headers=headers)
    app.service.close()
    assert [line["client"] for line in lines(path)] == ["shop"]


def test_a_client_that_left_is_logged_with_its_own_status(gate: Gate, app: ModelApp, path: Path) -> None:

    async def main() -> None:
        async with client(app) as session:
            gone = asyncio.create_task(session.post("/predict", json={"inputs": TEXT}))
            await gate.entered()
            gone.cancel()
            await asyncio.wait([gone])

    asyncio.run(main())
    gate.open()
    assert [line["status"] for line in lines(path)] == [499]


def test_a_log_that_was_moved_away_is_begun_anew(app: ModelApp, path: Path) -> None:
    call(app, "GET", "/v2")
    path.rename(moved := path.with_name("access.log.1"))
    call(app, "GET", "/v2/health/live")
    assert [line["route"] for line in lines(moved)] == ["/v2"]
    assert [line["route"] for line in lines(path)] == ["/v2/health/live"]


def test_requests_are_answered_where_the_log_cannot_be_written(
    app: ModelApp, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder was removed: one message until a line can be written again."""
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
