"""Dynamic loss scaling keeps small gradients of fp16 from vanishing (Micikevicius et al. 2018, arXiv:1710.03740).

The loss is multiplied by a scale and the gradient divided by it again. A gradient that is infinite is thrown away, and
the scale is halved; after many finite ones in a row it is doubled. Scales are powers of two: they round nothing.

torch.amp.GradScaler has the same rules (a test compares the two). It is not used since it judges the gradients of the
parameters that an optimizer holds, as that worker sees them, and keeps its state in tensors: here the norm of the whole
gradient, which all workers know alike, decides, and the state is three numbers of a checkpoint.
"""

from dataclasses import dataclass, replace

FIRST, LEAST, MOST = 2.0**16, 2.0**-10, 2.0**24
GROWS_AFTER = 2000
"""Finite gradients in a row after which the scale is doubled."""
TRIES = 20
"""Infinite gradients in a row after which something other than the scale is wrong."""


@dataclass(frozen=True)
class Scale:
    """The scale of the coming update; a function of the updates before it, the same on every worker."""

    value: float = FIRST
    finite: int = 0
    """Finite gradients in a row since the scale last changed."""
    infinite: int = 0
    """Infinite gradients in a row."""

    def after(self, *, finite: bool) -> "Scale":
        """The scale once a gradient was found to be finite, or not."""
        if not finite:
            return Scale(self.value / 2, 0, self.infinite + 1)
        if self.finite + 1 < GROWS_AFTER:
            return replace(self, finite=self.finite + 1, infinite=0)
        return Scale(min(2 * self.value, MOST))

    @property
    def hopeless(self) -> bool:
        """Whether a smaller scale would not help."""
        return self.infinite >= TRIES or self.value < LEAST


def first(precision: str) -> Scale | None:
    """What a run in this precision begins with; None where its loss is not scaled."""
    return Scale() if precision == "fp16" else None
