"""Supervisor of training verbs in a Ray job: runs the verb as a child process, and restarts it if it is killed.

Ray starts the entry point of a job once. The supervisor imports neither Ray nor torch, so a segmentation fault or an
out-of-memory kill ends the child (the driver), and not the supervisor. A new child resumes from the run's newest
checkpoint. If the head is lost, the job must be submitted again: exit code 75 tells the submitter.
"""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from rtrain.cluster import capacity
from rtrain.cluster.connection import JOB_CONFIG_VARIABLE
from rtrain.core import signals
from rtrain.core.errors import ConfigError, TemporaryFailureError, UserError

CHILD_VARIABLE = "RTRAIN_CHILD"
"""Environment variable that marks a supervised child."""
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are forwarded to the child: SIGUSR1 requests a stop after the current step."""
CONNECT_TIMEOUT_S = 5.0
MAX_CRASHES = 3
"""Maximum crashes of the driver without a new checkpoint in between."""
DRAFT_SUFFIX = ".draft"


def should_supervise() -> bool:
    """Whether this process is the entry point of a Ray job, and not yet a supervised child."""
    return JOB_CONFIG_VARIABLE in os.environ and CHILD_VARIABLE not in os.environ


def with_resume_flag(arguments: Sequence[str], run: Path) -> list[str]:
    """The command line that restarts `run`: with --resume if the run has a configuration."""
    plain_arguments = [argument for argument in arguments if argument not in ("--new", "--resume")]
    return [*plain_arguments, *(["--resume"] if (run / "config.yaml").is_file() else [])]


def supervise(arguments: Sequence[str], run: Path) -> int:
    """Run `rtrain ARGUMENTS` until it exits by itself; returns the exit code of the job. `run` is its run folder.
    Returns 1 after more than `MAX_CRASHES` crashes without a new checkpoint."""
    with register_supervisor():
        return _run_until_exit(arguments, run)


def _run_until_exit(arguments: Sequence[str], run: Path) -> int:
    crashes, best_progress = 0, tuple[str, ...]()
    while True:
        code = run_child(arguments)
        if code >= 0 or -code in FORWARDED_SIGNALS:
            return job_exit_code(code if code >= 0 else 128 - code, is_head_reachable)
        progress, signal_name = find_newest_checkpoints(run), signal.Signals(-code).name
        crashes = 1 if progress > best_progress else crashes + 1
        best_progress = max(best_progress, progress)
        if crashes > MAX_CRASHES:
            message = f"{crashes} times without a new checkpoint"
            sys.stderr.write(f"rtrain: the driver was killed by {signal_name}, {message}\n")
            return 1
        restart_point = progress[-1] if progress else "the start"
        sys.stderr.write(f"rtrain: the driver was killed by {signal_name}; restarting it from {restart_point}\n")
        arguments = with_resume_flag(arguments, run)


def job_exit_code(code: int, is_head_alive: Callable[[], bool]) -> int:
    """The exit code of a job whose run exited with `code`: 75 (submit again) after SIGTERM from outside, after SIGUSR1
    before its handler was installed, or after a failure on a cluster whose head is gone (`is_head_alive`). Other codes
    are unchanged."""
    if code in (signals.TERMINATED, 128 + signal.SIGUSR1):
        reason = "ended from outside"
    elif code in (UserError.exit_code, ConfigError.exit_code) and not is_head_alive():  # 2: no head at the start
        reason = "the cluster's head is gone"
    else:
        return code
    sys.stderr.write(f"rtrain: {reason}; submit the same job again to resume from the newest checkpoint\n")
    return TemporaryFailureError.exit_code


def is_head_reachable() -> bool:
    """Whether the head's address accepts connections; also if the job's environment does not name it."""
    host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if not host or not port.isdigit():
        return True
    return capacity.accepts_connections((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)


def find_newest_checkpoints(run: Path) -> tuple[str, ...]:
    """The newest checkpoint of a run, and of each trial of a search. Tuples compare: a run with more progress is
    greater."""
    checkpoint_by_run = {}
    for path in sorted([*run.glob("checkpoints/step-*"), *run.glob("trial-*/checkpoints/step-*")]):
        run_path = path.parent.parent.relative_to(run)
        checkpoint_by_run[run_path] = str(run_path / path.name)
    return tuple(checkpoint_by_run.values())


def run_child(arguments: Sequence[str]) -> int:
    """Run `rtrain ARGUMENTS` and forward this process's signals; returns its exit code, negative for a signal.

    If this process is killed, which Ray takes for the end of the job, the child gets SIGTERM: otherwise no command
    could find or end it.
    """
    process: subprocess.Popen[bytes] | None = None
    early_signals: list[int] = []

    def forward_signal(number: int, frame: FrameType | None) -> None:
        if process is None:
            early_signals.append(number)
        else:
            process.send_signal(number)

    # Installed before the child starts: a signal in between would end this process, and orphan the child.
    previous_handlers = {number: signal.signal(number, forward_signal) for number in FORWARDED_SIGNALS}
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "rtrain", *arguments],
            env={**os.environ, CHILD_VARIABLE: "1"},
            preexec_fn=partial(signals.die_with_parent, os.getpid(), signal.SIGTERM),
        ) as process:
            for number in early_signals:
                process.send_signal(number)
            return process.wait()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _registry_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"rtrain-jobs-{os.getuid()}"


@contextmanager
def register_supervisor() -> Iterator[None]:
    """Register this process for `list_supervisors` while the block runs."""
    with ExitStack() as stack:
        with suppress(OSError):  # the job runs without it, but cannot get a stop request
            _registry_folder().mkdir(mode=0o700, exist_ok=True)
            path = _registry_folder() / str(os.getpid())
            draft = path.with_suffix(DRAFT_SUFFIX)
            lock_file = stack.enter_context(draft.open("w"))
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            stack.callback(path.unlink, missing_ok=True)
            draft.rename(path)  # renamed once it is locked: an unlocked file would look stale
        yield


def list_supervisors() -> list[int]:
    """Process ids of this user's supervisors on this machine."""
    pids = []
    for path in _registry_folder().iterdir() if _registry_folder().is_dir() else ():
        if path.suffix == DRAFT_SUFFIX:
            continue
        with suppress(FileNotFoundError), path.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()  # its process was killed
            except BlockingIOError:
                pids.append(int(path.name))
    return sorted(pids)
