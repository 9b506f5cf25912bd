"""Integrated gradients (Sundararajan et al. 2017, arXiv:1703.01365) of any function that gives values and slopes.

attribution = (x - baseline) * integral over a from 0 to 1 of the gradient at baseline + a (x - baseline)

Summed over the inputs it is f(x) - f(baseline): how far it is from that, the completeness error, tells how good the
quadrature was. Ours is Clenshaw-Curtis: nearly as accurate as Gauss-Legendre (Trefethen 2008, "Is Gauss quadrature
better than Clenshaw-Curtis?"), and when its steps are doubled every earlier point is used again. The ends are among its
points, so that f(x) and f(baseline) come with them. Captum's `IntegratedGradients` does not take its place: it explains
one output a call, so that each target costs the forward passes anew, and its rules share no points when steps double.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

FIRST_STEPS, MOST_STEPS = 16, 256
TOLERANCE = 0.01
"""Completeness error up to which steps are not doubled once more."""
ROUNDING = 1e-4
"""Rounding of fp32 logits, relative to the largest value: a smaller difference cannot be told from none."""


@dataclass(frozen=True, eq=False)
class Integral:
    attributions: Doubles
    """[targets, tokens]."""
    values: Doubles
    """f(x) of each target."""
    baselines: Doubles
    """f(baseline) of each target."""
    steps: int
    """Intervals on the way; the gradient was taken at one point more."""

    @property
    def errors(self) -> list[float | None]:
        """|sum of attributions - (f(x) - f(baseline))| / |f(x) - f(baseline)|; None where f is the same at both."""
        moved = self.values - self.baselines
        return [float(gap / abs(way)) if way else None for gap, way in zip(_gaps(self), moved.tolist(), strict=True)]


def integrate(along: Callable[[Doubles], tuple[Doubles, Doubles]], steps: int | None = None) -> Integral:
    """The integral of a function along the way from the baseline to x.

    `along(points [n])` -> values [n, targets] and slopes [n, targets, tokens]; a token's slope is the dot product of
    its gradient and its way from the baseline. `steps` is even. Without it, steps start at FIRST_STEPS and are doubled
    until the error of each target is within TOLERANCE or MOST_STEPS are reached; `errors` says which it was.
    """
    number = steps or FIRST_STEPS
    values, slopes = along(nodes(number))
    while True:
        weighted = np.tensordot(weights(number), slopes, axes=1)
        found = Integral(weighted, values[-1], values[0], number)
        if steps or 2 * number > MOST_STEPS or _converged(found):
            return found
        number *= 2
        between_values, between_slopes = along(nodes(number)[1::2])
        values, slopes = _interleaved(values, between_values), _interleaved(slopes, between_slopes)


def _converged(found: Integral) -> bool:
    moved = np.abs(found.values - found.baselines)
    rounding = ROUNDING * np.maximum(np.abs(found.values), np.abs(found.baselines))
    return bool((_gaps(found) <= TOLERANCE * moved + rounding).all())


def _gaps(found: Integral) -> Doubles:
    gaps: Doubles = np.abs(found.attributions.sum(axis=1) - (found.values - found.baselines))
    return gaps


def _interleaved(even: Doubles, odd: Doubles) -> Doubles:
    both = np.empty((len(even) + len(odd), *even.shape[1:]))
    both[::2], both[1::2] = even, odd
    return both


def nodes(steps: int) -> Doubles:
    """The `steps` + 1 points of [0, 1], both ends included. Every second one is also a point of half as many steps."""
    points: Doubles = (1 - np.cos(np.arange(steps + 1) * np.pi / steps)) / 2
    return points


def weights(steps: int) -> Doubles:
    """Weights of the points [steps + 1]; they sum to 1, and are exact for polynomials of degree `steps` (even)."""
    half = np.arange(1, steps // 2 + 1)
    factors = np.where(half == steps // 2, 1.0, 2.0) / (4.0 * half**2 - 1)
    angles: Any = 2 * np.pi * np.outer(np.arange(steps + 1), half) / steps
    found: Doubles = (1 - np.cos(angles) @ factors) / steps
    found[[0, -1]] /= 2
    return found
