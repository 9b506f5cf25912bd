"""Commands for a machine from outside of it, in place of SSH: through a socket in a folder that both see."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

RETRY_S = 0.1
_END = b"\n"


def run(shell: Path, text: str, within_s: float) -> int:
    """The exit code of a shell command on the machine that listens at `shell`, as soon as it does, at most after
    `within_s` seconds.

    Raises OSError where nobody listens there in time, or the machine ends before the command has.
    """
    give_up = time.monotonic() + within_s
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(shell))
            except OSError:
                if time.monotonic() > give_up:
                    raise
            else:
                connection.sendall(json.dumps(text).encode() + _END)
                if told := _line(connection):
                    return int(told)
                raise ConnectionError("the machine has ended")
        time.sleep(RETRY_S)


class Shell:
    """The machine's end of it; one command at a time."""

    def __init__(self, path: Path):
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def serve(self, act: Callable[[str], int], wait_s: float) -> None:
        """Answer the next command that comes within `wait_s` seconds with what `act` returns, its exit code."""
        self._listening.settimeout(wait_s)
        try:
            connection, _ = self._listening.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(None)
            if asked := _line(connection):
                code = act(json.loads(asked))
                with suppress(OSError):  # who asked may be gone, e.g. with the head
                    connection.sendall(str(code).encode() + _END)


def _line(connection: socket.socket) -> bytes:
    """What comes up to the end of a line; nothing where the other end is gone before it."""
    found = b""
    while not found.endswith(_END):
        if not (more := connection.recv(1 << 16)):
            return b""
        found += more
    return found
