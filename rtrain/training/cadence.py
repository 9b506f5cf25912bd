"""When a run evaluates and saves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """When to evaluate and save. Pure: asked with the number of updates that are done."""

    last: int
    """Updates of the whole run."""
    until: int
    """Updates at which this start ends. Where that is before the run's last, nothing is evaluated for it: the best
    weights of a run must not depend on where it paused."""
    evaluate_every: int
    save_every: int | None

    def due(self, done: int) -> frozenset[str]:
        evaluates = done == self.last or done % self.evaluate_every == 0
        saves = evaluates or done == self.until or (self.save_every is not None and done % self.save_every == 0)
        return frozenset(name for name, is_due in (("evaluate", evaluates), ("save", saves)) if is_due)
