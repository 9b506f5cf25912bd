"""`rtrain serve --alone`: the endpoint as one process that can import neither Ray nor torch."""

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

from rtrain.config import Serve
from rtrain.core.errors import ConfigError
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from serve import standalone
from serve.ingress.address import listening
from serve.model_info import describe
from tests.certificates import make_certificate
from tests.refusals import refused_with
from tests.reports import write_predictions
from tests.root import ROOT
from tests.test_inventory_parcel import ALONE, modules_of
from tests.test_serve_deployment import openvino_artifact

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXT = "where is my parcel"
WORDS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["alone"]]


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openvino_artifact(tmp_path_factory.mktemp("alone") / "artifact")


def small() -> list[str]:
    """The command, in a process that can import the core, the extra and what they need, alone."""
    return [sys.executable, "-c", ALONE, ",".join(sorted(modules_of(WORDS)))]


@contextmanager
def answering(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, *words: str
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """(address, process) of an endpoint."""
    given = [*command, "serve", str(folder), "--alone", "--ungated", "--port", "0", *words]
    with subprocess.Popen(given, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            while (line := process.stderr.readline()) and not line.startswith("next: "):
                lines.append(line)
            found = re.search(r"https?://127\.0\.0\.1:\d+", line)
            assert found is not None, "".join(lines)
            yield found[0], process
        finally:
            process.kill()


def asked(url: str, text: str, path: str = "/predict") -> dict[str, float]:
    """The score of each label."""
    body, kind = json.dumps({"inputs": [text]}).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", body, kind)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as reply:
        [answer] = json.load(reply)
    return {row["label"]: row["score"] for row in answer}


def read(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as reply:
        found: str = reply.read().decode()
        return found


@pytest.fixture(scope="module")
def several(int8: Path) -> Iterator[str]:
    """The address of an endpoint of two models."""
    with answering(small(), int8, None, f"second={int8}") as (url, _):
        yield url


def test_several_models_each_have_their_name(int8: Path, several: str) -> None:
    one, other = (asked(several, TEXT, f"/models/{name}/predict") for name in (artifact.read(int8).name, "second"))
    assert one == other
    assert json.loads(read(f"{several}/v2/health/ready")) == {"ready": True}
    assert "rtrain_" in read(f"{several}/metrics")


def test_without_pyarrow_the_examples_are_the_task_s(int8: Path, several: str) -> None:
    texts = ["could you find my parcel", "the invoice lists an item twice"]
    write_predictions(int8.parent, ["a", "b"], ["a", "b"], text=texts, split="valid", measured=False)
    predictor = Predictor.load(int8)
    assert describe(predictor, Serve())["examples"] == texts
    about = json.loads(read(f"{several}/models/second/info"))
    assert about["examples"] == predictor.task.examples(predictor.head)


def test_a_port_in_use_is_refused(int8: Path, several: str) -> None:
    port = several.rpartition(":")[2]
    given = [*small(), "serve", str(int8), "--alone", "--ungated", "--port", port]
    done = subprocess.run(given, capture_output=True, text=True, check=False, env=dict(os.environ))
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
        assert asked(url, TEXT) == pytest.approx({row["label"]: row["score"] for row in expected}, abs=1e-5)
        process.send_signal(number)
        assert process.wait(30) == code


@pytest.mark.parametrize(
    "settings",
    [{"replicas": 2}, {"max_replicas": 3}, {"gpus": 1}, {"labels": {"for": "answers"}}, {"ingress": "haproxy"}],
)
def test_what_one_process_cannot_do_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        standalone.check(Serve(**settings))
    found = [(one.field, one.code) for one in refused.value.problems]
    assert found == [(f"serve.{name}", "conflicting_settings") for name in settings]


def test_a_port_of_grpc_s_in_use_is_refused(int8: Path) -> None:
    """gRPC would share it with another endpoint, and each would answer some of the other's clients."""
    with listening("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with refused_with("port_in_use"):
            standalone.run({"tiny": int8}, Serve(port=0, grpc_port=port), lambda address: None)


def test_an_endpoint_whose_second_server_does_not_start_does_not_start(
    int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn goes on without the application's own start, where it is not told that there has to be one."""
    monkeypatch.setattr(standalone, "refuse_grpc_port", lambda host, port: None)  # it was taken a moment later
    with listening("127.0.0.1", 0) as other, refused_with("port_in_use"):
        standalone.run({"tiny": int8}, Serve(port=0, grpc_port=other.getsockname()[1]), lambda address: None)
