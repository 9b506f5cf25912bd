"""The commands of README and docs, run in order on little data and a tiny encoder."""

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from rtrain.cli import app as cli
from rtrain.cluster import connection
from tests.conftest import labelled_rows, write_rows
from tests.support.heads import free_ports
from tests.support.tiny import make_encoder
from tests.unit.project.test_docs import COMMANDS, Command

pytestmark = [pytest.mark.ray, pytest.mark.serve]

ADDRESS = "127.0.0.1:8000"
"""The endpoint's in the commands; another test may hold that port, so a free one takes its place."""
LENIENT = (
    "gate.max_score_drop=1",
    "gate.max_slice_drop=1",
    "gate.max_negative_flips=1",
    "gate.min_speedup=0",
    "gate.latency_seconds=1",
)
LENIENT_WITH_STUDENTS = (
    "gate.student_max_score_drop=1",
    "gate.student_max_slice_drop=1",
    "gate.student_max_negative_flips=1",
)
"""Limits of the gate: how good a tiny encoder is after one epoch, and how fast on a busy machine, says nothing."""
SMALLER = {
    "train": ("train.epochs=1", "train.precision=fp32", "optim.lr=5e-3", "model.name=encoder"),
    "distill": ("distill.epochs=1", "distill.layers=1", *LENIENT, *LENIENT_WITH_STUDENTS),
    "quantize": ("quantize.calibration_rows=16", *LENIENT),
    "gate": LENIENT,
}
"""Settings that are put behind a verb's own, for its size. A resume has those of its run."""


def list_commands() -> list[Command]:
    """The commands that need nothing, each once, in the order of the pages."""
    return list({command.text: command for command in COMMANDS if not command.need}.values())


def ask(words: list[str], port: int) -> None:
    """Send the request with curl, or without it as curl would."""
    if shutil.which("curl"):
        command = ["curl", *(word.replace(ADDRESS, f"127.0.0.1:{port}") for word in words)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    else:
        body, url = words[words.index("-d") + 1], f"http://127.0.0.1:{port}/predict"
        answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, trust_env=False).text
    assert '"label"' in answer, answer


@pytest.mark.slow
def test_every_command_without_a_need_does_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ray_session: Path
) -> None:
    rows = labelled_rows(240)
    write_rows(tmp_path / "messages.csv", rows[:200], header=("text", "category"))
    write_rows(tmp_path / "test.csv", rows[200:], header=("text", "category"))
    make_encoder(tmp_path / "encoder")
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    questions = [command.words[1:] for command in list_commands() if command.words[0] == "curl"]
    answered = []

    def while_it_serves() -> None:
        """In place of the wait for Ctrl-C."""
        for words in questions:
            ask(words, port)
            answered.append(words)

    monkeypatch.setattr(connection, "wait_until_interrupted", while_it_serves)
    done = set()
    for command in list_commands():
        program, *words = command.words
        if program != "rtrain":
            continue
        verb = words[0]
        settings = () if "--resume" in words else SMALLER.get(verb, ())
        words += [word for setting in settings for word in ("--set", setting)]
        words += ["--port", str(port)] if verb == "serve" and words[1] != "keys" else []
        capfd.readouterr()
        code: object = 0
        try:
            cli.main(words)
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        assert not code, f"{command}\n{err}"
        assert out.strip() or verb == "serve"
        done.add(verb)
    assert answered == questions
    assert questions
    assert done >= {
        "train",
        "distill",
        "quantize",
        "serve",
        "predict",
        "explain",
        "evaluate",
        "report",
        "verify",
        "gate",
        "inspect",
    }
