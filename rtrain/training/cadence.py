"""When a run evaluates and saves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """When to evaluate and save. Pure: asked with the number of updates that are done."""

    last: int
    """Updates at which this start ends."""
    evaluate_every: int
    save_every: int | None
    evaluate_at: frozenset[int] = frozenset()

    def due(self, done: int) -> frozenset[str]:
        evaluates = done == self.last or done % self.evaluate_every == 0 or done in self.evaluate_at
        saves = evaluates or (self.save_every is not None and done % self.save_every == 0)
        return frozenset(name for name, is_due in (("evaluate", evaluates), ("save", saves)) if is_due)
