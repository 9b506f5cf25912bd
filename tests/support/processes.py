"""The end of programs that a test has started, however the test ends."""

import subprocess
from collections.abc import Sequence
from typing import Any

import psutil


def end(process: subprocess.Popen[Any], family: Sequence[psutil.Process] = ()) -> None:
    """Kill what still runs of a program, of its descendants, and of `family`, those that it had at some moment."""
    known = list(family)
    if process.poll() is None:
        known += [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in known:
        if one.is_running():
            one.kill()
    psutil.wait_procs(known, timeout=20)
    process.wait(20)
