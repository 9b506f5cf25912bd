"""SIGTERM ends a command once, after what it has started, and is handed back afterwards."""

import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import rtrain
from rtrain.cli import options, predict
from tests.support.root import ROOT
from tests.support.tiny import make_artifact


def test_signals_to_a_command_s_own_process() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/support/own_signals.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, "10 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_a_job_that_writes_a_file_is_gone_on_with(tmp_path: Path) -> None:
    def way_on(data: str, out: Path | None) -> str | None:
        options = predict.PredictOptions("run", data=data, out=out, batch=8, assignments=["data.text=my text"])
        return options.resume_command(tmp_path / "my artifact")

    assert way_on("rows.csv", Path("out.csv")) == (
        f"next: rtrain predict '{tmp_path}/my artifact' --data rows.csv --batch 8 --set 'data.text=my text' "
        "--out out.csv --resume"
    )


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), options.hint_on_interrupt(lambda: None):
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


SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["rtrain"]
STARTS = {
    "python -m rtrain": "import runpy; runpy.run_module('rtrain', run_name='__main__', alter_sys=True)",
    "rtrain": "from {} import {} as main; main()".format(*SCRIPT.split(":")),
}
CTRL_C = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Finder())
sys.argv = ["rtrain", "--version"]
"""
"""Sends the signal while the command line is imported."""


@pytest.mark.parametrize("start", STARTS)
def test_ctrl_c_during_imports_ends_a_command_in_silence_unless_it_is_ignored(start: str) -> None:
    def ended(handler: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", CTRL_C.format(handler=handler) + STARTS[start]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    assert ended("default_int_handler") == (130, "", "")
    assert ended("SIG_IGN") == (0, f"{rtrain.__version__}\n", "")
