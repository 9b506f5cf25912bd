"""summary.json, report.html, progress and advice, computed from the files of a run.

`PhaseTimer` is here since every command imports it at its start.
"""

import time
from collections.abc import Callable


class PhaseTimer:
    """Seconds by phase, in the order of their first appearance. A phase lasts until another one begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._started_at = clock, clock()
        self._seconds: dict[str, float] = {}
        self._phase, self._phase_started_at = "checks", self._started_at

    def enter_phase(self, phase: str) -> None:
        """Enter `phase`; a phase may be entered several times."""
        now = self._clock()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._phase_started_at
        self._phase, self._phase_started_at = phase, now

    @property
    def elapsed_seconds(self) -> float:
        """Since the command began."""
        return self._clock() - self._started_at

    def format_phases(self) -> str:
        """`31 s in all: checks 3, Ray 6, rows 2, start of workers 6, training 9, writing 5`; phases below 0.5 s are
        omitted."""
        self.enter_phase(self._phase)
        shown = [f"{name} {seconds:.0f}" for name, seconds in self._seconds.items() if seconds >= 0.5]
        total = f"{self.elapsed_seconds:.0f} s in all"
        return f"{total}: {', '.join(shown)}" if len(shown) > 1 else total
