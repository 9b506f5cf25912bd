"""SIGTERM ends a command once, after what it has started, and is handed back afterwards."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rtrain import signals
from rtrain.cli import answers, options
from rtrain.errors import Ended
from tests.tiny import make_artifact

ROOT = Path(__file__).resolve().parents[1]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_raised_once_and_cleaning_up_is_not_broken_off() -> None:
    done = []

    def work() -> None:
        try:
            terminate()
        finally:
            terminate()  # `timeout` sends it twice
            done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), signals.owned():
        work()
    assert (signals.ended(), done) == (("ended by SIGTERM", 143), ["cleaned up"])
    with pytest.raises(KeyboardInterrupt), signals.owned():
        raise KeyboardInterrupt
    assert signals.ended() == ("interrupted", 130)


def test_the_handler_of_before_is_back_afterwards() -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), signals.owned():
            terminate()
        terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_a_run_that_is_there_is_gone_on_with(tmp_path: Path, number: int, code: int, said: str) -> None:
    run = tmp_path / "my run"
    with pytest.raises(Ended) as caught, signals.owned(), options.resumable(run, "distill", "a teacher"):
        os.kill(os.getpid(), number)
    assert (caught.value.exit_code, str(caught.value)) == (code, said)  # nothing is there yet
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(Ended) as caught, signals.owned(), options.resumable(run, "distill", "a teacher"):
        os.kill(os.getpid(), number)
    assert str(caught.value) == f"{said}; next: rtrain distill 'a teacher' --resume --out '{run}'"
    make_artifact(run / "artifact")
    with pytest.raises(Ended) as caught, signals.owned(), options.resumable(run, "distill", "a teacher"):
        os.kill(os.getpid(), number)
    assert str(caught.value) == f"{said}; next: rtrain report '{run}'"


def test_a_job_for_a_file_is_gone_on_with_and_one_for_a_stream_is_not(tmp_path: Path) -> None:
    def way_on(data: str, out: Path | None) -> str | None:
        options = answers.Given(tmp_path / "my artifact", [], data, out, False, True, None, 8, False, False)
        return answers._again(options, ["data.text=my text"], None)

    assert way_on("rows.csv", Path("out.csv")) == (
        f"next: rtrain predict '{tmp_path}/my artifact' --data rows.csv --batch 8 --set 'data.text=my text' "
        "--out out.csv --resume"
    )
    assert way_on("-", Path("out.jsonl")) is None
    assert way_on("rows.csv", None) is None


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), options.resumable(tmp_path, "train"):
        raise ZeroDivisionError


def catches(pid: int) -> bool:
    """Whether a process has put its own handler for SIGTERM, as the kernel knows it."""
    [mask] = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_verb_without_ray_says_one_line_and_exits_143(tmp_path: Path) -> None:
    """`predict` waits for its texts on standard input, which never come."""
    command = [sys.executable, "-m", "rtrain", "predict", str(make_artifact(tmp_path / "artifact"))]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        give_up = time.monotonic() + 60
        while not catches(process.pid):
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (143, "", "rtrain: ended by SIGTERM\n")
