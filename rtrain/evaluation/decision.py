"""Promote, hold or refuse: what was measured beside what is allowed. Pure: nothing is loaded, read or timed here.

A word is said of each subject (the score, each slice, each bucket of lengths, ...); the worst of them is the verdict.
`refuse`: it is worse than allowed, and not by chance. `hold`: that cannot be told, with these rows or on this machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rtrain.config import Gate
from rtrain.evaluation import compare_summary as words
from rtrain.evaluation.differences import Flipped, Slice
from rtrain.evaluation.significance import ALPHA, Difference
from rtrain.metrics.slices import LEAST
from rtrain.report.stats import wilson

Word = Literal["promote", "hold", "refuse"]
WORDS: tuple[Word, ...] = ("promote", "hold", "refuse")
"""The better ones first."""
RULED_OUT = 3
"""The interval of the score must exclude a loss of so many times the allowed one: else rows by the dozen, of which each
is a point or more, would promote anything."""


@dataclass(frozen=True)
class Limits:
    """What is allowed: the settings `gate` for the kind of candidate at hand."""

    loss: float
    slice_loss: float
    lost: float
    speedup: float
    megabytes: float | None = None
    memory_mb: float | None = None


def limits(settings: Gate, student: bool) -> Limits:
    """`student`: the base is the candidate's teacher."""
    return Limits(
        settings.student_loss if student else settings.loss,
        settings.student_slice_loss if student else settings.slice_loss,
        settings.student_lost if student else settings.lost,
        settings.speedup,
        settings.megabytes,
        settings.memory_mb,
    )


@dataclass(frozen=True)
class Speed:
    """Latency of texts of similar length, asked one at a time; milliseconds."""

    bucket: str
    base_p50: float
    base_p99: float
    p50: float
    p99: float
    calls: int
    """How many each side answered."""
    ratio: float
    """The base's median divided by the candidate's: the median over rounds."""
    low: float
    high: float
    """Interval of the ratio, from the rounds."""


@dataclass(frozen=True)
class Measured:
    headline: Difference | None
    """The candidate beside its base; None where there were no rows, or none that could be scored."""
    flipped: Flipped | None = None
    """Right answers lost and won; None where answers are not right or wrong."""
    right: int = 0
    """Rows that the base has right."""
    slices: tuple[Slice, ...] = ()
    speeds: tuple[Speed, ...] = ()
    megabytes: float = 0.0
    memory_mb: float | None = None
    faults: tuple[str, ...] = ()
    """Why the candidate cannot stand in for its base whatever it scores, or cannot be asked at all."""
    unscored: str = ""
    """Why there is no `headline`."""
    inherited: tuple[Word, str] | None = None
    """What the gate has said of the base, where that is no `promote`."""


@dataclass(frozen=True)
class Finding:
    word: Word
    text: str


@dataclass(frozen=True)
class Verdict:
    word: Word
    reasons: tuple[str, ...]
    """What has led to the word."""
    findings: tuple[Finding, ...]
    """All that was looked at, the worst first."""

    @property
    def sentence(self) -> str:
        return f"{self.word}: {'; '.join(self.reasons)}"


def decide(measured: Measured, allowed: Limits) -> Verdict:
    """The worst word of all findings; a worse measurement never has a better one."""
    found = sorted(_findings(measured, allowed), key=lambda one: -WORDS.index(one.word))
    return Verdict(found[0].word, tuple(one.text for one in found if one.word == found[0].word), tuple(found))


def _findings(measured: Measured, allowed: Limits) -> Iterator[Finding]:
    yield from (Finding("refuse", fault) for fault in measured.faults)
    if measured.inherited is not None:
        yield Finding(*measured.inherited)
    if measured.headline is not None:
        yield _score(measured.headline, allowed.loss)
    elif not measured.faults:
        yield Finding("hold", measured.unscored or "there were no rows to score")
    if measured.flipped is not None and measured.right:
        yield _lost(measured.flipped, measured.right, allowed.lost)
    yield from _slices(measured.slices, allowed.slice_loss)
    yield from (_speed(one, allowed.speedup) for one in measured.speeds)
    yield from _most("its files take", measured.megabytes, allowed.megabytes)
    yield from _most("loaded, it takes", measured.memory_mb, allowed.memory_mb)


def _score(one: Difference, share: float) -> Finding:
    if one.rows < LEAST:
        return Finding("hold", f"{one.rows} row{'' if one.rows == 1 else 's'} tell nothing; {LEAST} are the least")
    if one.first == one.other == 0:
        return Finding("hold", f"{words.figures(one)}, on {one.rows:,} rows: nothing that could be lost")
    most = share * abs(one.first)
    told = f"{words.figures(one)}, on {one.rows:,} rows; {words.size(one, most)} may be lost"
    if one.difference < -most:
        sure = one.high < 0 and one.p < ALPHA
        return Finding("refuse", told) if sure else Finding("hold", f"{told}, and this may be chance: more rows tell")
    if one.low < -RULED_OUT * most:
        return Finding("hold", f"{told}, and so few rows do not rule out {words.size(one, RULED_OUT * most)}")
    return Finding("promote", told)


def _lost(flipped: Flipped, right: int, most: float) -> Finding:
    share = flipped.lost / right
    told = (
        f"{flipped.lost:,} of the base's {right:,} right answers are lost ({share:.1%}, and {flipped.won:,} won); "
        f"{most:.1%} may be lost"
    )
    if share <= most:
        return Finding("promote", told)
    if right >= LEAST and wilson(flipped.lost, right)[0] > most:
        return Finding("refuse", told)
    return Finding("hold", f"{told}, and this may be chance: more rows tell")


def _slices(slices: Sequence[Slice], share: float) -> Iterator[Finding]:
    """A finding for each slice that is too bad, or one for all. Many slices of few rows differ by chance: one that is
    worse by its own interval is held, and refused where p, corrected for their number, says so too."""
    bad = []
    for one in slices:
        difference = one.difference
        most = share * abs(difference.first)
        if difference.difference < -most and difference.high < 0:
            told = (
                f"where {one.column} is {one.value}: {words.figures(difference)}, on {difference.rows:,} rows; "
                f"{words.size(difference, most)} may be lost in a slice"
            )
            bad.append(Finding("refuse" if difference.p < ALPHA else "hold", told))
    if slices and not bad:
        bad = [Finding("promote", f"none of {len(slices)} slices is worse by more than {share:.0%}, chance apart")]
    yield from bad


def _speed(one: Speed, least: float) -> Finding:
    told = (
        f"{one.bucket}: {one.ratio:.2f} times as fast as its base ({one.low:.2f} to {one.high:.2f}; {one.p50:.2f} ms "
        f"against {one.base_p50:.2f}); {least:g} is the least"
    )
    if one.low >= least:
        return Finding("promote", told)
    if one.high < least:
        return Finding("refuse", told)
    return Finding("hold", f"{told}, and this machine is too noisy to tell")


def _most(what: str, value: float | None, most: float | None) -> Iterator[Finding]:
    if value is not None and most is not None:
        yield Finding("refuse" if value > most else "promote", f"{what} {value:.1f} MB; {most:g} may be taken")
