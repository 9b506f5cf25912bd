"""The outcome in one sentence, and figures as a sentence has them."""

from rtrain.evaluation import significance
from rtrain.evaluation.differences import Against, Measured
from rtrain.evaluation.significance import Difference
from rtrain.metrics.slices import LEAST
from rtrain.report.drawing.svg import score_name, three

NO_SHARES = ("rmse", "mae", "r2", "pearson", "qwk", "perplexity")
"""Errors and correlations, which may happen to be between 0 and 1."""
SIDES = {1: "is better", -1: "is worse"}


def of_all(found: Measured) -> str:
    """The verdict on each side beside the first one."""
    corrected = f" (p by Holm for {len(found.against)} comparisons)" if len(found.against) > 1 else ""
    return "; ".join(of_one(one) for one in found.against) + corrected


def of_one(found: Against) -> str:
    """`B (wide) is better: accuracy 0.927 against 0.915, +1.2 points (0.4 to 2.0), p 0.003, on 3,080 rows`."""
    one = found.headline
    rows = f"{one.rows:,} row{'' if one.rows == 1 else 's'}"
    if one.verdict:
        return f"{found.side} {SIDES[one.verdict]}: {figures(one)}, on {rows}"
    return f"{found.side} cannot be told apart on {rows}: {figures(one)}{_needs(one)}"


def _needs(one: Difference) -> str:
    """How many rows it would take, or why that cannot be said."""
    if one.rows < LEAST:
        return f"; fewer than {LEAST} rows tell nothing"
    seen = significance.seen(one)
    if seen == 0:
        return "; every row is answered as well by both"
    # A difference that is next to nothing would take rows without end: a point is asked about in its place.
    asked = max(abs(one.difference), 0.01) if is_share(one) else abs(one.difference)
    if asked == 0 or asked >= seen:
        return f"; so many rows show a difference of {size(one, seen)}"
    rows = f"{significance.needed(one, asked):,}"
    return f"; a difference below {size(one, seen)} needs more rows, one of {size(one, asked)} about {rows}"


def figures(one: Difference) -> str:
    """Both scores, the other side's first; their difference with its interval; p."""
    return (
        f"{named(one)} {score(one, one.other)} against {score(one, one.first)}, {change(one)}, p {probability(one.p)}"
    )


def is_share(one: Difference) -> bool:
    """Whether the score is a share, whose differences are told in points: of an error the unit is the targets' own."""
    return one.name not in NO_SHARES and not is_error(one.name) and 0 <= one.first <= 1 and 0 <= one.other <= 1


def is_error(name: str) -> bool:
    """Whether a score is the negative of an error, which is shown as it is: smaller is better."""
    return name.startswith("neg_")


def named(one: Difference) -> str:
    return score_name(one.name.removeprefix("neg_"))


def score(one: Difference, value: float) -> str:
    return f"{value:.3f}" if is_share(one) else three(-value if is_error(one.name) else value)


def change(one: Difference) -> str:
    """`+1.2 points (0.4 to 2.0)`; of an error, `-0.020 (-0.036 to -0.004)`."""
    if is_share(one):
        return f"{100 * one.difference:+.1f} points ({100 * one.low:.1f} to {100 * one.high:.1f})"
    value, low, high = one.difference, one.low, one.high
    if is_error(one.name):
        value, low, high = -value, -high, -low
    return f"{'+' if value >= 0 else ''}{three(value)} ({three(low)} to {three(high)})"


def size(one: Difference, value: float) -> str:
    return f"{100 * value:.1f} points" if is_share(one) else three(value)


def probability(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0095 else f"{p:.1g}" if p >= 1e-4 else "below 0.0001"
