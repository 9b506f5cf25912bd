"""Where the seconds of a command went, as its user waited for them: from its start to its last line."""

import time
from collections.abc import Callable


class Waited:
    """Seconds by phase, in the order of their first appearance. A phase lasts until another one begins."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now, self._began = now, now()
        self._seconds: dict[str, float] = {}
        self._phase, self._since = "checks", self._began

    def enter(self, phase: str) -> None:
        """What follows belongs to `phase`, which may have been before: a search starts workers again and again."""
        now = self._now()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    @property
    def seconds(self) -> float:
        """Since the command began."""
        return self._now() - self._began

    def text(self) -> str:
        """`31 s in all: checks 3, Ray 6, rows 2, start of workers 6, training 9, writing 5`, without what took none."""
        self.enter(self._phase)
        shown = [f"{name} {seconds:.0f}" for name, seconds in self._seconds.items() if seconds >= 0.5]
        total = f"{self.seconds:.0f} s in all"
        return f"{total}: {', '.join(shown)}" if len(shown) > 1 else total
