"""Integrated gradients (Sundararajan et al. 2017, arXiv:1703.01365) of a function that returns values and slopes.

attribution = (x - baseline) * integral over a from 0 to 1 of the gradient at baseline + a (x - baseline)

The attributions sum to f(x) - f(baseline); the difference, the completeness error, measures the quadrature. The rule is
Clenshaw-Curtis: nearly as accurate as Gauss-Legendre (Trefethen 2008, "Is Gauss quadrature better than
Clenshaw-Curtis?"), and it reuses every point when the steps are doubled. Its points include both ends, so f(x) and
f(baseline) need no further evaluation. Captum's `IntegratedGradients` explains one output per call, so each target
costs the forward passes again, and its rules share no points when the steps double.

"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

INITIAL_STEPS, MAX_STEPS = 16, 256
ERROR_TOLERANCE = 0.01
"""Steps are doubled until the completeness error is at most this."""
ROUNDING_TOLERANCE = 1e-4
"""Rounding error of fp32 logits, relative to the largest value; smaller differences count as zero."""


@dataclass(frozen=True, eq=False)
class Integral:
    attributions: Doubles
    """[targets, tokens]."""
    values: Doubles
    """f(x) of each target."""
    baselines: Doubles
    """f(baseline) of each target."""
    steps: int
    """Intervals; gradients were computed at `steps` + 1 points."""

    @property
    def errors(self) -> list[float | None]:
        """|sum of attributions - (f(x) - f(baseline))| / |f(x) - f(baseline)|; None if f is equal at both."""
        changes = self.values - self.baselines
        return [
            float(gap / abs(change)) if change else None
            for gap, change in zip(_completeness_gaps(self), changes.tolist(), strict=True)
        ]


def integrate(evaluate: Callable[[Doubles], tuple[Doubles, Doubles]], steps: int | None = None) -> Integral:
    """Integrate a function along the line from the baseline to x.

    Args:
        evaluate: points [n] -> values [n, targets] and slopes [n, targets, tokens]; a token's slope is the dot product
            of its gradient and its difference from the baseline.
        steps: even number. Default: start at `INITIAL_STEPS` and double until the error of each target is at most
            `ERROR_TOLERANCE`, or `MAX_STEPS` are reached (see `errors`).

    """
    num_steps = steps or INITIAL_STEPS
    values, slopes = evaluate(quadrature_nodes(num_steps))
    while True:
        attributions = np.tensordot(quadrature_weights(num_steps), slopes, axes=1)
        integral = Integral(attributions, values[-1], values[0], num_steps)
        if steps or 2 * num_steps > MAX_STEPS or _has_converged(integral):
            return integral
        num_steps *= 2
        between_values, between_slopes = evaluate(quadrature_nodes(num_steps)[1::2])
        values, slopes = _interleave(values, between_values), _interleave(slopes, between_slopes)


def _has_converged(integral: Integral) -> bool:
    changes = np.abs(integral.values - integral.baselines)
    rounding = ROUNDING_TOLERANCE * np.maximum(np.abs(integral.values), np.abs(integral.baselines))
    return bool((_completeness_gaps(integral) <= ERROR_TOLERANCE * changes + rounding).all())


def _completeness_gaps(integral: Integral) -> Doubles:
    gaps: Doubles = np.abs(integral.attributions.sum(axis=1) - (integral.values - integral.baselines))
    return gaps


def _interleave(even: Doubles, odd: Doubles) -> Doubles:
    combined = np.empty((len(even) + len(odd), *even.shape[1:]))
    combined[::2], combined[1::2] = even, odd
    return combined


def quadrature_nodes(steps: int) -> Doubles:
    """Return the `steps` + 1 points in [0, 1], with both ends. Every second one is a point of half as many steps."""
    points: Doubles = (1 - np.cos(np.arange(steps + 1) * np.pi / steps)) / 2
    return points


def quadrature_weights(steps: int) -> Doubles:
    """Return the weights [steps + 1]. They sum to 1 and are exact for polynomials of degree `steps` (even)."""
    half = np.arange(1, steps // 2 + 1)
    factors = np.where(half == steps // 2, 1.0, 2.0) / (4.0 * half**2 - 1)
    angles: Any = 2 * np.pi * np.outer(np.arange(steps + 1), half) / steps
    node_weights: Doubles = (1 - np.cos(angles) @ factors) / steps
    node_weights[[0, -1]] /= 2
    return node_weights
