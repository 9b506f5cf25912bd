"""In a Ray job, a verb that trains runs as the child of a small supervisor, which starts it again if it is killed.

Ray starts the entry point of a job once. The supervisor imports neither Ray nor torch, so that a segmentation fault or
a lack of memory ends the child, the driver, and not the supervisor. A new child resumes from its run's newest
checkpoint. If the whole head is lost, the job must be submitted again: the exit code 75 says so to whatever submits it.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from rtrain.cluster.connection import IN_JOB
from rtrain.core import signals
from rtrain.core.errors import ConfigError, TryAgain, UserError

CHILD = "RTRAIN_CHILD"
"""Environment variable that tells a child that it has a supervisor."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are handed on to the child: SIGUSR1 asks it to end after the coming update."""
ANSWER_S = 5.0
MAX_DEATHS = 3
"""Deaths of the driver without a new checkpoint between them, after which it is not started again."""


def is_needed() -> bool:
    """Whether this process is the entry point of a Ray job, and not yet a supervisor's child."""
    return IN_JOB in os.environ and CHILD not in os.environ


def resumed(arguments: Sequence[str], run: Path) -> list[str]:
    """The command line that starts `run` again: it resumes the run if the run has a configuration."""
    plain = [argument for argument in arguments if argument not in ("--new", "--resume")]
    return [*plain, *(["--resume"] if (run / "config.yaml").is_file() else [])]


def supervise(arguments: Sequence[str], run: Path) -> int:
    """Run `rtrain ARGUMENTS` until it ends by itself; returns the exit code of the job. `run` is the run folder that it
    writes.

    Returns 1 after more than `MAX_DEATHS` deaths without a new checkpoint.
    """
    with registered():
        return _until_it_ends(arguments, run)


def _until_it_ends(arguments: Sequence[str], run: Path) -> int:
    deaths, newest = 0, tuple[str, ...]()
    while True:
        code = child(arguments)
        if code >= 0 or -code in FORWARDED:
            return again(code if code >= 0 else 128 - code, head_answers)
        reached = newest_checkpoints(run)
        deaths = 1 if reached > newest else deaths + 1
        newest = max(newest, reached)
        name = signal.Signals(-code).name
        if deaths > MAX_DEATHS:
            sys.stderr.write(f"rtrain: the driver was ended by {name}, {deaths} times without a new checkpoint\n")
            return 1
        where = reached[-1] if reached else "the start"
        sys.stderr.write(f"rtrain: the driver was ended by {name}; starting it again from {where}\n")
        arguments = resumed(arguments, run)


def again(code: int, answers: Callable[[], bool]) -> int:
    """The exit code of a job whose run has ended with `code`: 75, to be submitted anew, where it was ended from outside
    by SIGTERM, or by SIGUSR1 before it could take one, or failed on a cluster whose head is gone (`answers` says
    whether it is there). Other codes stay."""
    if code in (signals.TERMINATED, 128 + signal.SIGUSR1):
        why = "ended from outside"
    elif code in (UserError.exit_code, ConfigError.exit_code) and not answers():  # 2: a start that found no head
        why = "the cluster's head is gone"
    else:
        return code
    sys.stderr.write(f"rtrain: {why}; the same job, submitted again, goes on from the newest checkpoint\n")
    return TryAgain.exit_code


def head_answers() -> bool:
    """Whether something listens where the head of this job's cluster is; also where the job's environment does not
    name it."""
    host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def newest_checkpoints(run: Path) -> tuple[str, ...]:
    """The newest checkpoint of a run, and of each trial of a search. Tuples compare: a run that came further is
    greater."""
    found = {}
    for path in sorted([*run.glob("checkpoints/update-*"), *run.glob("trial-*/checkpoints/update-*")]):
        owner = path.parent.parent.relative_to(run)
        found[owner] = str(owner / path.name)
    return tuple(found.values())


def child(arguments: Sequence[str]) -> int:
    """Run `rtrain ARGUMENTS` with this process's signals; returns its exit code, negative for a signal.

    Where this process is killed, which Ray takes for the end of the job, the child gets SIGTERM: no command would find
    it, nor end it.
    """
    started: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if started is None:
            early.append(number)
        else:
            started.send_signal(number)

    # Before the child is there: a signal in between would end this process, and leave the child without a parent.
    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "rtrain", *arguments],
            env={**os.environ, CHILD: "1"},
            preexec_fn=partial(signals.end_with_parent, os.getpid(), signal.SIGTERM),
        ) as started:
            for number in early:
                started.send_signal(number)
            return started.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


DRAFT = ".draft"


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"rtrain-jobs-{os.getuid()}"


@contextmanager
def registered() -> Iterator[None]:
    """While the block runs, `running` on this machine names this process."""
    with ExitStack() as held:
        with suppress(OSError):  # a job runs without it; nobody could ask it to end, that is all
            _folder().mkdir(mode=0o700, exist_ok=True)
            path = _folder() / str(os.getpid())
            draft = path.with_suffix(DRAFT)
            lock = held.enter_context(draft.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            held.callback(path.unlink, missing_ok=True)
            draft.rename(path)  # it has its name once it is locked: who asks would take it for one that was left
        yield


def running() -> list[int]:
    """The ids of the supervisors on this machine that are this user's."""
    found = []
    for path in _folder().iterdir() if _folder().is_dir() else ():
        if path.suffix == DRAFT:
            continue
        with suppress(FileNotFoundError), path.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()  # its process was killed
            except BlockingIOError:
                found.append(int(path.name))
    return sorted(found)
