"""SIGTERM ends a command as Ctrl-C does: first what it has started ends, and the exit code names the signal.

Without this, Python's own answer to SIGTERM would skip every `finally` and leave Ray's processes behind, and that of
Ray's core would print a stack of C++ calls. It is KeyboardInterrupt that is raised, which Ray and Tune hand on from
wherever the process waits in them; of SystemExit Ray makes an error, as of a worker that crashed.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_received: list[int] = []
"""SIGTERM, once it has come. Ray raises a KeyboardInterrupt of its own, so that the error cannot say it."""
_usual: list[Callable[["sys.UnraisableHookArgs"], object]] = []
"""Who is told of errors that nobody can catch, beside `_ignored`."""
AGAIN_S = 0.05


def take() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread; called again after others set their handlers."""
    if threading.current_thread() is threading.main_thread() and not _received:
        signal.signal(signal.SIGTERM, _raise)
        if sys.unraisablehook is not _ignored:
            _usual[:] = [sys.unraisablehook]
            sys.unraisablehook = _ignored


def end_with_parent(parent: int, number: int) -> None:
    """Have this new process get that signal when its parent, of that process id, dies: on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)  # it has died before


@contextmanager
def owned() -> Iterator[None]:
    """`take` for the block; afterwards SIGTERM does what it did before."""
    before, hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    _received.clear()
    take()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
            sys.unraisablehook = hook


def ended() -> tuple[str, int]:
    """What ended the command that a KeyboardInterrupt has ended: in words, and as its exit code."""
    # Python ends as if by SIGINT, whatever the exit code, where the error has passed an `exec` of text, as dataclasses
    # make while a module is imported; the next one makes it forget that.
    exec("")
    return ("ended by SIGTERM", TERMINATED) if _received else ("interrupted", INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    # Once: `timeout` and others send the signal to a process and to its group, and a second one would break off the end
    # of what the process has started.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _received.append(number)
    raise KeyboardInterrupt


def _ignored(error: "sys.UnraisableHookArgs") -> None:
    """Give the signal again whose error nobody could catch: it came in a finalizer, of which Python drops what it
    raises. The command would go on, and no second SIGTERM could end it."""
    if not isinstance(error.exc_value, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        _usual[0](error)
        return
    number = signal.SIGTERM if _received else signal.SIGINT
    if _received:
        _received.clear()
        signal.signal(signal.SIGTERM, _raise)
    # Later: here it would be raised in this function, of which Python drops errors too.
    again = threading.Timer(AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()
