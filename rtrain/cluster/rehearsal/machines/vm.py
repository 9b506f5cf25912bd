"""A machine that has its processes, network, name and shared memory for itself, and is made by a file's own commands.

    python -m rtrain.cluster.rehearsal.machines.vm SPEC

`SPEC` is the file of a `Spec`. Its commands run one after another, as the launcher runs them over SSH, and then those
that come through its shell; what they leave running goes on. The machine lasts until it is told to end, whatever runs
on it, as a cloud's machines do; where one of the first commands fails, it ends at once. Linux, and root.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain.cluster.rehearsal.machines import network
from rtrain.cluster.rehearsal.machines.book import Book
from rtrain.cluster.rehearsal.machines.remote import Shell

SHARED_MEMORY_BYTES = 512 << 20
GOODBYE_S = 4.0
LOOK_EVERY_S = 0.1
# Flags of unshare(2).
_NEW_MOUNTS, _NEW_NAME, _NEW_IPC, _NEW_PIDS = 0x00020000, 0x04000000, 0x08000000, 0x20000000


@dataclass(frozen=True)
class Spec:
    name: str
    namespace: str
    """That of its network."""
    home: str
    user_home: str
    """What commands call its home."""
    files: Mapping[str, str]
    """Files of this machine that are others there, such as /etc/hosts: which, by the first ones' paths."""
    book: str
    commands: Sequence[str]
    copies: Mapping[str, str]
    """Files that it gets before the first command: from where, by where to."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def run(spec: Spec) -> int:
    """Returns once the machine has ended, with 1 where a command has failed."""
    network.enter(spec.namespace)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_NAME | _NEW_IPC | _NEW_PIDS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if child == 0:
        os._exit(_first(spec))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda told, frame: os.kill(child, told))
    while True:
        with suppress(InterruptedError):
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class _Told(BaseException):
    """The machine is to end."""


def _first(spec: Spec) -> int:
    """As the machine's first process: what is left without a parent there becomes its child, and all ends with it."""

    def hear(number: int, frame: Any) -> None:
        raise _Told

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, hear)
        _furnish(spec)
        with Shell(Book(Path(spec.book)).shell(spec.name)) as shell:
            for text in spec.commands:
                if _run(spec, text):
                    return 1
            _say("# up")
            while True:
                _reap()
                shell.serve(lambda text: _run(spec, text), LOOK_EVERY_S)
    except _Told:
        _goodbye()
        return 0


def _run(spec: Spec, text: str) -> int:
    """The exit code of a command, which the book is told where it fails."""
    text = text.replace(spec.user_home, spec.home)
    _say(f"$ {text}")
    code = _waited(os.posix_spawnp("bash", ["bash", "-c", text], os.environ))
    if code:
        _say(f"# ended with {code}")
        Book(Path(spec.book)).failed(spec.name, text, code)
    return code


def _furnish(spec: Spec) -> None:
    socket.sethostname(spec.name)
    os.chdir(spec.home)
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    _mount("-t", "tmpfs", "-o", f"size={SHARED_MEMORY_BYTES}", "tmpfs", "/dev/shm")
    for place, file in spec.files.items():
        _mount("--bind", file, place)
    for target, source in spec.copies.items():
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _waited(pid: int) -> int:
    """The exit code of a command, while what others have left behind is seen to."""
    while True:
        ended = _reap()
        if pid in ended:
            return ended[pid]
        time.sleep(LOOK_EVERY_S)


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended since the last call."""
    found: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found[pid] = os.waitstatus_to_exitcode(status)


def _goodbye() -> None:
    """Everything is told to end; what has not in some seconds ends with this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    give_up = time.monotonic() + GOODBYE_S
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)
        while time.monotonic() < give_up:
            _reap()
            os.kill(-1, 0)
            time.sleep(LOOK_EVERY_S)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    return run(Spec(**json.loads(Path(arguments[0]).read_text())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
