"""Faults at the file system calls of a process: an error in place of one, or SIGKILL before one.

A debugger's means (ptrace), on Linux and x86-64: the calls are the real ones, of the real code.
"""

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

CALLS = {
    **{1: "write", 18: "pwrite64", 74: "fsync", 82: "rename", 83: "mkdir", 84: "rmdir", 86: "link", 87: "unlink"},
    **{257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 316: "renameat2"},
}
TRACEME, PEEKUSER, POKEUSER, SYSCALL, SETOPTIONS = 0, 3, 6, 24, 0x4200
TRACESYSGOOD, EXITKILL = 0x1, 0x100000
NUMBER, RESULT = 15 * 8, 10 * 8
"""Offsets of the registers orig_rax and rax in the user area."""

needed = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="ptrace as Linux has it on x86-64"
)


@dataclass(frozen=True)
class Traced:
    succeeded: bool
    """Whether the work ended without an OSError."""
    calls: list[str]


def trace(
    work: Callable[[], object], fault_at: int | None = None, error: int | None = None, refused: Collection[str] = ()
) -> Traced:
    """Run `work` in a forked process. Its file system call number `fault_at`, from 0, gets `error`; where that is None,
    the process is killed before it. Calls named in `refused` get EINVAL each time."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes, ptrace.restype = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_long
    child = os.fork()
    if child == 0:
        status = 2
        try:
            ptrace(TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            status = 0
        except OSError:
            status = 1
        finally:
            os._exit(status)
    os.waitpid(child, 0)
    assert ptrace(SETOPTIONS, child, None, TRACESYSGOOD | EXITKILL) == 0
    calls, is_entry, replaced = list[str](), True, 0
    passed_on = 0
    while True:
        ptrace(SYSCALL, child, None, passed_on)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            break
        passed_on = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:  # a signal of its own
            passed_on = os.WSTOPSIG(status)
            continue
        if is_entry and (name := CALLS.get(ptrace(PEEKUSER, child, NUMBER, None))):
            if len(calls) == fault_at and error is None:
                os.kill(child, signal.SIGKILL)
            replaced = 22 if name in refused else error or 0 if len(calls) == fault_at else 0
            if replaced:
                ptrace(POKEUSER, child, NUMBER, -1)  # no such call
            calls.append(name)
        elif not is_entry and replaced:
            ptrace(POKEUSER, child, RESULT, -replaced)
            replaced = 0
        is_entry = not is_entry
    exited = os.WIFEXITED(status)
    assert not exited or os.WEXITSTATUS(status) in (0, 1), "the work failed by another error than OSError"
    return Traced(exited and os.WEXITSTATUS(status) == 0, calls)
