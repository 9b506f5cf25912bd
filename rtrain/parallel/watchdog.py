"""The watch over one worker process: it is ended where it shows no sign of life for too long.

A pass is a sign. Work without passes (files are written, copied or read, scores computed) shows fewer, so inside
`busy` the watch waits longer for each. It never waits for ever: what hangs in such work is ended too, only later.
"""

import faulthandler
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

SETUP_S = 120.0
"""Fewest seconds that a worker has from its start to its first pass: it reads a model and waits for the first batch."""
BUSY = 12
"""How many times longer than a pass other work may show no sign: an hour, by default. One file's copy to a mounted
folder shows none, nor do the scores of a split, which grow with the data."""


class Watch:
    """Ends its process, with the traceback of all threads in `file`, `stall_s` seconds after the last sign of life.

    The timer runs below Python: it also ends a process that hangs with the interpreter's lock held, or in an exchange
    with a worker that was stopped. There is one timer in a process, hence one watch. Without a `file` nothing is ended.
    """

    def __init__(self, file: Path | None = None, stall_s: float = math.inf):
        self.stall_s = stall_s
        self._file: TextIO | None = None if file is None else file.open("w")
        self._limit, self._within = max(stall_s, SETUP_S), 0
        self._arm()

    def passes(self) -> None:
        """A sign of life: a pass is about to be made. With the first one the setup is over."""
        if not self._within:
            self._limit = self.stall_s
        self._arm()

    def alive(self) -> None:
        """A sign of life: a piece of other work is done. For the thread that trains: others' progress must not hide
        that it hangs."""
        self._arm()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Wrap work that makes no passes: the limit is longer inside. Entered by the thread that trains."""
        before, self._limit = self._limit, max(self._limit, BUSY * self.stall_s)
        self._within += 1
        self._arm()
        try:
            yield
        finally:
            self._within -= 1
            self._limit = before
            self._arm()

    def stop(self) -> None:
        """The work of this process is done: nothing is watched any more."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._file = None

    def _arm(self) -> None:
        if self._file is not None:
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._file)
