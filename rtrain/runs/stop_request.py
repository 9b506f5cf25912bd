"""Stop requests: end an attempt after the current step, with a checkpoint.

The driver watches the cluster and receives signals; it writes a file in the run folder. Rank 0 polls the file and
broadcasts it in the all-reduce that counts the rows, so all ranks stop after the same step.
"""

import contextlib
import signal
import threading
from types import FrameType
from typing import Self

from rtrain.core import atomic_write
from rtrain.core.errors import TemporaryFailureError
from rtrain.core.run_folder import Run

SIGNALED = "signaled"
"""Reason after a signal to the command: its runs stop and can be resumed."""
DIVERGED = "diverged"
"""Reason of a search: the trial has diverged and is not resumed."""
PREEMPTION = "preemption"
"""Reason of the driver: a node of a worker is about to be taken away."""

POLL_INTERVAL_S = 1.0


def request_stop(run: Run, reason: str) -> None:
    """Write the request atomically: a search may repeat it while the driver of its trial consumes it."""
    atomic_write.write_text(run.stop_request, reason)


def stop_requested(run: Run) -> bool:
    return run.stop_request.is_file()


def consume_stop(run: Run) -> str | None:
    """Remove the stop request and return its reason, or None."""
    reason = run.stop_request.read_text() if stop_requested(run) else None
    run.stop_request.unlink(missing_ok=True)
    return reason


class StopRequestPoller:
    """Polls for a stop request once a second, in a thread: all ranks wait for rank 0 before each step, and a shared
    folder may respond late. Use as a context manager."""

    def __init__(self, run: Run):
        self._run, self._requested, self._stopped = run, threading.Event(), threading.Event()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    def __enter__(self) -> "StopRequestPoller":
        threading.Thread(target=self._poll, daemon=True, name="rtrain-stop-request").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _poll(self) -> None:
        while not self.is_requested:
            with contextlib.suppress(OSError):  # the next poll may succeed
                if stop_requested(self._run):
                    self._requested.set()
            if self._stopped.wait(POLL_INTERVAL_S):
                return


class StoppedByRequest(TemporaryFailureError):
    """The command was stopped by a request, after a checkpoint."""

    code = "stop_requested"


class StopOnSignal:
    """Requests a stop on SIGUSR1, which batch systems send some time before they end a job. SIGTERM is not handled. Use
    as a context manager.

    Python handles signals in the main thread alone, so in another thread (a trial of a search) it does nothing. A
    search handles the signal for its trials, without a run of its own.
    """

    def __init__(self, run: Run | None = None):
        self._run = run
        self.is_requested = False
        """Stays true between two attempts, when the file is removed."""

    def __enter__(self) -> Self:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._previous_handler = signal.signal(signal.SIGUSR1, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGUSR1, self._previous_handler)

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        if self._run is not None:
            request_stop(self._run, SIGNALED)
