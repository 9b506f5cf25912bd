"""`rtrain serve --standalone`: the endpoint as one process that can import neither Ray nor torch."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rtrain.config import ServeConfig
from rtrain.core.errors import ConfigError
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from serve import standalone
from serve.ingress.address import open_listener
from serve.model_info import build_model_info
from tests.serve.test_deployment import openvino_artifact
from tests.support.certificates import make_certificate
from tests.support.refusals import refused_with
from tests.support.reports import write_predictions
from tests.support.root import ROOT
from tests.unit.runs.test_bundle import RESTRICTED, modules_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXT = "where is my parcel"
WORDS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["standalone"]]


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openvino_artifact(tmp_path_factory.mktemp("alone") / "artifact")


def small() -> list[str]:
    """The command, in a process that can import only the core, the extra and their dependencies."""
    return [sys.executable, "-c", RESTRICTED, ",".join(sorted(modules_of(WORDS)))]


@contextmanager
def answering(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, *words: str
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """(address, process) of an endpoint."""
    command_line = [*command, "serve", str(folder), "--standalone", "--ungated", "--port", "0", *words]
    with subprocess.Popen(command_line, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            while (line := process.stderr.readline()) and not line.startswith("next: "):
                lines.append(line)
            match = re.search(r"https?://127\.0\.0\.1:\d+", line)
            assert match is not None, "".join(lines)
            yield match[0], process
        finally:
            process.kill()


def predict_scores(url: str, text: str, path: str = "/predict") -> dict[str, float]:
    """The score of each label."""
    body, kind = json.dumps({"inputs": [text]}).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", body, kind)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as reply:
        [answer] = json.load(reply)
    return {row["label"]: row["score"] for row in answer}


def read(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as reply:
        text: str = reply.read().decode()
        return text


@pytest.fixture(scope="module")
def several(int8: Path) -> Iterator[str]:
    """The address of an endpoint of two models."""
    with answering(small(), int8, None, f"second={int8}") as (url, _):
        yield url


def test_several_models_each_have_their_name(int8: Path, several: str) -> None:
    first, other = (
        predict_scores(several, TEXT, f"/models/{name}/predict")
        for name in (artifact.read_artifact(int8).name, "second")
    )
    assert first == other
    assert json.loads(read(f"{several}/v2/health/ready")) == {"ready": True}
    assert "rtrain_" in read(f"{several}/metrics")


def test_without_pyarrow_the_examples_are_the_task_s(int8: Path, several: str) -> None:
    texts = ["could you find my parcel", "the invoice lists an item twice"]
    write_predictions(int8.parent, ["a", "b"], ["a", "b"], text=texts, split="valid", measured=False)
    predictor = Predictor.load(int8)
    assert build_model_info(predictor, ServeConfig())["examples"] == texts
    about = json.loads(read(f"{several}/models/second/info"))
    assert about["examples"] == predictor.task.example_inputs(predictor.head)


def test_a_port_in_use_is_refused(int8: Path, several: str) -> None:
    port = several.rpartition(":")[2]
    command_line = [*small(), "serve", str(int8), "--standalone", "--ungated", "--port", port]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 1
    assert port in done.stderr


def test_a_renewed_certificate_is_that_of_new_connections(int8: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = ("--set", f"serve.tls_cert={certificate}", "--set", f"serve.tls_key={key}")
    with answering(small(), int8, None, *tls) as (url, _):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        assert ssl.get_server_certificate(address) == Path(certificate).read_text()
        make_certificate(tmp_path)
        give_up = time.monotonic() + 60
        while ssl.get_server_certificate(address) != Path(certificate).read_text():
            assert time.monotonic() < give_up
            time.sleep(0.1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_answers_as_predict_does_and_ends_when_it_is_told(int8: Path, number: signal.Signals, code: int) -> None:
    with answering(small(), int8) as (url, process):
        [expected] = Predictor.load(int8)([TEXT])
        assert predict_scores(url, TEXT) == pytest.approx({row["label"]: row["score"] for row in expected}, abs=1e-5)
        process.send_signal(number)
        assert process.wait(30) == code


@pytest.mark.parametrize(
    "settings",
    [{"replicas": 2}, {"max_replicas": 3}, {"gpus": 1}, {"labels": {"for": "answers"}}, {"ingress": "haproxy"}],
)
def test_what_one_process_cannot_do_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        standalone.check_standalone_settings(ServeConfig(**settings))
    problems = [(problem.field, problem.code) for problem in refused.value.problems]
    assert problems == [(f"serve.{name}", "conflicting_settings") for name in settings]


def test_a_port_of_grpc_s_in_use_is_refused(int8: Path) -> None:
    """gRPC would share it with another endpoint, and each would answer some of the other's clients."""
    with open_listener("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with refused_with("port_in_use"):
            standalone.run_standalone({"tiny": int8}, ServeConfig(port=0, grpc_port=port), lambda address: None)


def test_an_endpoint_whose_second_server_does_not_start_does_not_start(
    int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lifespan=on, uvicorn ignores a failed start of the application."""
    monkeypatch.setattr(standalone, "refuse_grpc_port", lambda host, port: None)  # it was taken a moment later
    with open_listener("127.0.0.1", 0) as other, refused_with("port_in_use"):
        standalone.run_standalone(
            {"tiny": int8}, ServeConfig(port=0, grpc_port=other.getsockname()[1]), lambda address: None
        )
