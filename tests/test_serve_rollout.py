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
from rtrain.config import Serve
from rtrain.core import manifest
from rtrain.inference.artifact import ArtifactError
from rtrain.inference.predictor import Predictor
from serve.deployment import Endpoint, start
from serve.ingress.address import free_address
from serve.rollout import admin_socket, canary
from tests.processes import end
from tests.refusals import refused_with
from tests.root import ROOT
from tests.test_serve_deployment import openvino_artifact, processes

CLIENTS = 4
REPLICAS = 2


@dataclass
class Seen:
    versions: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    """Best labels of the answers, all to the same text."""
    errors: list[str] = field(default_factory=list)
    """Whatever was no 200, raw."""
    again: list[str] = field(default_factory=list)
    """What was no 200 the second time either, of clients that ask once more."""
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
"""A question of a client: what went wrong, and of an answer its version and its best label."""


@contextmanager
def load(port: int, pause_s: float = 0.0, again_s: float | None = None) -> Iterator[Seen]:
    """Clients that ask, with a pause between two questions, over kept connections, for the block. `again_s`: so many
    seconds after what was no 200 they ask once more."""

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

    with _asked(client, CLIENTS, pause_s, again_s) as seen:
        yield seen


@contextmanager
def grpc_load(port: int, clients: int = 1, pause_s: float = 0.0, again_s: float | None = None) -> Iterator[Seen]:
    """The same over gRPC."""

    @contextmanager
    def client() -> Iterator[Ask]:
        text = tritonclient.grpc.InferInput("text", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"hello"], dtype=np.object_))

        def ask() -> tuple[str, str, str]:
            try:
                reply = asked.infer("tiny", [text], client_timeout=30)
            except tritonclient.utils.InferenceServerException as error:
                return f"{error.status()} {error.message()}", "", ""
            return "", reply.get_response().model_version, str(reply.as_numpy("label")[0], "utf-8")

        # Else all clients of a process share one connection.
        own = [("grpc.use_local_subchannel_pool", 1)]
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}", channel_args=own) as asked:
            yield ask

    with _asked(client, clients, pause_s, again_s) as seen:
        yield seen


@contextmanager
def _asked(
    client: Callable[[], AbstractContextManager[Ask]], clients: int, pause_s: float, again_s: float | None
) -> Iterator[Seen]:
    seen, over, lock = Seen(), threading.Event(), threading.Lock()

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
                    seen.slowest_s = max(seen.slowest_s, took)
                    if problem:
                        seen.errors.append(problem)
                        seen.failed_at.append(began)
                        seen.again += [second] if second else []
                    else:
                        seen.versions[version] += 1
                        seen.labels[label] += 1
                        seen.first_at.setdefault(version, now)
                        seen.last_at[version] = now

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
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
    manifest.write(folder)
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
    old, new = (rtrain.inference.artifact.read(folder).version for folder in (first, second))
    assert old != new
    settings = Serve(ungated=True, port=0, replicas=REPLICAS, grpc_port=free_address("127.0.0.1", 0).port)
    assert settings.grpc_port is not None
    with (
        start(first, settings) as endpoint,
        load(endpoint.port) as seen,
        grpc_load(settings.grpc_port) as over_grpc,
    ):
        with refused_with("nothing_before"):
            endpoint.change({"rollback": True})
        with refused_with("already_serving"):
            endpoint.change({"update": str(first)})
        time.sleep(1)
        assert endpoint.change({"update": str(second)}) == f"{new} answers in place of {old}"
        switched = seen.versions[old]
        time.sleep(1)
        # Requests that were under way when every replica had switched, and no others.
        assert seen.versions[old] - switched <= CLIENTS
        beside_s = seen.beside_s(old, new)
        with refused_with("refused"):
            endpoint.change({"update": str(bad)})
        with pytest.raises(ArtifactError):
            endpoint.change({"update": str(cut)})
        time.sleep(1)
        assert endpoint.change({"rollback": True}) == f"{old} answers in place of {new}"
        time.sleep(1)
    sys.stderr.write(f"{seen.versions.total()} requests, slowest {seen.slowest_s:.2f} s, {seen.versions}\n")
    sys.stderr.write(f"side by side for {beside_s:.3f} s\n")
    sys.stderr.write(f"over gRPC {over_grpc.versions}\n")
    for one in (seen, over_grpc):
        assert one.errors == []
        assert set(one.versions) == {old, new}
        assert min(one.versions.values()) > 100
    assert beside_s <= 1


def ended(endpoint: Endpoint, stage: str) -> dict[str, Any]:
    """What the endpoint says of itself, once its trial has ended so."""
    give_up = time.monotonic() + 240
    while time.monotonic() < give_up:
        [found] = json.loads(endpoint.change({"status": True}))["models"]
        if found["trial"]["stage"] in ("promoted", "dropped") and not endpoint.rollouts["tiny"].on_trial:
            assert found["trial"]["stage"] == stage, found["trial"]
            return dict(found)
    raise AssertionError(found)


def replicas() -> list[psutil.Process]:
    return [one for one in processes("ServeReplica:rtrain") if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("copies", [1, 3])
def test_a_trial_promotes_a_candidate_that_agrees_and_drops_one_that_does_not(tmp_path: Path, copies: int) -> None:
    def made(seed: int) -> Path:
        return openvino_artifact(tmp_path / f"seed {seed}", seed)

    def answer(folder: Path) -> str:
        """To the one text that the load asks."""
        label: str = Predictor.load(folder, threads=1)(["hello"])[0][0]["label"]
        return label

    first = made(0)
    like = Path(shutil.copytree(first, tmp_path / "like"))
    rtrain.inference.artifact.write(
        like,
        replace(rtrain.inference.artifact.read(first), facts={"note": "the same weights"}),
        rtrain.inference.predictor.golden_logits,
    )
    unlike = next(folder for seed in range(1, 9) if answer(folder := made(seed)) != answer(first))
    old, new, other = (rtrain.inference.artifact.read(folder).version for folder in (first, like, unlike))
    assert len({old, new, other}) == 3
    aim = canary.Aim(share=0.5, rows=100, agreement=0.9, slower=3.0, seconds=180.0)
    settings = Serve(ungated=True, port=0, replicas=copies)
    with start(first, settings) as endpoint, load(endpoint.port, pause_s=0.02) as seen:
        said = endpoint.change({"update": str(unlike), "trial": [*aim]})
        assert said.startswith(f"{other} is on trial: it answers 50 % of the texts beside {old}")
        with refused_with("busy"):
            endpoint.change({"update": str(like)})
        found = ended(endpoint, "dropped")
        assert "the same answer to 0 of 1" in found["trial"]["reason"]
        assert set(seen.versions) == {old}
        endpoint.change({"update": str(like), "trial": [*aim]})
        if copies > 1:  # one that comes in mid-change follows
            time.sleep(2)
            replicas()[0].kill()
        found = ended(endpoint, "promoted")
        assert [one["version"] for one in found["replicas"]] == [new] * copies
        assert found["trial"]["seen"]["rows"] >= 100
        assert endpoint.change({"rollback": True}) == f"{old} answers in place of {new}"
        endpoint.change({"update": str(like), "trial": [*aim._replace(share=0.0)]})
        assert endpoint.change({"rollback": True}) == f"{new}: dropped by hand; {old} goes on"
        text = "\n".join(admin_socket.format_status(json.loads(endpoint.change({"status": True}))).splitlines())
        assert f"version    {old} ({copies} of {copies})" in text
    sys.stderr.write(f"{copies}: {seen.versions}, slowest {seen.slowest_s:.2f} s, {Counter(seen.errors)}\n{text}\n")
    assert set(seen.versions) == {old, new}
    assert seen.errors == []


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rtrain", "serve", *words]


@contextmanager
def answering(*words: str, group: bool = False) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """The command, and its port of 127.0.0.1 once it answers there. `group`: it has one of its own, as in a shell."""
    given, pipe = command(*words, "--port", "0"), subprocess.PIPE
    with subprocess.Popen(given, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=group) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+) ", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield process, int(found[1])
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
    old, new = (rtrain.inference.artifact.read(folder).version for folder in (first, second))
    with answering(str(first), "--ungated") as (process, number):
        port = str(number)
        with load(number) as seen:
            assert run("--update", str(second), "--port", port) == (0, f"{new} answers in place of {old}\n")
            assert run("--rollback", "--port", port) == (0, f"{old} answers in place of {new}\n")
            code, text = run("--update", str(tmp_path), "--port", port)
            assert code != 0
            assert "is no artefact" in text
            assert seen.errors == []
            process.terminate()
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "")
    assert [line for line in err.splitlines() if not line.startswith("next: ")] == [
        "ending Ray",
        "rtrain: ended by SIGTERM",
    ]
    assert run("--rollback", "--port", port)[0] != 0
