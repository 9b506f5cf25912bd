"""SIGTERM ends a command as Ctrl-C does: first what it has started ends, and the exit code names the signal.

Without this, Python's own answer to SIGTERM would skip every `finally` and leave Ray's processes behind, and that of
Ray's core would print a stack of C++ calls.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """SIGTERM has come."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


def take() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread; called again after whatever sets its own handler."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise)


@contextmanager
def owned() -> Iterator[None]:
    """`take` for the block; afterwards SIGTERM does what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    take()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    # Once: `timeout` and others send the signal to a process and to its group, and a second one would break off the end
    # of what the process has started.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
