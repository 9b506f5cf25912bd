"""The verdict in one sentence, and formatting of figures."""

from rtrain.evaluation import significance
from rtrain.evaluation.differences import AnswerComparison, CandidateResult
from rtrain.evaluation.significance import Difference
from rtrain.metrics.slices import MIN_ROWS
from rtrain.report.drawing.svg import format_significant, humanize_score_name

NON_SHARE_SCORES = ("rmse", "mae", "r2", "pearson", "qwk", "perplexity")
"""Errors and correlations, whose values may lie between 0 and 1."""
VERDICT_PHRASES = {1: "is better", -1: "is worse"}


def format_verdicts(answer_comparison: AnswerComparison) -> str:
    """Format the verdict on each candidate against the first one."""
    corrected = (
        f" (p by Holm for {len(answer_comparison.results)} comparisons)" if len(answer_comparison.results) > 1 else ""
    )
    return "; ".join(format_verdict(result) for result in answer_comparison.results) + corrected


def format_verdict(candidate_result: CandidateResult) -> str:
    """`B (wide) is better: accuracy 0.927 against 0.915, +1.2 points (0.4 to 2.0), p 0.003, on 3,080 rows`."""
    headline = candidate_result.headline
    rows = f"{headline.rows:,} row{'' if headline.rows == 1 else 's'}"
    if headline.verdict:
        return (
            f"{candidate_result.candidate} {VERDICT_PHRASES[headline.verdict]}: {format_difference(headline)}, on "
            f"{rows}"
        )
    return (
        f"{candidate_result.candidate} is not significantly different on {rows}: "
        f"{format_difference(headline)}{_format_required_rows(headline)}"
    )


def _format_required_rows(difference: Difference) -> str:
    """Format the required number of rows, or the reason why it is unknown."""
    if difference.rows < MIN_ROWS:
        return f"; at least {MIN_ROWS} rows are needed"
    detectable = significance.minimum_detectable_effect(difference)
    if detectable == 0:
        return "; both predict all rows equally well"
    # A tiny difference would need millions of rows, so use a point instead.
    effect = max(abs(difference.difference), 0.01) if is_share(difference) else abs(difference.difference)
    if effect == 0 or effect >= detectable:
        return f"; these rows can detect a difference of {format_size(difference, detectable)}"
    rows = f"{significance.required_sample_size(difference, effect):,}"
    return (
        f"; a difference below {format_size(difference, detectable)} needs more rows, one of "
        f"{format_size(difference, effect)} about {rows}"
    )


def format_difference(difference: Difference) -> str:
    """Format both scores (the other model's first), their difference with its interval, and p."""
    return (
        f"{format_score_name(difference)} {format_score(difference, difference.other)} against "
        f"{format_score(difference, difference.first)}, {format_change(difference)}, p "
        f"{format_p_value(difference.p)}"
    )


def is_share(difference: Difference) -> bool:
    """Whether the score is a share, with differences in points. Errors have the unit of the targets."""
    return (
        difference.name not in NON_SHARE_SCORES
        and not is_error(difference.name)
        and 0 <= difference.first <= 1
        and 0 <= difference.other <= 1
    )


def is_error(name: str) -> bool:
    """Whether a score is a negated error. It is shown as the error: smaller is better."""
    return name.startswith("neg_")


def format_score_name(difference: Difference) -> str:
    return humanize_score_name(difference.name.removeprefix("neg_"))


def format_score(difference: Difference, value: float) -> str:
    return (
        f"{value:.3f}" if is_share(difference) else format_significant(-value if is_error(difference.name) else value)
    )


def format_change(difference: Difference) -> str:
    """Format `+1.2 points (0.4 to 2.0)`, or `-0.020 (-0.036 to -0.004)` for an error."""
    if is_share(difference):
        return f"{100 * difference.difference:+.1f} points ({100 * difference.low:.1f} to {100 * difference.high:.1f})"
    value, low, high = difference.difference, difference.low, difference.high
    if is_error(difference.name):
        value, low, high = -value, -high, -low
    return (
        f"{'+' if value >= 0 else ''}{format_significant(value)} ({format_significant(low)} to "
        f"{format_significant(high)})"
    )


def format_size(difference: Difference, value: float) -> str:
    return f"{100 * value:.1f} points" if is_share(difference) else format_significant(value)


def format_p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0095 else f"{p:.1g}" if p >= 1e-4 else "below 0.0001"
