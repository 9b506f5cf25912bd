"""The endpoint on Ray Serve, over real sockets: refusals, answers, cleanup."""

import atexit
import contextlib
import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import httpx
import psutil
import pytest
import ray
import ray.serve
from huggingface_hub import constants

import rtrain.inference.artifact
import rtrain.inference.predictor
from rtrain.compress.exporters.base import disable_telemetry
from rtrain.config import ServeConfig
from rtrain.core import manifest
from rtrain.core.errors import ConfigError, UserError
from rtrain.inference.artifact import ArtifactError
from rtrain.inference.predictor import Predictor
from serve import deployment
from serve.deployment import Endpoint, choose_cpu_reservation, start_endpoint
from serve.ingress import ingress_choice
from serve.ingress.address import Address, find_free_address
from tests.support import contract
from tests.support.root import ROOT
from tests.support.tiny import make_artifact
from tests.unit.serve.test_clients import triton_asks_over_grpc, triton_asks_over_http
from tests.unit.serve.test_drift import reference_of

LABELS = ("a", "b", "c")
REPLICAS = 2


def openvino_artifact(folder: Path, seed: int = 0) -> Path:
    """The tiny model as a graph of the int8 artifacts' engine (not quantized: that is tested elsewhere)."""
    shutil.copytree(_converted(seed), folder, dirs_exist_ok=True)
    return folder


@cache
def _converted(seed: int) -> Path:
    """It takes seconds, and many tests want one."""
    disable_telemetry()
    import openvino
    import torch
    import transformers
    from openvino.tools.ovc import convert_model  # `openvino` lacks it where an artifact was answered before

    folder = Path(mkdtemp(prefix="rtrain-converted-"))
    atexit.register(shutil.rmtree, folder)
    artifact_of_seed = rtrain.inference.artifact.read_artifact(make_artifact(folder, LABELS, seed))
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    names = ("input_ids", "attention_mask", "token_type_ids")
    example = {name: torch.ones(2, 8, dtype=torch.int64) for name in names}
    graph = convert_model(model, example_input=example)
    openvino.save_model(graph, folder / "model.int8.xml", compress_to_fp16=False)
    rtrain.inference.artifact.write_artifact(
        folder, replace(artifact_of_seed, engine="openvino"), rtrain.inference.predictor.compute_golden_logits
    )
    return folder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a reference, so that its drift is watched."""
    folder = openvino_artifact(tmp_path_factory.mktemp("artifact"))
    settings = replace(
        rtrain.inference.artifact.read_artifact(folder), drift_baseline=reference_of(Predictor.load(folder, threads=1))
    )
    rtrain.inference.artifact.write_artifact(folder, settings, rtrain.inference.predictor.compute_golden_logits)
    return folder


def serve_actors() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == "serve"]


def processes(name: str) -> list[psutil.Process]:
    """Live processes of this test run's Ray that it named so."""
    results = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if name in " ".join(child.cmdline()):
                results.append(child)
    return results


# ---------------------------------------------------------------------------------------------------- without starting


def test_a_port_in_use_is_refused_with_what_to_do_about_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError) as refused:
            find_free_address("127.0.0.1", port)
        assert refused.value.code == "port_in_use"
    assert find_free_address("127.0.0.1", port) == Address("127.0.0.1", port)


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        find_free_address("192.0.2.77", 0)
    assert refused.value.code == "cannot_listen"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_url_is_one_that_can_be_opened_here(host: str, url: str) -> None:
    assert Address(host, 80).url == url


@pytest.mark.parametrize(
    ("free", "live", "may", "expected"),
    [
        ([4.0], [4.0], [4.0], (2, "")),
        ([2.0, 3.0], [2.0, 3.0], [2.0, 3.0], (2, "")),
        ([3.0, 1.0], [4.0, 4.0], [4.0, 4.0], (0, "Ray has free (4), and no node can come")),
        ([3.0], [4.0], [4.0, 4.0], (2, "are free: waiting for nodes")),
        ([0.0], [4.0], [4.0, 1.0], (0, "and no node can come")),
        ([], [], [8.0], (2, "waiting for nodes")),
    ],
)
def test_a_replica_reserves_its_threads_where_they_are_or_can_come(
    free: list[float], live: list[float], may: list[float], expected: tuple[int, str]
) -> None:
    is_free, is_up, may_be = ([{"CPU": cpus} for cpus in nodes] for nodes in (free, live, may))
    cpus, line = choose_cpu_reservation(ServeConfig(replicas=2, threads=2), is_free, is_up, may_be)
    assert cpus == expected[0]
    assert expected[1] in line
    assert bool(line) == bool(expected[1])


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_refusals_leave_nothing_behind(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for ports in ({"port": port}, {"port": 0, "grpc_port": port}):
            with pytest.raises(UserError) as refused:
                start_endpoint(artifact, ServeConfig(ungated=True, **ports))
            assert refused.value.code == "port_in_use"
    with pytest.raises(ArtifactError):
        start_endpoint(tmp_path, ServeConfig(ungated=True, port=0), name="given")
    monkeypatch.setattr(ingress_choice, "TEMP_FOLDER", str(tmp_path))
    monkeypatch.setattr(deployment, "choose_cpu_reservation", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start_endpoint(artifact, ServeConfig(ungated=True, port=0, ingress="haproxy"))
    assert list(tmp_path.glob("rtrain-*")) == []
    assert serve_actors() == []


@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_an_artifact_that_answers_otherwise_than_recorded_is_refused(artifact: Path, tmp_path: Path) -> None:
    for part in artifact.iterdir():
        (tmp_path / part.name).write_bytes(part.read_bytes())
    document = json.loads((tmp_path / "artifact.json").read_text())
    document["golden"][0]["logits"][0] += 1
    (tmp_path / "artifact.json").write_text(json.dumps(document))
    manifest.write_manifest(tmp_path)
    address = find_free_address("127.0.0.1", 0)
    with pytest.raises(UserError) as refused:
        start_endpoint(tmp_path, ServeConfig(ungated=True, port=address.port))
    assert refused.value.code == "cannot_be_served"
    assert serve_actors() == []
    assert address.is_free()


@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_without_haproxy_the_stock_proxy_takes_over_and_one_line_says_so(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere/haproxy")
    with pytest.raises(ConfigError) as refused:
        start_endpoint(artifact, ServeConfig(ungated=True, port=0, ingress="haproxy"))
    assert [(problem.field, problem.code) for problem in refused.value.problems] == [("serve.ingress", "unavailable")]
    messages: list[str] = []
    cpus = 1 + int(ray.cluster_resources()["CPU"])
    busy = ServeConfig(ungated=True, port=0, threads=cpus, **contract.SETTINGS)
    with start_endpoint(artifact, busy, name="stock", notify=messages.append) as endpoint:
        contract.ask(endpoint.url)
        assert processes("haproxy.cfg") == processes("ray::HAProxyManager") == []
    assert len(messages) == 2, "the slower proxy, and replicas that reserve no CPUs"
    assert "/nowhere/haproxy" in messages[0]
    assert serve_actors() == []


# ------------------------------------------------------------------------------------------------------------- serving


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return find_free_address("127.0.0.1", 0).port


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Messages of the endpoint."""
    return []


@pytest.fixture(scope="module")
def endpoint(artifact: Path, grpc_port: int, messages: list[str], ray_session: Path) -> Iterator[Endpoint]:
    settings = ServeConfig(ungated=True, port=0, grpc_port=grpc_port, replicas=REPLICAS, **contract.SETTINGS)
    with start_endpoint(artifact, settings, notify=messages.append) as endpoint:
        yield endpoint


@pytest.mark.serve
def test_the_example_of_the_page_runs_as_it_stands(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as the tests' own process is
    page = (ROOT / "docs" / "endpoint.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert "http://127.0.0.1:8000/predict" in example
    exec(example.replace("http://127.0.0.1:8000", endpoint.url), {})
    label, score = capsys.readouterr().out.split()
    assert label in LABELS
    assert 0 < float(score) <= 1


@pytest.mark.serve
def test_the_contract_holds_through_haproxy(endpoint: Endpoint) -> None:
    contract.ask(endpoint.url)
    # On Ray Serve's own way through a replica there would be a second one.
    assert len(httpx.get(f"{endpoint.url}/v2").headers.get_list("x-request-id")) == 1
    haproxy = [
        line for line in httpx.get(f"{endpoint.url}/metrics").text.splitlines() if "haproxy_errors_total{" in line
    ]
    assert haproxy == [f'rtrain_haproxy_errors_total{{status="{status}"}} 0.0' for status in (503, 504)]


@pytest.mark.serve
def test_tritons_clients_ask_replicas_as_they_ask_a_server(endpoint: Endpoint, artifact: Path, grpc_port: int) -> None:
    """Over HTTP through HAProxy, over gRPC each connection to some replica; the metrics are those of all of them."""

    def answered() -> float:
        lines = httpx.get(endpoint.url + "/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if "_requests_total" in line and "GRPCInference" in line)

    predictor, before = Predictor.load(artifact, threads=1), answered()
    triton_asks_over_http(endpoint.url, predictor, binary=True)
    for _ in range(4):
        triton_asks_over_grpc(f"127.0.0.1:{grpc_port}", predictor)
    assert answered() > before


@pytest.mark.serve
def test_a_client_cannot_switch_limits_off_through_the_proxy(endpoint: Endpoint) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"inputs": "'
        for _ in range(20):
            yield b"x" * 10_000
        yield b'"}'

    headers = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1"}
    with httpx.Client(base_url=endpoint.url, headers=headers) as client:
        large = client.post("/predict", content=chunks())
        assert large.status_code == 413
        assert large.json()["error"]["type"] == "too_large"
    # On another connection: the proxy ends this one some moments later, since not all of the body was read.
    assert httpx.post(f"{endpoint.url}/predict", json={"inputs": "next"}, headers=headers).status_code == 200


@pytest.mark.serve
def test_replicas_tell_their_own_drift_and_alarms(endpoint: Endpoint) -> None:
    for _ in range(30):
        unknown = ["ζζζ ξξξ ψψψ"] * 50
        assert httpx.post(endpoint.url + "/predict", json={"inputs": unknown}).status_code == 200
    messages = httpx.get(endpoint.url + "/metrics").text.splitlines()
    [model] = json.loads(endpoint.handle_command({"status": True}))["models"]
    drifts = [replica["drift"] for replica in model["replicas"]]
    assert len(drifts) == REPLICAS
    for feature in ("tokens", "unknown", "score", "labels"):
        lines = [line for line in messages if line.startswith(f'rtrain_drift_distance{{feature="{feature}",')]
        assert len({re.findall(r'replica="(.*?)"', line)[0] for line in lines}) == REPLICAS
        values = sorted(float(line.split()[1]) for line in lines)
        assert values == pytest.approx(sorted(drift["distances"][feature] for drift in drifts))
    alarms = [float(line.split()[1]) for line in messages if line.startswith("rtrain_drift_alarm{")]
    assert alarms == [1.0] * REPLICAS == [drift["alarm"] for drift in drifts]


@pytest.mark.serve
def test_replicas_of_an_int8_artifact_do_not_load_torch(endpoint: Endpoint) -> None:
    replicas = processes("ServeReplica:rtrain")
    assert len(replicas) == REPLICAS
    for replica in replicas:
        libraries = {Path(mapped.path).name for mapped in replica.memory_maps()}
        assert any("openvino" in library for library in libraries)
        assert [library for library in libraries if "libtorch" in library] == []


@pytest.mark.serve
def test_a_second_endpoint_on_the_same_ray_is_refused_and_the_first_goes_on(endpoint: Endpoint, artifact: Path) -> None:
    with pytest.raises(UserError) as refused:
        start_endpoint(artifact, ServeConfig(ungated=True, port=0))
    assert refused.value.code == "already_serving"
    assert httpx.post(endpoint.url + "/predict", json={"inputs": "hello"}).status_code == 200


@pytest.mark.serve
def test_close_leaves_no_actor_process_port_or_folder(endpoint: Endpoint, messages: list[str]) -> None:
    """The last of this file: it closes the endpoint of those before it."""
    names = ("ServeController", "HAProxyManager", "ServeReplica")
    actors = [process for name in names for process in processes(f"ray::{name}")]
    assert len(actors) == len(serve_actors()) == 2 + REPLICAS
    proxies = processes("haproxy.cfg")
    command_line = proxies[-1].cmdline()
    folder = Path(command_line[command_line.index("-f") + 1]).parents[1]
    assert folder.is_dir()
    endpoint.close()
    assert messages == []
    assert serve_actors() == []
    assert Address("127.0.0.1", endpoint.port).is_free()
    assert not folder.exists()
    assert psutil.wait_procs([*actors, *proxies], timeout=20)[1] == []
    endpoint.close()
