"""Dynamic loss scaling keeps small gradients of fp16 from vanishing (Micikevicius et al. 2018, arXiv:1710.03740).

The loss is multiplied by a scale and the gradient divided by it. A non-finite gradient is discarded and the scale is
halved; after many finite gradients in a row the scale is doubled. Scales are powers of two, so scaling rounds nothing.

torch.amp.GradScaler has the same rules (a test compares the two). It is not used, since it checks the gradients of one
worker's parameters and keeps its state in tensors: here the norm of the full gradient, equal on all workers, decides,
and the state is three numbers in a checkpoint.
"""

from dataclasses import dataclass, replace

INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 2.0**16, 2.0**-10, 2.0**24
GROWTH_INTERVAL = 2000
"""Finite gradients in a row after which the scale is doubled."""
MAX_CONSECUTIVE_OVERFLOWS = 20
"""Non-finite gradients in a row after which the cause is not the scale."""


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step; a function of the steps before it, equal on every worker."""

    value: float = INITIAL_SCALE
    finite_steps: int = 0
    """Finite gradients in a row since the scale last changed."""
    overflow_steps: int = 0
    """Non-finite gradients in a row."""

    def next_scale(self, *, is_finite: bool) -> "LossScale":
        """Return the scale after a gradient that was finite or not."""
        if not is_finite:
            return LossScale(self.value / 2, 0, self.overflow_steps + 1)
        if self.finite_steps + 1 < GROWTH_INTERVAL:
            return replace(self, finite_steps=self.finite_steps + 1, overflow_steps=0)
        return LossScale(min(2 * self.value, MAX_SCALE))

    @property
    def is_exhausted(self) -> bool:
        """Whether a smaller scale would not help."""
        return self.overflow_steps >= MAX_CONSECUTIVE_OVERFLOWS or self.value < MIN_SCALE


def initial_scale(precision: str) -> LossScale | None:
    """Return the first scale of a run in this precision; None where the loss is not scaled."""
    return LossScale() if precision == "fp16" else None
