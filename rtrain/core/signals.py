"""SIGTERM ends a command like Ctrl-C: its child processes end first, and the exit code names the signal.

Python's default handler of SIGTERM would skip every `finally` and leave Ray's processes behind, and that of Ray's core
would print a C++ stack. The handler raises KeyboardInterrupt, which Ray and Tune propagate from any wait; Ray turns
SystemExit into an error, like that of a crashed worker.
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

_received_signals: list[int] = []
"""SIGTERM, once received. Ray raises its own KeyboardInterrupt, so that the error cannot name the signal."""
_previous_hooks: list[Callable[["sys.UnraisableHookArgs"], object]] = []
"""The earlier `sys.unraisablehook`, which `_resend_ignored_signal` calls for other errors."""
RESEND_DELAY_S = 0.05


def install_sigterm_handler() -> None:
    """Make SIGTERM raise KeyboardInterrupt in the main thread; call it again after libraries set their handlers."""
    if threading.current_thread() is threading.main_thread() and not _received_signals:
        signal.signal(signal.SIGTERM, _on_sigterm)
        if sys.unraisablehook is not _resend_ignored_signal:
            _previous_hooks[:] = [sys.unraisablehook]
            sys.unraisablehook = _resend_ignored_signal


def die_with_parent(parent_pid: int, signal_number: int) -> None:
    """Make this new process receive a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Call `install_sigterm_handler` for the block, and restore the earlier handler."""
    previous_handler, previous_hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    _received_signals.clear()
    install_sigterm_handler()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous_handler)
            sys.unraisablehook = previous_hook


def describe_interruption() -> tuple[str, int]:
    """Return the cause of a KeyboardInterrupt, as text and as exit code."""
    # Python exits with SIGINT, whatever the exit code, if the error has passed through an `exec` of text (dataclasses
    # use it while a module is imported); the next `exec` resets this.
    exec("")
    return ("ended by SIGTERM", TERMINATED) if _received_signals else ("interrupted", INTERRUPTED)


def _on_sigterm(signal_number: int, frame: FrameType | None) -> None:
    # Once: `timeout` and others send the signal to a process and to its group, and a second one would interrupt the
    # shutdown of child processes.
    if _received_signals:
        return  # `_send_again` follows
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _received_signals.append(signal_number)
    raise KeyboardInterrupt


def _resend_ignored_signal(error: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose KeyboardInterrupt was raised in a finalizer, where Python ignores errors. The command
    would continue, and no second SIGTERM could end it."""
    if not isinstance(error.exc_value, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        _previous_hooks[0](error)
        return
    signal_number = signal.SIGTERM if _received_signals else signal.SIGINT
    if _received_signals:
        signal.signal(signal.SIGTERM, _on_sigterm)
    # Delayed: Python ignores errors in this function too. Until then a second SIGTERM raises none, which would be lost.
    timer = threading.Timer(RESEND_DELAY_S, _send_again, (threading.main_thread().ident, signal_number))
    timer.daemon = True
    timer.start()


def _send_again(thread_id: int, signal_number: int) -> None:
    _received_signals.clear()
    signal.pthread_kill(thread_id, signal_number)
