"""A command asks a running endpoint over a socket of its user's alone."""

import json
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rtrain.cli import app as cli
from rtrain.config import ServeConfig
from rtrain.core.errors import UserError
from serve.rollout import admin_socket, canary
from serve.rollout.controller import CanaryRun
from tests.support.refusals import refused_with


@pytest.fixture
def folder() -> Iterator[str]:
    """Where a path is short enough for a socket, wherever temporary files lie: it has 107 bytes at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"{folder}/own"


def answer(question: dict[str, Any]) -> str:
    if question.get("update") == "bad":
        raise UserError("bad is damaged", code="damaged")
    if question.get("update") == "worse":
        raise TimeoutError("Ray is busy")
    return f"did {question}"


def test_a_question_is_answered_and_an_error_is_handed_on(folder: str) -> None:
    with admin_socket.serve_admin_socket(8000, answer, folder):
        socket = admin_socket.resolve_socket_path(8000, folder)
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert admin_socket.send_command(8000, {"update": "good"}, folder) == "did {'update': 'good'}"
        with refused_with("damaged"):
            admin_socket.send_command(8000, {"update": "bad"}, folder)
        with refused_with("failed"):
            admin_socket.send_command(8000, {"update": "worse"}, folder)
        assert admin_socket.send_command(8000, {}, folder) == "did {}"
        with refused_with("not_running"):
            admin_socket.send_command(8001, {}, folder)
    assert not socket.exists()
    with refused_with("not_running"):
        admin_socket.send_command(8000, {}, folder)


def test_nobody_waits_behind_a_change_or_one_who_asks_nothing(folder: str) -> None:
    received, over = threading.Event(), threading.Event()

    def slow(question: dict[str, Any]) -> str:
        if "update" in question:
            received.set()
            over.wait(20)
        return str(question)

    with (
        admin_socket.serve_admin_socket(8000, slow, folder),
        socket.socket(socket.AF_UNIX) as idle,
        ThreadPoolExecutor() as pool,
    ):
        idle.connect(str(admin_socket.resolve_socket_path(8000, folder)))
        changed = pool.submit(admin_socket.send_command, 8000, {"update": "b"}, folder)
        assert received.wait(20)
        assert admin_socket.send_command(8000, {"status": True}, folder) == "{'status': True}"
        assert not changed.done()
        over.set()
        assert changed.result() == "{'update': 'b'}"


def test_one_port_is_one_endpoint_s_whatever_its_address(folder: str) -> None:
    with admin_socket.serve_admin_socket(8000, lambda question: "the first one", folder):
        with refused_with("port_in_use"), admin_socket.serve_admin_socket(8000, answer, folder):
            pass
        assert admin_socket.send_command(8000, {}, folder) == "the first one"


def test_a_socket_that_was_left_behind_is_replaced(folder: str) -> None:
    admin_socket.resolve_socket_path(8000, folder).write_text("")
    with admin_socket.serve_admin_socket(8000, answer, folder):
        assert admin_socket.send_command(8000, {}, folder) == "did {}"


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with refused_with("not_private"):
        admin_socket.resolve_socket_path(8000, str(tmp_path))


def test_the_command_asks_for_a_trial_by_its_share_of_the_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with admin_socket.serve_admin_socket(port, json.dumps):
        for options in (["--shadow", "0.25"], ["--set", "serve.shadow_fraction=0.5"], []):
            cli.main(["serve", str(tmp_path), "--update", "--port", str(port), *options])
    commands = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    aim = canary.CanaryPolicy.from_settings(ServeConfig())
    policies = [[*aim._replace(traffic_share=0.25)], [*aim._replace(traffic_share=0.5)], None]
    assert commands == [{"update": str(tmp_path), "model": None, "policy": trial} for trial in policies]


DRIFT = {"distances": {"tokens": 0.05, "score": 0.31}, "alarm": True, "rows": 100}


def replica(version: str | None, name: int = 1, **fields: Any) -> dict[str, Any]:
    if version is None:
        return {"process": 7, "version": None}
    defaults = {
        "requests": {"200": 1200, "503": 3},
        "inputs": 1300,
        "queue": {"rows": 2, "tokens": 40},
        "ready": True,
        "drift": DRIFT,
        "candidate": None,
    }
    return {"process": 7, "replica": str(name), "version": version, **defaults, **fields}


def test_all_is_told_in_a_line_each() -> None:
    replicas = [replica("old", 1, requests={"200": 1250}), replica("new", 3)]
    standing = CanaryRun(
        "new", canary.CanaryPolicy(0.2, 500, 0.9, 1.25, 600.0), canary.CanaryState(0.0, "weighted", 1, reason="fine")
    )
    standing.stats, standing.ratio = canary.CanaryStats(500, 490, 3, 0, 80, 1), 0.98
    status_text = admin_socket.format_status(
        {
            "address": "http://127.0.0.1:8000",
            "models": [
                {
                    "name": "tiny",
                    "artifact": "/models/old",
                    "canary": standing.to_document(),
                    "replicas": [*replicas, replica(None, 4)],
                }
            ],
        }
    )
    assert status_text.splitlines() == [
        "tiny at http://127.0.0.1:8000",
        "artifact   /models/old",
        "version    old (1 of 3), new (1 of 3), starting (1 of 3)",
        "candidate  new: answers 25% of the requests (fine)",
        "           500 of 500 texts, the same answer to 490, 0.98 times as long",
        "           80 requests answered, 1 of them with 500 or above",
        "replicas   2 of 3 up, 2 ready",
        "queue      4 texts, 80 tokens",
        "requests   2,450 with 200, 3 with 503",
        "drift      unknown input; score 0.31, tokens 0.05",
    ]


def test_without_a_trial_or_a_reference_it_says_less() -> None:
    replicas = [replica("old", requests={}, drift=None)]
    model = {"name": "t", "artifact": "f", "canary": None, "replicas": replicas}
    lines = admin_socket.format_status({"address": "a", "models": [model, {**model, "name": "u"}]}).splitlines()
    assert [lines[0], *lines[7:9]] == ["t at a", "", "u at a"]
    assert lines[3:7] == [
        "replicas   1 of 1 up, 1 ready",
        "queue      2 texts, 40 tokens",
        "requests   none",
        "drift      not measured: the artifact has no baseline",
    ]
