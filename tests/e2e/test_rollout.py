"""An update and the way back, under load by real clients: nothing is lost, and nothing unproven answers."""

import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.utils

import rtrain.inference.artifact
import rtrain.inference.predictor
from rtrain.config import ServeConfig
from rtrain.core import manifest
from rtrain.inference.artifact import ArtifactError
from rtrain.inference.predictor import Predictor
from serve.deployment import Endpoint, start_endpoint
from serve.ingress.address import find_free_address
from serve.rollout import admin_socket, canary
from tests.serve.test_deployment import openvino_artifact, processes
from tests.support.processes import end
from tests.support.refusals import refused_with
from tests.support.root import ROOT

CLIENTS = 4
REPLICAS = 2


@dataclass
class LoadResult:
    versions: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    """Best labels of the answers, all to the same text."""
    errors: list[str] = field(default_factory=list)
    """Whatever was no 200, raw."""
    retried_errors: list[str] = field(default_factory=list)
    """Statuses other than 200 of the second attempt of clients that retry."""
    slowest_s: float = 0.0
    failed_at: list[float] = field(default_factory=list)
    """Moments of the monotonic clock at which questions were asked that failed."""
    first_at: dict[str, float] = field(default_factory=dict)
    last_at: dict[str, float] = field(default_factory=dict)
    """Moments at which a version's first and last answers came."""

    @property
    def outage_s(self) -> float:
        """From the first question that failed to the last one."""
        return max(self.failed_at) - min(self.failed_at) if self.failed_at else 0.0

    def beside_s(self, old: str, new: str) -> float:
        """For how long both have answered."""
        return max(0.0, self.last_at[old] - self.first_at[new])


Ask = Callable[[], tuple[str, str, str]]
"""Send one request; returns the error, or version and best label."""


@contextmanager
def load(port: int, pause_s: float = 0.0, again_s: float | None = None) -> Iterator[LoadResult]:
    """Clients that ask, with a pause between two questions, over kept connections, for the block. `again_s`: so many
    seconds after another status than 200 they retry."""

    @contextmanager
    def client() -> Iterator[Ask]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

        def ask() -> tuple[str, str, str]:
            try:
                connection.request("POST", "/predict", b'{"inputs": "hello"}', {"content-type": "application/json"})
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                return repr(error), "", ""
            if answer.status != 200:
                return f"{answer.status} {body!r}", "", ""
            return "", answer.headers["x-model-version"], json.loads(body)[0][0]["label"]

        with closing(connection):
            yield ask

    with _run_clients(client, CLIENTS, pause_s, again_s) as result:
        yield result


@contextmanager
def grpc_load(port: int, clients: int = 1, pause_s: float = 0.0, again_s: float | None = None) -> Iterator[LoadResult]:
    """The same over gRPC."""

    @contextmanager
    def client() -> Iterator[Ask]:
        text = tritonclient.grpc.InferInput("text", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"hello"], dtype=np.object_))

        def ask() -> tuple[str, str, str]:
            try:
                reply = grpc_client.infer("tiny", [text], client_timeout=30)
            except tritonclient.utils.InferenceServerException as error:
                return f"{error.status()} {error.message()}", "", ""
            return "", reply.get_response().model_version, str(reply.as_numpy("label")[0], "utf-8")

        # Else all clients of a process share one connection.
        channel_args = [("grpc.use_local_subchannel_pool", 1)]
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}", channel_args=channel_args) as grpc_client:
            yield ask

    with _run_clients(client, clients, pause_s, again_s) as result:
        yield result


@contextmanager
def _run_clients(
    client: Callable[[], AbstractContextManager[Ask]], clients: int, pause_s: float, again_s: float | None
) -> Iterator[LoadResult]:
    result, over, lock = LoadResult(), threading.Event(), threading.Lock()

    def run() -> None:
        with client() as ask:
            while not over.wait(pause_s):
                began = time.monotonic()
                problem, version, label = ask()
                took = time.monotonic() - began
                second = ""
                if problem and again_s is not None:
                    time.sleep(again_s)
                    second = ask()[0]
                with lock:
                    now = time.monotonic()
                    result.slowest_s = max(result.slowest_s, took)
                    if problem:
                        result.errors.append(problem)
                        result.failed_at.append(began)
                        result.retried_errors += [second] if second else []
                    else:
                        result.versions[version] += 1
                        result.labels[label] += 1
                        result.first_at.setdefault(version, now)
                        result.last_at[version] = now

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield result
    finally:
        over.set()
        for thread in threads:
            thread.join()


def tampered(artifact: Path, folder: Path) -> Path:
    """Consistent files, and golden answers that the model does not give."""
    shutil.copytree(artifact, folder)
    document = json.loads((folder / "artifact.json").read_text())
    document["golden"][0]["logits"][0] += 1
    (folder / "artifact.json").write_text(json.dumps(document))
    manifest.write_manifest(folder)
    return folder


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_an_update_and_the_way_back_lose_no_request(tmp_path: Path) -> None:
    first = openvino_artifact(tmp_path / "first")
    second = openvino_artifact(tmp_path / "second", seed=1)
    bad = tampered(first, tmp_path / "bad")
    cut = Path(shutil.copytree(first, tmp_path / "cut"))
    (cut / "model.int8.bin").write_bytes(b"x" + (cut / "model.int8.bin").read_bytes()[1:])
    old, new = (rtrain.inference.artifact.read_artifact(folder).version for folder in (first, second))
    assert old != new
    settings = ServeConfig(ungated=True, port=0, replicas=REPLICAS, grpc_port=find_free_address("127.0.0.1", 0).port)
    assert settings.grpc_port is not None
    with (
        start_endpoint(first, settings) as endpoint,
        load(endpoint.port) as result,
        grpc_load(settings.grpc_port) as over_grpc,
    ):
        with refused_with("no_previous_version"):
            endpoint.handle_command({"rollback": True})
        with refused_with("already_serving"):
            endpoint.handle_command({"update": str(first)})
        time.sleep(1)
        assert endpoint.handle_command({"update": str(second)}) == f"{new} answers in place of {old}"
        switched = result.versions[old]
        time.sleep(1)
        # Requests that were under way when every replica had switched, and no others.
        assert result.versions[old] - switched <= CLIENTS
        beside_s = result.beside_s(old, new)
        with refused_with("refused"):
            endpoint.handle_command({"update": str(bad)})
        with pytest.raises(ArtifactError):
            endpoint.handle_command({"update": str(cut)})
        time.sleep(1)
        assert endpoint.handle_command({"rollback": True}) == f"{old} answers in place of {new}"
        time.sleep(1)
    sys.stderr.write(f"{result.versions.total()} requests, slowest {result.slowest_s:.2f} s, {result.versions}\n")
    sys.stderr.write(f"side by side for {beside_s:.3f} s\n")
    sys.stderr.write(f"over gRPC {over_grpc.versions}\n")
    for load_result in (result, over_grpc):
        assert load_result.errors == []
        assert set(load_result.versions) == {old, new}
        assert min(load_result.versions.values()) > 100
    assert beside_s <= 1


def await_canary_end(endpoint: Endpoint, stage: str) -> dict[str, Any]:
    """Status of the endpoint after its canary has ended in that stage."""
    give_up = time.monotonic() + 240
    while time.monotonic() < give_up:
        [status] = json.loads(endpoint.handle_command({"status": True}))["models"]
        if status["canary"]["stage"] in ("promoted", "dropped") and not endpoint.rollouts["tiny"].has_running_canary:
            assert status["canary"]["stage"] == stage, status["canary"]
            return dict(status)
    raise AssertionError(status)


def replicas() -> list[psutil.Process]:
    return [process for process in processes("ServeReplica:rtrain") if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("copies", [1, 3])
def test_a_trial_promotes_a_candidate_that_agrees_and_drops_one_that_does_not(tmp_path: Path, copies: int) -> None:
    def make_artifact_of_seed(seed: int) -> Path:
        return openvino_artifact(tmp_path / f"seed {seed}", seed)

    def answer(folder: Path) -> str:
        """To the one text that the load asks."""
        label: str = Predictor.load(folder, threads=1)(["hello"])[0][0]["label"]
        return label

    first = make_artifact_of_seed(0)
    like = Path(shutil.copytree(first, tmp_path / "like"))
    rtrain.inference.artifact.write_artifact(
        like,
        replace(rtrain.inference.artifact.read_artifact(first), facts={"note": "the same weights"}),
        rtrain.inference.predictor.compute_golden_logits,
    )
    unlike = next(folder for seed in range(1, 9) if answer(folder := make_artifact_of_seed(seed)) != answer(first))
    old, new, other = (rtrain.inference.artifact.read_artifact(folder).version for folder in (first, like, unlike))
    assert len({old, new, other}) == 3
    aim = canary.CanaryPolicy(
        traffic_share=0.5, min_rows=100, min_agreement=0.9, max_latency_ratio=3.0, timeout_s=180.0
    )
    settings = ServeConfig(ungated=True, port=0, replicas=copies)
    with start_endpoint(first, settings) as endpoint, load(endpoint.port, pause_s=0.02) as result:
        message = endpoint.handle_command({"update": str(unlike), "policy": [*aim]})
        assert message.startswith(f"canary of {other}: it answers 50 % of the texts beside {old}")
        with refused_with("busy"):
            endpoint.handle_command({"update": str(like)})
        status = await_canary_end(endpoint, "dropped")
        assert "the same answer to 0 of 1" in status["canary"]["reason"]
        assert set(result.versions) == {old}
        endpoint.handle_command({"update": str(like), "policy": [*aim]})
        if copies > 1:  # a replica that starts during the change follows
            time.sleep(2)
            replicas()[0].kill()
        status = await_canary_end(endpoint, "promoted")
        assert [replica["version"] for replica in status["replicas"]] == [new] * copies
        assert status["canary"]["stats"]["rows"] >= 100
        assert endpoint.handle_command({"rollback": True}) == f"{old} answers in place of {new}"
        endpoint.handle_command({"update": str(like), "policy": [*aim._replace(traffic_share=0.0)]})
        assert endpoint.handle_command({"rollback": True}) == f"{new}: dropped by rollback; {old} keeps serving"
        text = "\n".join(admin_socket.format_status(json.loads(endpoint.handle_command({"status": True}))).splitlines())
        assert f"version    {old} ({copies} of {copies})" in text
    sys.stderr.write(
        f"{copies}: {result.versions}, slowest {result.slowest_s:.2f} s, {Counter(result.errors)}\n{text}\n"
    )
    assert set(result.versions) == {old, new}
    assert result.errors == []


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rtrain", "serve", *words]


@contextmanager
def answering(*words: str, group: bool = False) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """The command, and its port of 127.0.0.1 once it answers there. `group`: it has one of its own, as in a shell."""
    arguments, pipe = command(*words, "--port", "0"), subprocess.PIPE
    with subprocess.Popen(arguments, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=group) as process:
        try:
            assert process.stderr is not None
            output = ""
            while not (match := re.search(r"serving .* at http://127\.0\.0\.1:(\d+) ", output)):
                line = process.stderr.readline()
                assert line, output
                output += line
            yield process, int(match[1])
        finally:
            end(process)


def run(*words: str) -> tuple[int, str]:
    done = subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.serve
def test_commands_change_what_another_one_serves_and_sigterm_ends_it_in_silence(tmp_path: Path) -> None:
    first = openvino_artifact(tmp_path / "first")
    second = openvino_artifact(tmp_path / "second", seed=1)
    old, new = (rtrain.inference.artifact.read_artifact(folder).version for folder in (first, second))
    with answering(str(first), "--ungated") as (process, number):
        port = str(number)
        with load(number) as result:
            assert run("--update", str(second), "--port", port) == (0, f"{new} answers in place of {old}\n")
            assert run("--rollback", "--port", port) == (0, f"{old} answers in place of {new}\n")
            code, text = run("--update", str(tmp_path), "--port", port)
            assert code != 0
            assert "is no artifact" in text
            assert result.errors == []
            process.terminate()
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "")
    assert [line for line in err.splitlines() if not line.startswith("next: ")] == [
        "ending Ray",
        "rtrain: ended by SIGTERM",
    ]
    assert run("--rollback", "--port", port)[0] != 0
