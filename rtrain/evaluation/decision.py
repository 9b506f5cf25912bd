"""The decision to promote, hold or refuse, from measurements and limits. Pure functions.

Each subject (the score, each slice, each length bucket, ...) has its own decision; the worst is the verdict. `refuse`:
the candidate is significantly worse than allowed. `hold`: these rows, or this machine, do not decide it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rtrain.config import GateConfig
from rtrain.evaluation import compare_summary
from rtrain.evaluation.differences import McNemarTest, SliceDifference
from rtrain.evaluation.significance import ALPHA, Difference
from rtrain.metrics.slices import MIN_ROWS
from rtrain.report.stats import wilson_interval

Decision = Literal["promote", "hold", "refuse"]
DECISIONS: tuple[Decision, ...] = ("promote", "hold", "refuse")
"""The best first."""
EXCLUDED_DROP_FACTOR = 3
"""The score's interval must exclude this multiple of the allowed drop. Otherwise a few dozen rows, each worth a point
or more, would promote any candidate."""


@dataclass(frozen=True)
class GateLimits:
    """Limits of the settings `gate` for one kind of candidate."""

    max_score_drop: float
    max_slice_drop: float
    max_negative_flips: float
    min_speedup: float
    max_megabytes: float | None = None
    max_memory_mb: float | None = None


def make_limits(settings: GateConfig, is_student: bool) -> GateLimits:
    """Select the limits; `is_student`: the baseline is the candidate's teacher."""
    return GateLimits(
        settings.student_max_score_drop if is_student else settings.max_score_drop,
        settings.student_max_slice_drop if is_student else settings.max_slice_drop,
        settings.student_max_negative_flips if is_student else settings.max_negative_flips,
        settings.min_speedup,
        settings.max_megabytes,
        settings.max_memory_mb,
    )


@dataclass(frozen=True)
class LatencyComparison:
    """Latency of texts of similar length, one per call, in milliseconds."""

    bucket: str
    baseline_p50: float
    baseline_p99: float
    p50: float
    p99: float
    calls: int
    """Calls of each model."""
    ratio: float
    """Baseline median / candidate median; the median over rounds."""
    low: float
    high: float
    """Interval of the ratio over rounds."""


@dataclass(frozen=True)
class GateMeasurements:
    headline: Difference | None
    """Candidate against baseline; None without scorable rows."""
    mcnemar: McNemarTest | None = None
    """Correct answers lost and won; None for answers that are not right or wrong."""
    baseline_correct: int = 0
    """Rows with a correct answer of the baseline."""
    slices: tuple[SliceDifference, ...] = ()
    speeds: tuple[LatencyComparison, ...] = ()
    megabytes: float = 0.0
    memory_mb: float | None = None
    rejection_reasons: tuple[str, ...] = ()
    """Reasons to refuse the candidate whatever its score."""
    unscored_reason: str = ""
    """Reason for a missing `headline`."""
    inherited_verdict: tuple[Decision, str] | None = None
    """Verdict of the baseline, unless it is `promote`."""


@dataclass(frozen=True)
class GateFinding:
    decision: Decision
    text: str


@dataclass(frozen=True)
class GateVerdict:
    decision: Decision
    reasons: tuple[str, ...]
    """Texts of the findings with this decision."""
    findings: tuple[GateFinding, ...]
    """All findings, the worst first."""

    @property
    def sentence(self) -> str:
        return f"{self.decision}: {'; '.join(self.reasons)}"


def decide(measured: GateMeasurements, limits: GateLimits) -> GateVerdict:
    """Return the worst decision of all findings. It is monotone: a worse measurement never improves it."""
    findings = sorted(_collect_findings(measured, limits), key=lambda finding: -DECISIONS.index(finding.decision))
    return GateVerdict(
        findings[0].decision,
        tuple(finding.text for finding in findings if finding.decision == findings[0].decision),
        tuple(findings),
    )


def _collect_findings(measured: GateMeasurements, limits: GateLimits) -> Iterator[GateFinding]:
    yield from (GateFinding("refuse", reason) for reason in measured.rejection_reasons)
    if measured.inherited_verdict is not None:
        yield GateFinding(*measured.inherited_verdict)
    if measured.headline is not None:
        yield _judge_score(measured.headline, limits.max_score_drop)
    elif not measured.rejection_reasons:
        yield GateFinding("hold", measured.unscored_reason or "there are no rows to score")
    if measured.mcnemar is not None and measured.baseline_correct:
        yield _judge_negative_flips(measured.mcnemar, measured.baseline_correct, limits.max_negative_flips)
    yield from _judge_slices(measured.slices, limits.max_slice_drop)
    yield from (_judge_speed(speed, limits.min_speedup) for speed in measured.speeds)
    yield from _judge_limit("its files take", measured.megabytes, limits.max_megabytes)
    yield from _judge_limit("loaded, it takes", measured.memory_mb, limits.max_memory_mb)


def _judge_score(difference: Difference, max_relative_drop: float) -> GateFinding:
    if difference.rows < MIN_ROWS:
        return GateFinding(
            "hold",
            f"{difference.rows} row{'' if difference.rows == 1 else 's'} are too few; at least {MIN_ROWS} are needed",
        )
    if difference.first == difference.other == 0:
        return GateFinding(
            "hold", f"{compare_summary.format_difference(difference)}, on {difference.rows:,} rows: both scores are 0"
        )
    max_drop = max_relative_drop * abs(difference.first)
    text = (
        f"{compare_summary.format_difference(difference)}, on {difference.rows:,} rows; "
        f"{compare_summary.format_size(difference, max_drop)} may be lost"
    )
    if difference.difference < -max_drop:
        is_significant = difference.high < 0 and difference.p < ALPHA
        return (
            GateFinding("refuse", text)
            if is_significant
            else GateFinding("hold", f"{text}, which may be chance: use more rows")
        )
    if difference.low < -EXCLUDED_DROP_FACTOR * max_drop:
        return GateFinding(
            "hold",
            f"{text}; these rows do not exclude a drop of "
            f"{compare_summary.format_size(difference, EXCLUDED_DROP_FACTOR * max_drop)}",
        )
    return GateFinding("promote", text)


def _judge_negative_flips(mcnemar: McNemarTest, baseline_correct: int, max_share: float) -> GateFinding:
    share = mcnemar.lost / baseline_correct
    text = (
        f"{mcnemar.lost:,} of the baseline's {baseline_correct:,} correct answers are lost ({share:.1%}, and "
        f"{mcnemar.won:,} won); "
        f"{max_share:.1%} may be lost"
    )
    if share <= max_share:
        return GateFinding("promote", text)
    if baseline_correct >= MIN_ROWS and wilson_interval(mcnemar.lost, baseline_correct)[0] > max_share:
        return GateFinding("refuse", text)
    return GateFinding("hold", f"{text}, which may be chance: use more rows")


def _judge_slices(slices: Sequence[SliceDifference], max_relative_drop: float) -> Iterator[GateFinding]:
    """Yield a finding for each slice below the limit, or one for all slices.

    Many small slices differ by chance. A slice below the limit by its own interval is held; it is refused if the
    corrected p is significant too.
    """
    findings = []
    for slice_ in slices:
        difference = slice_.difference
        max_drop = max_relative_drop * abs(difference.first)
        if difference.difference < -max_drop and difference.high < 0:
            text = (
                f"where {slice_.column} is {slice_.value}: {compare_summary.format_difference(difference)}, on "
                f"{difference.rows:,} rows; "
                f"{compare_summary.format_size(difference, max_drop)} may be lost in a slice"
            )
            findings.append(GateFinding("refuse" if difference.p < ALPHA else "hold", text))
    if slices and not findings:
        findings = [
            GateFinding(
                "promote", f"none of {len(slices)} slices is significantly worse by more than {max_relative_drop:.0%}"
            )
        ]
    yield from findings


def _judge_speed(speed: LatencyComparison, min_speedup: float) -> GateFinding:
    text = (
        f"{speed.bucket}: {speed.ratio:.2f} times as fast as the baseline ({speed.low:.2f} to {speed.high:.2f}; "
        f"{speed.p50:.2f} ms "
        f"against {speed.baseline_p50:.2f}); the limit is {min_speedup:g}"
    )
    if speed.low >= min_speedup:
        return GateFinding("promote", text)
    if speed.high < min_speedup:
        return GateFinding("refuse", text)
    return GateFinding("hold", f"{text}; this machine is too noisy to decide")


def _judge_limit(subject: str, value: float | None, limit: float | None) -> Iterator[GateFinding]:
    if value is not None and limit is not None:
        yield GateFinding("refuse" if value > limit else "promote", f"{subject} {value:.1f} MB; the limit is {limit:g}")
