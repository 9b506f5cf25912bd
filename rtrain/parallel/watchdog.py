"""Watchdog of a worker process: it ends the process after too long without a heartbeat.

Each micro-batch is a heartbeat. Other work (files, copies, scores) sends fewer, so inside `extended_timeout` the limit
is longer. The wait is always finite: hanging work is ended too, later.
"""

import faulthandler
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

SETUP_TIMEOUT_S = 120.0
"""Shortest limit from a worker's start to its first micro-batch: it reads a model and waits for the first batch."""
EXTENDED_FACTOR = 12
"""Factor of the limit for other work: an hour by default. The copy of one file to a mounted folder sends no heartbeat,
nor do the scores of a split, which grow with the data."""


class Watchdog:
    """Ends its process, with the traceback of all threads in `file`, `hang_timeout_s` seconds after the last heartbeat.

    The timer runs below Python: it also ends a process that hangs with the interpreter lock held, or in a collective
    with a stopped worker. A process has one timer, hence one watchdog. Without a `file` nothing is ended.
    """

    def __init__(self, file: Path | None = None, hang_timeout_s: float = math.inf):
        self.hang_timeout_s = hang_timeout_s
        self._file: TextIO | None = None if file is None else file.open("w")
        self._timeout_s, self._extended_depth = max(hang_timeout_s, SETUP_TIMEOUT_S), 0
        self._reset_timer()

    def start_micro_batch(self) -> None:
        """Heartbeat before a micro-batch. The first one ends the setup."""
        if not self._extended_depth:
            self._timeout_s = self.hang_timeout_s
        self._reset_timer()

    def heartbeat(self) -> None:
        """Heartbeat after a piece of other work. Only for the training thread: progress of other threads must not hide
        that it hangs."""
        self._reset_timer()

    @contextmanager
    def extended_timeout(self) -> Iterator[None]:
        """Wrap work without micro-batches: the limit is longer inside. Only for the training thread."""
        previous_timeout_s, self._timeout_s = (
            self._timeout_s,
            max(self._timeout_s, EXTENDED_FACTOR * self.hang_timeout_s),
        )
        self._extended_depth += 1
        self._reset_timer()
        try:
            yield
        finally:
            self._extended_depth -= 1
            self._timeout_s = previous_timeout_s
            self._reset_timer()

    def stop(self) -> None:
        """Stop watching: the work of this process is done."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._file = None

    def _reset_timer(self) -> None:
        if self._file is not None:
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)
