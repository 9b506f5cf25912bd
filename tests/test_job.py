"""Jobs on a head started as cluster.yaml starts it. The demo as one job, every stage of it read back, is slow."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rtrain import env, manifest
from rtrain.checkpoints import checkpoint
from rtrain.cluster import supervise
from rtrain.proof import ledger
from rtrain.run import Run
from tests import test_cluster_yaml as cluster
from tests.conftest import labelled_rows, write_rows
from tests.tiny import make_encoder
from tune.known.history import replay
from tune.known.journal import read

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[1]
STARTED_WITHIN_S, JOB_WITHIN_S, ENDED_WITHIN_S = 120, 1000, 20
# What the file's head has from its machine, and a test must not take from this one.
LOCAL = ("--num-cpus=4", f"--object-store-memory={300 << 20}", "--block")
STAGES = ["ingest", "search", "distill", "quantize", "serve", "ask"]
# The demo's path at a size of seconds. The encoder is too small to learn: the scores are those of chance.
SMALL = (
    *("train.epochs=1", "train.workers=1", "train.micro_batch=32", "train.precision=fp32", "optim.lr=3e-3"),
    *("tune.trials=1", "distill.layers=1", "distill.epochs=1", "quantize.calibration_rows=32"),
)


@dataclass(frozen=True)
class Head:
    folder: Path
    api: str
    environ: dict[str, str]
    """Variables of a user who may submit jobs."""

    @property
    def token(self) -> str:
        return Path(self.environ["RAY_AUTH_TOKEN_PATH"]).read_text()

    def submit(self, project: Path, *entrypoint: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit` as cluster.yaml shows it; returns when the job has ended, with its log."""
        command = ["ray", "job", "submit", "--address", self.api, "--working-dir", str(project), "--"]
        return subprocess.run(
            [*command, *entrypoint],
            env=self.environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_WITHIN_S,
        )

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask(self.token).json()
        return found

    def ask(self, token: str | None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.get(f"{self.api}/api/jobs/", headers=headers, trust_env=False)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def local_command(folder: Path) -> tuple[list[str], int]:
    """The file's `ray start` for this machine, with free ports for the fixed ones; and the dashboard's port."""
    _, words = cluster.start_command("head_start_ray_commands")
    # Ray takes the range of the workers' ports as given, also where another program has one of them.
    dropped = ("--autoscaling-config=", "--min-worker-port=", "--max-worker-port=")
    words = [word for word in words if not word.startswith(dropped)]
    fixed = [word for word in words if re.fullmatch(r"--[a-z-]*port=\d+", word)]
    ports = dict(zip(fixed, free_ports(len(fixed)), strict=True))
    chosen = [f"{word.partition('=')[0]}={ports[word]}" if word in ports else word for word in words]
    dashboard = next(port for word, port in ports.items() if word.startswith("--dashboard-port="))
    return [*chosen, *LOCAL, f"--temp-dir={folder / 'ray'}"], dashboard


def environment(folder: Path) -> dict[str, str]:
    """The file's environment on this machine: `folder` is the home, this Python comes first on PATH."""
    ours = str(Path(sys.executable).parent)
    given = {
        "PATH": f"{ours}:{os.environ['PATH']}",
        "RAY_TMPDIR": str(folder / "ray"),
        "OMP_NUM_THREADS": "1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no other node could take over; Ray waits 30 s for it
    }
    cluster.make_token(folder)
    return cluster.environment("head_start_ray_commands", folder, **given)


def related(folder: Path) -> dict[psutil.Process, str]:
    """Processes that belong to the head, by command line, current folder or environment, and what they call themselves.

    Ray's processes change their command lines, and those of a job have its uploaded folder as their own.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            traces = [" ".join(process.cmdline()), process.cwd(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # the first includes zombies
            continue
        if process.pid != os.getpid() and any(str(folder) in trace for trace in traces):
            found[process] = traces[0][:100]
    return found


def end(process: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """End the head as its user would; returns what was still running after that, and ends it too."""
    process.terminate()
    give_up = time.monotonic() + ENDED_WITHIN_S
    while (process.poll() is None or related(folder)) and time.monotonic() < give_up:
        time.sleep(0.2)
    left = related(folder)
    for one in left:
        one.kill()
    process.wait()
    return list(left.values())


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # Ray's sockets lie under it, and the path of a socket has about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    environ = environment(folder)
    command, port = local_command(folder)
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    head = Head(folder, f"http://127.0.0.1:{port}", environ)
    try:
        await_api(head, process)
        yield head
    finally:
        left = end(process, folder)
        said = (folder / "head.log").read_text()
        shutil.rmtree(folder, ignore_errors=True)
    assert left == [], said


def await_api(head: Head, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + STARTED_WITHIN_S
    while True:
        assert process.poll() is None, (head.folder / "head.log").read_text()
        assert time.monotonic() < give_up, (head.folder / "head.log").read_text()
        try:
            if head.ask(head.token).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


# --------------------------------------------------------------------------------------------------- before the job


def test_only_who_has_the_token_may_submit(head: Head) -> None:
    assert [head.ask(token).status_code for token in (None, "0" * 64, head.token)] == [401, 403, 200]
    refused = httpx.post(f"{head.api}/api/jobs/", json={"entrypoint": "true"}, trust_env=False)
    assert refused.status_code == 401
    assert all(head.token not in text for text in related(head.folder).values())  # nor may it be in a process list


def test_the_dashboard_is_on_loopback_and_the_ray_client_s_port_is_closed(head: Head) -> None:
    processes = related(head.folder)
    assert len(processes) > 5
    assert [text for text in processes.values() if "ray.util.client" in text] == []
    port = int(head.api.rpartition(":")[2])
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert listening == {"127.0.0.1"}


# ---------------------------------------------------------------------------------------------------------- the job


@dataclass(frozen=True)
class Done:
    run: Path
    log: str
    document: dict[str, Any]


@pytest.fixture(scope="module")
def done(head: Head) -> Done:
    run = head.folder / "runs" / "demo"
    model = make_encoder(head.folder / "encoder")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = ["python", "-m", "rtrain", "demo", "--json", "--out", str(run), "--model", str(model), *settings]
    ended = head.submit(ROOT, *command)
    assert ended.returncode == 0, ended.stdout
    line = next(line for line in ended.stdout.splitlines() if line.startswith('{"stages"'))
    return Done(run, ended.stdout, json.loads(line))


@pytest.mark.slow
def test_the_job_succeeded_and_said_so(head: Head, done: Done) -> None:
    job = next(job for job in head.jobs() if " demo " in job["entrypoint"])
    assert (job["status"], job["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert "Traceback" not in done.log


@pytest.mark.slow
def test_every_stage_ran_there_and_the_endpoint_answered(done: Done) -> None:
    assert [stage["name"] for stage in done.document["stages"]] == STAGES
    assert done.document["answer_matches"] is True
    assert done.document["run"] == str(done.run)
    assert done.document == json.loads((done.run / "demo.json").read_text())
    assert done.document["baseline_score"] > 0.5  # the embedded data, not an empty file


@pytest.mark.slow
def test_the_search_s_trial_is_written_down(done: Done) -> None:
    search = Run(done.run / "search")
    history = replay(read(search.trials))
    assert [(trial.number, trial.status, dict(trial.settings)) for trial in history.trials] == [(0, "finished", {})]
    assert history.chosen == 0
    assert search.winner is not None
    assert search.winner.finished


@pytest.mark.slow
def test_the_artefacts_verify_and_answer(done: Done) -> None:
    from rtrain.predict import Predictor

    artifacts = sorted(path.parent for path in done.run.rglob("artifact.json"))
    names = [str(path.relative_to(done.run)) for path in artifacts]
    assert {"search/trial-000/artifact", "student/artifact", "student/artifact-int8"} <= set(names)
    assert [manifest.damage(path) for path in artifacts] == [None] * len(artifacts)
    answers = Predictor.load(done.run / "student" / "artifact-int8")(["where is my parcel"])
    assert 0 < answers[0][0]["score"] <= 1


@pytest.mark.slow
def test_no_secret_is_in_the_job_s_log_or_files(head: Head, done: Done) -> None:
    assert head.token not in done.log
    files = [path for path in (head.folder / "runs").rglob("*") if path.is_file()]
    assert [path for path in files if head.token.encode() in path.read_bytes()] == []


# ---------------------------------------------------------------------------------------------------- whose modules


LOOK = """
import json, os, pathlib, sys, ray
from rtrain import config, env
from rtrain.cluster.session import session

def look():
    import rtrain, serve, tune
    return [one.__file__ for one in (rtrain, serve, tune)], {name: os.environ.get(name) for name in names}

env.prepare()
names = list(env.SETTINGS)
with session(config.load("intent"), pathlib.Path(sys.argv[1])):
    print("found", json.dumps([look(), ray.get(ray.remote(look).remote())]))
"""


def test_driver_and_workers_have_the_uploaded_project_and_rtrain_s_settings(head: Head) -> None:
    said = head.submit(ROOT, "python", "-c", LOOK, str(head.folder / "look")).stdout
    found = re.search("^found (.*)$", said, re.M)
    assert found, said
    driver, worker = json.loads(found[1])
    assert driver == worker
    files, settings = worker
    assert len(files) == 3
    assert all(path.startswith(str(head.folder / "ray")) for path in files)
    assert settings == {name: head.environ.get(name, value) for name, value in env.SETTINGS.items()}


def test_a_module_that_hides_ours_on_the_workers_is_refused_by_name(head: Head, tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text("raise SystemExit('decoy')")
    refused = head.submit(tmp_path, "python", "-m", "rtrain", "recipes", "list")
    assert refused.returncode == 1
    message = r"rtrain: the module name 'tune' leads to \S+/tune\.py instead of rtrain's own package"
    assert re.search(message, refused.stdout), refused.stdout
    assert "decoy" not in refused.stdout


# ------------------------------------------------------------------------------------------------ a driver that dies


@pytest.mark.slow
def test_a_job_whose_driver_is_killed_starts_it_again_and_ends_its_run(head: Head) -> None:
    run = head.folder / "runs" / "killed"
    data, model = write_rows(head.folder / "rows.csv", labelled_rows(403)), make_encoder(head.folder / "encoder-2")
    settings = ["train.precision=fp32", "train.epochs=60", "train.save_every=50", "train.workers=1"]
    command = ["python", "-m", "rtrain", "train", "intent", "--data", str(data), "--model", str(model), "--json"]
    command += ["--out", str(run), *(part for setting in settings for part in ("--set", setting))]
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(head.submit, ROOT, *command)
        while not checkpoint.updates(run / "checkpoints"):
            assert not submitted.done(), submitted.result().stdout
            time.sleep(0.02)
        [driver] = [process for process in related(head.folder) if _is_driver(process)]
        driver.kill()
        ended = submitted.result()
    assert ended.returncode == 0, ended.stdout
    assert "the driver was ended by SIGKILL; starting it again from update-" in ended.stdout
    summary = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"run"')))
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    job = next(job for job in head.jobs() if str(run) in job["entrypoint"])
    assert job["status"] == "SUCCEEDED"
    report = ledger.check(Run(run))
    assert (report.passed, report.updates) == (True, summary["updates"])


def _is_driver(process: psutil.Process) -> bool:
    """The child of a job's supervisor."""
    try:
        return supervise.CHILD in process.environ() and "train" in process.cmdline() and "-m" in process.cmdline()
    except psutil.Error:
        return False
