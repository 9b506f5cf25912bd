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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import rtrain.artifact
from rtrain import manifest
from rtrain.artifact import ArtifactError
from rtrain.config import Serve
from rtrain.errors import UserError
from serve.deployment import start
from tests.test_serve_deployment import openvino_artifact

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = 4
REPLICAS = 2


@dataclass
class Seen:
    versions: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    """Whatever was no 200, raw: no client asks twice."""
    slowest_s: float = 0.0


@contextmanager
def load(port: int) -> Iterator[Seen]:
    """Clients that ask without a pause, over kept connections, for the block."""
    seen, over, lock = Seen(), threading.Event(), threading.Lock()

    def run() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while not over.is_set():
            began = time.monotonic()
            try:
                connection.request("POST", "/predict", b'{"inputs": "hello"}', {"content-type": "application/json"})
                answer = connection.getresponse()
                body, version = answer.read(), answer.headers["x-model-version"]
                problem = "" if answer.status == 200 else f"{answer.status} {body!r}"
            except (OSError, http.client.HTTPException) as error:
                problem, version = repr(error), ""
                connection.close()
            with lock:
                seen.slowest_s = max(seen.slowest_s, time.monotonic() - began)
                if problem:
                    seen.errors.append(problem)
                else:
                    seen.versions[version] += 1
        connection.close()

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
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
    old, new = (rtrain.artifact.read(folder).version for folder in (first, second))
    assert old != new
    with start(first, Serve(ungated=True, port=0, replicas=REPLICAS)) as endpoint, load(endpoint.port) as seen:
        with pytest.raises(UserError, match="nothing was served before"):
            endpoint.change({"rollback": True})
        with pytest.raises(UserError, match="is what answers already"):
            endpoint.change({"update": str(first)})
        time.sleep(1)
        assert endpoint.change({"update": str(second)}) == f"{new} answers in place of {old}"
        switched = seen.versions[old]
        time.sleep(1)
        # Requests that were under way when every replica had switched, and no others.
        assert seen.versions[old] - switched <= CLIENTS
        with pytest.raises(UserError, match=rf"is not served, {new} goes on: .*does not reproduce its golden answers"):
            endpoint.change({"update": str(bad)})
        with pytest.raises(ArtifactError):
            endpoint.change({"update": str(cut)})
        time.sleep(1)
        assert endpoint.change({"rollback": True}) == f"{old} answers in place of {new}"
        time.sleep(1)
    sys.stderr.write(f"{seen.versions.total()} requests, slowest {seen.slowest_s:.2f} s, {seen.versions}\n")
    assert seen.errors == []
    assert set(seen.versions) == {old, new}
    assert min(seen.versions.values()) > 100


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_the_end_under_load_answers_what_was_accepted(tmp_path: Path) -> None:
    """Connections are refused or closed between two requests; none is cut in one."""
    with start(openvino_artifact(tmp_path), Serve(ungated=True, port=0)) as endpoint, load(endpoint.port) as seen:
        time.sleep(1)
        began = time.monotonic()
        endpoint.close()
        took = time.monotonic() - began
    sys.stderr.write(f"{seen.versions.total()} requests, end {took:.1f} s, {Counter(seen.errors)}\n")
    assert seen.versions.total() > 50
    between = ("ConnectionRefusedError", "RemoteDisconnected", "ConnectionResetError", "BrokenPipeError")
    assert [error for error in seen.errors if not error.startswith(between)] == []


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rtrain", "serve", *words]


def run(*words: str) -> tuple[int, str]:
    done = subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.serve
def test_commands_change_what_another_one_serves_and_sigterm_ends_it_in_silence(tmp_path: Path) -> None:
    first = openvino_artifact(tmp_path / "first")
    second = openvino_artifact(tmp_path / "second", seed=1)
    old, new = (rtrain.artifact.read(folder).version for folder in (first, second))
    words = command(str(first), "--ungated", "--port", "0")
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+) ", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        port = found[1]
        with load(int(port)) as seen:
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
