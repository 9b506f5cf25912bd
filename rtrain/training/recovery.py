"""What becomes of a run whose workers failed. Pure: what happened in, what to do out."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["crash", "preemption", "refused"]
"""`refused`: an error of the user's, which would only come again."""


@dataclass
class Recovery:
    """The budget of one run. Preemptions are not the run's fault and cost nothing.

    Crashes are counted since the run last got on: a run of weeks may meet many, but a fault that comes again at the
    same update comes from the run itself.
    """

    max_crashes: int
    crashes: int = 0
    reached: int = -1
    """Update of the newest checkpoint at the last crash."""

    def retry(self, kind: Kind, update: int) -> bool:
        """Whether to start again from the newest checkpoint, which is of `update`."""
        if kind == "refused":
            return False
        if kind == "preemption":
            return True
        self.crashes = 1 if update > self.reached else self.crashes + 1
        self.reached = max(self.reached, update)
        return self.crashes <= self.max_crashes


def workers_for(most: int, least: int | None, cpus: float, spare: int) -> int:
    """Workers of the next start on `cpus` logical CPUs of which data tasks need `spare`; 0: wait for more.

    Without `least` the number is fixed, and Ray waits for the CPUs by itself.
    """
    if least is None:
        return most
    fitting = min(most, int(cpus) - spare)
    return fitting if fitting >= least else 0
