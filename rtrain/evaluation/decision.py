"""The decision to promote, hold or refuse, from measurements and limits. Pure functions.

Each subject (the score, each slice, each length bucket, ...) has its own decision; the worst is the verdict. `refuse`:
the candidate misses a limit, and not by chance. For the score and the slices the difference itself misses the limit,
and is significant against no difference; of lost answers and latencies the whole interval misses the limit; sizes have
no chance. `hold`: these rows, or this machine, do not decide it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rtrain.config import GateConfig
from rtrain.evaluation import significance
from rtrain.evaluation.latency import LatencyComparison
from rtrain.evaluation.significance import ALPHA, Difference, McNemarTest, PairedScores, SliceDifference
from rtrain.metrics.per_class import ClassResult
from rtrain.metrics.scores import MIN_ROWS
from rtrain.report.stats import wilson_interval

Decision = Literal["promote", "hold", "refuse"]
DECISIONS: tuple[Decision, ...] = ("promote", "hold", "refuse")
"""The best first."""
EXCLUDED_DROP_FACTOR = 3
"""The score's interval must exclude this multiple of the allowed drop. Else a test on few rows, too noisy to show a
drop, would promote anything."""


@dataclass(frozen=True)
class GateLimits:
    max_score_drop: float
    max_slice_drop: float
    max_negative_flips: float
    min_speedup: float
    max_megabytes: float | None = None
    max_memory_mb: float | None = None
    min_recall: Mapping[str, float] = field(default_factory=dict)
    """Least recall by label."""
    min_precision: Mapping[str, float] = field(default_factory=dict)


def make_limits(settings: GateConfig, is_student: bool) -> GateLimits:
    """Select the limits; `is_student`: the baseline is the candidate's teacher."""
    return GateLimits(
        settings.student_max_score_drop if is_student else settings.max_score_drop,
        settings.student_max_slice_drop if is_student else settings.max_slice_drop,
        settings.student_max_negative_flips if is_student else settings.max_negative_flips,
        settings.min_speedup,
        settings.max_megabytes,
        settings.max_memory_mb,
        settings.min_recall,
        settings.min_precision,
    )


@dataclass(frozen=True)
class GateMeasurements:
    scores: PairedScores
    """Candidate against baseline; without a headline if no row can be scored."""
    speeds: tuple[LatencyComparison, ...] = ()
    megabytes: float = 0.0
    memory_mb: float | None = None
    rejection_reason: str = ""
    """Reason to refuse the candidate whatever its score."""
    unscored_reason: str = ""
    """Reason for a missing headline."""
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


def decide(measured: GateMeasurements, limits: GateLimits) -> GateVerdict:
    """Return the worst decision of all findings. It is monotone: a worse measurement never improves it."""
    findings = sorted(_collect_findings(measured, limits), key=lambda finding: -DECISIONS.index(finding.decision))
    worst = findings[0].decision
    reasons = tuple(finding.text for finding in findings if finding.decision == worst)
    return GateVerdict(worst, reasons, tuple(findings))


def _collect_findings(measured: GateMeasurements, limits: GateLimits) -> Iterator[GateFinding]:
    scores = measured.scores
    if measured.rejection_reason:
        yield GateFinding("refuse", measured.rejection_reason)
    if measured.inherited_verdict is not None:
        yield GateFinding(*measured.inherited_verdict)
    if scores.headline is not None:
        yield _judge_score(scores.headline, limits.max_score_drop)
    elif not measured.rejection_reason:
        yield GateFinding("hold", measured.unscored_reason or "there are no rows to score")
    if scores.mcnemar is not None and scores.first_correct:
        yield _judge_negative_flips(scores.mcnemar, scores.first_correct, limits.max_negative_flips)
    yield from _judge_slices(scores.slices, limits.max_slice_drop)
    for name, floors in (("recall", limits.min_recall), ("precision", limits.min_precision)):
        yield from (_judge_label(scores.classes, label, name, floor) for label, floor in floors.items())
    yield from (_judge_speed(speed, limits.min_speedup) for speed in measured.speeds)
    yield from _judge_limit("its files take", measured.megabytes, limits.max_megabytes)
    yield from _judge_limit("loaded, it takes", measured.memory_mb, limits.max_memory_mb)


def _judge_score(difference: Difference, max_relative_drop: float) -> GateFinding:
    rows, max_drop = difference.rows, max_relative_drop * abs(difference.first)
    if rows < MIN_ROWS:
        return GateFinding("hold", f"{rows} row{'' if rows == 1 else 's'} are too few; at least {MIN_ROWS} are needed")
    figures = f"{significance.format_difference(difference)}, on {rows:,} rows"
    if difference.first == difference.other == 0:
        return GateFinding("hold", f"{figures}: both scores are 0")
    text = f"{figures}; {significance.format_size(difference, max_drop)} may be lost"
    if difference.difference < -max_drop:
        if difference.high < 0 and difference.p < ALPHA:
            return GateFinding("refuse", text)
        return GateFinding("hold", f"{text}, which may be chance: use more rows")
    if difference.low < -EXCLUDED_DROP_FACTOR * max_drop:
        excluded_drop = significance.format_size(difference, EXCLUDED_DROP_FACTOR * max_drop)
        return GateFinding("hold", f"{text}; these rows do not exclude a drop of {excluded_drop}")
    return GateFinding("promote", text)


def _judge_negative_flips(mcnemar: McNemarTest, baseline_correct: int, max_share: float) -> GateFinding:
    share = mcnemar.lost / baseline_correct
    text = (
        f"{mcnemar.lost:,} of the baseline's {baseline_correct:,} correct answers are lost ({share:.1%}, and "
        f"{mcnemar.won:,} won); {max_share:.1%} may be lost"
    )
    if share <= max_share:
        return GateFinding("promote", text)
    if baseline_correct >= MIN_ROWS and wilson_interval(mcnemar.lost, baseline_correct)[0] > max_share:
        return GateFinding("refuse", text)
    return GateFinding("hold", f"{text}, which may be chance: use more rows")


def _judge_slices(slices: Sequence[SliceDifference], max_relative_drop: float) -> Iterator[GateFinding]:
    """Yield a finding for each slice below the limit, or one for all slices.

    Many small slices differ by chance. A slice counts if its difference is below the limit and its interval below 0: it
    is held, and refused if the corrected p is significant too.
    """
    any_below = False
    for slice_ in slices:
        difference = slice_.difference
        max_drop = max_relative_drop * abs(difference.first)
        if difference.difference < -max_drop and difference.high < 0:
            any_below = True
            text = (
                f"where {slice_.column} is {slice_.value}: {significance.format_difference(difference)}, on "
                f"{difference.rows:,} rows; {significance.format_size(difference, max_drop)} may be lost in a slice"
            )
            yield GateFinding("refuse" if difference.p < ALPHA else "hold", text)
    if slices and not any_below:
        limit = f"more than {max_relative_drop:.0%} below the baseline"
        yield GateFinding("promote", f"none of {len(slices)} slices is {limit} and significantly worse")


def find_class(classes: Sequence[ClassResult], label: str) -> ClassResult | None:
    """The scores of a label; a label of one head of several is `HEAD/LABEL`."""
    results = {str(result["class"]): result for result in classes}
    return results.get(label) or results.get(label.replace("/", ": ", 1))


def _judge_label(classes: Sequence[ClassResult], label: str, name: str, floor: float) -> GateFinding:
    result = find_class(classes, label)
    rows = 0 if result is None else int(result["support"] if name == "recall" else result["other"]["predicted"])
    if result is None or rows == 0:
        whose = f"with the label {label}" if name == "recall" else f"that the candidate gives the label {label}"
        return GateFinding("hold", f"no row {whose}; its {name} must be {floor:g} or more")
    value = float(result["other"][name])
    low, high = wilson_interval(value * rows, rows)
    text = (
        f"{name} of {label} {value:.3f} ({low:.3f} to {high:.3f}, on {rows:,} row{'' if rows == 1 else 's'}); "
        f"the least is {floor:g}"
    )
    if value >= floor:
        return GateFinding("promote", text)
    return (
        GateFinding("refuse", text)
        if high < floor
        else GateFinding("hold", f"{text}, which may be chance: use more rows")
    )


def _judge_speed(speed: LatencyComparison, min_speedup: float) -> GateFinding:
    text = (
        f"{speed.bucket}: {speed.ratio:.2f} times as fast as the baseline ({speed.low:.2f} to {speed.high:.2f}; "
        f"{speed.p50:.2f} ms against {speed.baseline_p50:.2f}); the limit is {min_speedup:g}"
    )
    if speed.low >= min_speedup:
        return GateFinding("promote", text)
    if speed.high < min_speedup:
        return GateFinding("refuse", text)
    return GateFinding("hold", f"{text}; this machine is too noisy to decide")


def _judge_limit(subject: str, value: float | None, limit: float | None) -> Iterator[GateFinding]:
    if value is not None and limit is not None:
        yield GateFinding("refuse" if value > limit else "promote", f"{subject} {value:.1f} MB; the limit is {limit:g}")
