"""The supervisor of a job: a driver that is killed is started again and resumes; anything else ends as it ends."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rtrain.checkpoint import format as checkpoint_format
from rtrain.cli import app as cli
from rtrain.cluster import supervisor as cluster_supervisor
from rtrain.cluster.connection import JOB_CONFIG_VARIABLE
from rtrain.cluster.jobs.job_names import SUPERVISED_VERBS
from rtrain.core import events
from rtrain.report import summary
from tests.conftest import labelled_rows, write_rows
from tests.support.processes import end
from tests.support.reports import make_run
from tests.support.root import ROOT
from tests.support.tiny import make_artifact, make_encoder

WITHIN_S = 400


def test_a_command_is_continued_by_resume_once_its_run_exists(tmp_path: Path) -> None:
    command = ["train", "intent", "--new", "--out", str(tmp_path)]
    assert cluster_supervisor.with_resume_flag(command, tmp_path) == ["train", "intent", "--out", str(tmp_path)]
    (tmp_path / "config.yaml").touch()
    assert cluster_supervisor.with_resume_flag(command, tmp_path) == [
        "train",
        "intent",
        "--out",
        str(tmp_path),
        "--resume",
    ]


def test_a_search_gets_on_with_each_checkpoint_of_each_trial(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    seen = [cluster_supervisor.find_newest_checkpoints(tmp_path)]
    for name in ("checkpoints/step-00000003", "trial-000/checkpoints/step-00000009"):
        (tmp_path / name).mkdir(parents=True)
        seen.append(cluster_supervisor.find_newest_checkpoints(tmp_path))
    for name in ("trial-000/checkpoints/step-00000010", "trial-001/checkpoints/step-00000002"):
        (tmp_path / name).mkdir(parents=True)
        seen.append(cluster_supervisor.find_newest_checkpoints(tmp_path))
    (tmp_path / "trial-000/checkpoints/step-00000009").rmdir()  # older ones go
    assert seen == sorted(set(seen))
    assert cluster_supervisor.find_newest_checkpoints(tmp_path) == seen[-1]
    assert seen[-1] == ("step-00000003", "trial-000/step-00000010", "trial-001/step-00000002")


def test_only_a_job_is_supervised_and_no_child_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_CONFIG_VARIABLE, raising=False)
    assert not cluster_supervisor.should_supervise()
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, "{}")
    assert cluster_supervisor.should_supervise()
    monkeypatch.setenv(cluster_supervisor.CHILD_VARIABLE, "1")
    assert not cluster_supervisor.should_supervise()


@pytest.mark.parametrize(
    ("code", "head", "job"),
    [
        (0, False, 0),
        (1, True, 1),
        (1, False, 75),
        (2, True, 2),
        (2, False, 75),  # a start that found no head
        (75, True, 75),
        (130, False, 130),
        (143, True, 75),
        (138, True, 75),
    ],
)
def test_a_job_that_is_to_be_submitted_anew_says_75(code: int, head: bool, job: int) -> None:
    """1 and 2 are for the user to mend, but where the cluster is no longer there."""
    assert cluster_supervisor.job_exit_code(code, lambda: head) == job


def test_a_head_answers_while_something_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert cluster_supervisor.is_head_reachable()
    assert not cluster_supervisor.is_head_reachable()
    for unsaid in ("", "auto"):
        monkeypatch.setenv("RAY_ADDRESS", unsaid)
        assert cluster_supervisor.is_head_reachable()


# In place of `rtrain`: a driver that writes a checkpoint and is killed, as often as its run's folder says.
DRIVER = """
import json, os, pathlib, signal, sys
run = pathlib.Path(os.environ["RUN"])
starts = json.loads((run / "starts").read_text())
(run / "starts").write_text(json.dumps([*starts, sys.argv[1:]]))
(run / "config.yaml").touch()
saved = os.environ["SAVED"].split()[len(starts):][:1]
for update in saved:
    (run / "checkpoints" / f"step-{update}").mkdir(parents=True, exist_ok=True)
if saved:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize(("saved", "code", "starts"), [("3 9", 0, 3), ("3 9 9 9 9", 1, 5), ("", 2, 1)])
def test_a_killed_driver_is_started_again_while_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, code: int, starts: int
) -> None:
    (tmp_path / "rtrain").mkdir()
    (tmp_path / "rtrain" / "__init__.py").touch()
    (tmp_path / "rtrain" / "__main__.py").write_text(DRIVER)
    (tmp_path / "starts").write_text("[]")
    monkeypatch.chdir(tmp_path)  # `python -m rtrain` finds the stand-in first
    monkeypatch.setenv("RUN", str(tmp_path))
    monkeypatch.setenv("SAVED", saved)
    monkeypatch.setenv("CODE", str(code))
    assert cluster_supervisor.supervise(["train", "intent", "--new"], tmp_path) == code
    document = json.loads((tmp_path / "starts").read_text())
    assert document == [["train", "intent", "--new"], *[["train", "intent", "--resume"]] * (starts - 1)]


# In place of `rtrain`: a driver that ends with 75 where it is asked to, as a run does after its coming update.
CHILD_SCRIPT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
pathlib.Path("ready").touch()
time.sleep(300)
"""
SUPERVISOR = """
import os, pathlib, signal, subprocess, sys
from rtrain.cluster import supervisor

usual = subprocess.Popen

class Early(usual):
    def __init__(self, *arguments, **named):  # the signal comes when the child is there, and nobody knows of it yet
        super().__init__(*arguments, **named)
        pathlib.Path("child").write_text(str(self.pid))
        if sys.argv[2]:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))

subprocess.Popen = Early
os.chdir(sys.argv[1])
sys.exit(supervisor.supervise(["train", "intent"], pathlib.Path("run")))
"""


def supervisor(folder: Path, early: str = "") -> "subprocess.Popen[str]":
    (folder / "rtrain").mkdir()
    (folder / "rtrain" / "__init__.py").touch()
    (folder / "rtrain" / "__main__.py").write_text(CHILD_SCRIPT)
    environ = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", SUPERVISOR, str(folder), early]
    return subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("early", ["SIGTERM", "SIGUSR1"])
def test_a_signal_that_comes_with_the_child_ends_both(tmp_path: Path, early: str) -> None:
    with supervisor(tmp_path, early) as started:
        try:
            started.communicate(timeout=60)
        finally:
            started.kill()
    assert started.returncode == 75
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_a_driver_ends_with_its_supervisor(tmp_path: Path) -> None:
    """`kill -9` of a job's entry point: Ray says FAILED then, and the driver must not train on."""
    with supervisor(tmp_path) as started:
        until((tmp_path / "ready").exists, started, tmp_path / "rtrain" / "__main__.py")
        driver = psutil.Process(int((tmp_path / "child").read_text()))
        started.kill()
        give_up, has_ended = time.monotonic() + 20, False
        while not has_ended and time.monotonic() < give_up:
            has_ended = not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE
            time.sleep(0.02)
        end(started, [driver])
    assert has_ended


def test_the_jobs_of_a_head_that_goes_end_with_a_checkpoint(tmp_path: Path) -> None:
    leave = [sys.executable, "-m", "rtrain.cluster.graceful_shutdown", "--seconds"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([*leave, "0"], cwd=ROOT, env=environ, check=False).returncode == 0  # no job runs
    with supervisor(tmp_path) as started:
        try:
            until((tmp_path / "ready").exists, started, tmp_path / "rtrain" / "__main__.py")
            assert subprocess.run([*leave, "30"], cwd=ROOT, env=environ, check=False).returncode == 0
            assert started.wait(30) == 75
        finally:
            started.kill()


def test_a_supervisor_that_was_killed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cluster_supervisor.list_supervisors() == []
    with cluster_supervisor.register_supervisor():
        [jobs] = tmp_path.iterdir()
        (jobs / "1").touch()
        (jobs / "2.draft").touch()  # not locked yet
        assert cluster_supervisor.list_supervisors() == [os.getpid()]
    assert [path.name for path in jobs.iterdir()] == ["2.draft"]
    shutil.rmtree(jobs)
    jobs.touch()
    with cluster_supervisor.register_supervisor():
        assert cluster_supervisor.list_supervisors() == []


def until(met: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    """Wait for something that a program does while it runs."""
    give_up = time.monotonic() + WITHIN_S
    while not met():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.02)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(3 * WITHIN_S + 100)
def test_a_driver_that_is_killed_and_then_terminated_resumes_and_ends_its_run(tmp_path: Path) -> None:
    """A real driver with a Ray of its own: SIGKILL in the middle of its training, and its supervisor starts it again;
    SIGTERM further on, and both end with the command that continues the run, which then ends it."""
    data, model = write_rows(tmp_path / "rows.csv", labelled_rows(403)), make_encoder(tmp_path / "encoder")
    run, log = tmp_path / "run", tmp_path / "log"
    settings = ["train.precision=fp32", "train.epochs=20", "train.save_every=20", "train.log_every=1"]
    command = ["train", "intent", "--data", str(data), "--model", str(model), "--workers", "1"]
    command += ["--out", str(run), *(part for setting in settings for part in ("--set", setting))]
    script = (
        "import json, sys, pathlib; from rtrain.cluster.supervisor import supervise\n"
        "sys.exit(supervise(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])))"
    )
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", script, json.dumps(command), str(run)], stdout=file, stderr=file, text=True
        ) as supervisor,
    ):
        family: list[psutil.Process] = []
        try:
            until(lambda: len(checkpoint_format.list_steps(run / "checkpoints")) > 0, supervisor, log)
            [driver] = [
                child for child in psutil.Process(supervisor.pid).children() if "rtrain" in " ".join(child.cmdline())
            ]
            family = driver.children(recursive=True)
            os.kill(driver.pid, signal.SIGKILL)
            until(lambda: len(started(run)) > 1, supervisor, log)
            progress = max(checkpoint_format.list_steps(run / "checkpoints"))
            until(lambda: max(checkpoint_format.list_steps(run / "checkpoints")) > progress, supervisor, log)
            family += psutil.Process(supervisor.pid).children(recursive=True)
            supervisor.terminate()
            code = supervisor.wait(WITHIN_S)
            _, left = psutil.wait_procs(family, timeout=20)
        finally:
            end(supervisor, family)
    text = log.read_text()
    assert (code, [" ".join(process.cmdline()[:3]) for process in left if process.is_running()]) == (75, [])
    assert "***" not in text
    assert "Traceback" not in text
    *_, last, _ = text.strip().splitlines()
    _, _, way_on = last.partition("; next: rtrain ")
    # A worker's last words may come after its driver's.
    assert summary.run_status(events.read_events(run)) == "interrupted"
    assert not (run / "artifact").exists()

    ended = subprocess.run(
        [sys.executable, "-m", "rtrain", *shlex.split(way_on), "--json"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout.splitlines()[-1])
    assert (document["status"], document["restarts"]) == ("finished", 2)
    first, second, third = started(run)
    assert first == 0 < second < third
    assert (run / "artifact" / "artifact.json").is_file()


def started(run: Path) -> list[int]:
    """The updates from which a run was started."""
    return [event["step"] for event in events.read_events(run) if event["kind"] == "started"]


@pytest.mark.parametrize("verb", SUPERVISED_VERBS)
def test_in_a_job_every_verb_that_writes_a_run_is_left_to_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Its own command, with the folder's name, resumes it."""
    write_rows(tmp_path / "rows.csv", labelled_rows(20))
    words = {
        "train": ["train", "intent", "--data", str(tmp_path / "rows.csv")],
        "tune": ["tune", "intent", "--data", str(tmp_path / "rows.csv")],
        "distill": ["distill", str(tmp_path / "run")],
    }[verb]
    if verb == "distill":
        make_artifact(make_run(tmp_path) / "artifact")
    left: list[tuple[list[str], Path]] = []

    def supervised(command: list[str], run: Path) -> int:
        left.append((command, run))
        return 7

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, "{}")
    monkeypatch.delenv(cluster_supervisor.CHILD_VARIABLE, raising=False)
    monkeypatch.setattr(cluster_supervisor, "supervise", supervised)
    monkeypatch.setattr(sys, "argv", ["rtrain", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 7
    [(command, folder)] = left
    assert command == [*words, "--out", str(folder)]
    begins = {"train": "runs/intent-", "tune": "runs/intent-search-", "distill": "run-student"}[verb]
    assert str(folder.relative_to(tmp_path)).startswith(begins)
