"""Where the model is worse than on the whole: scores by length and by every further column of the rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain.metrics.slices import LEAST, quantiles
from rtrain.report import stats
from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Block, Note, Section, Table
from rtrain.report.drawing.svg import score_name, short, three

ALPHA = 0.05
"""A slice with a smaller corrected p differs by more than chance."""
LENGTH = "length"
"""The slices by tokens in scores-<split>.json."""
SHOWN = 15

COUNTS: dict[str, Callable[[Any, Any], bool]] = {
    "classes": lambda true, said: True,
    "labels": lambda true, said: bool(len(true) or len(said)),
    "heads": lambda true, said: any(true),
    "tags": lambda true, said: {*true, *said} != {"O"},
}
"""Whether a row counts in the score of its slice, by its target and its answer; other kinds count every row."""


@dataclass(frozen=True)
class Slice:
    name: str
    rows: int
    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Measure:
    """The headline as a reader knows it: an error where the headline is the negative of one."""

    name: str
    sign: int
    whole: float
    """Its value over all rows."""

    @property
    def larger_is_better(self) -> bool:
        return self.sign > 0


def section(run: Collected) -> Section | None:
    if run.answers is None or run.scores is None:
        return None
    blocks = _worst(told(run, slices(run.scores)), measure(run.scores))
    blocks += _unjudged(told(run, slices(run.scores, judged=False)))
    if not blocks:
        return None
    intro = (
        "A score over all rows can hide a group of rows that the model fails on. Slices are quarters by length "
        "(in tokens) and the values of every further column that the recipe names (data.slices)."
    )
    return Section("slices", "Slices", intro, blocks)


def measure(scores: dict[str, Any]) -> Measure:
    name = scores["headline"]
    sign = -1 if name.startswith("neg_") else 1
    return Measure(score_name(name.removeprefix("neg_")), sign, sign * scores["scores"][name])


def slices(scores: dict[str, Any], judged: bool = True) -> list[Slice]:
    """The slices with at least `LEAST` rows, the worst first; or, not `judged`, those with fewer."""
    name, chosen = scores["headline"], measure(scores)
    found = []
    for column, every in scores["slices"].items():
        if len(every) < 2:  # all rows have one value, or so many that all are rare: nothing to compare
            continue
        for one in every:
            if (one["rows"] >= LEAST) != judged or name not in one["scores"]:
                continue
            value = chosen.sign * one["scores"][name]
            ends = None
            if name == "accuracy":  # a share: resampled rows that are all right would seem to be sure of it
                ends = stats.wilson(round(value * one["rows"]), one["rows"])
            elif "interval" in one:
                low, high = sorted(chosen.sign * end for end in one["interval"])
                ends = (low, high)
            # Small values are merged, and a slice of them may be small still: then their own names say more.
            known = ", ".join(one["examples"]) if "merged" in one and not judged else one["value"]
            found.append(Slice(f"{column}: {known or '(empty)'}", one["rows"], value, ends))
    return sorted(found, key=lambda one: chosen.sign * one.value)


def told(run: Collected, found: Sequence[Slice]) -> list[Slice]:
    """The slices without those in which nothing counts, no entity or label that is true or given, no row inside of the
    classes: their score is 0, and yet nothing is wrong there."""
    answers = run.answers
    if answers is None or run.output not in COUNTS:
        return list(found)
    columns = {LENGTH: quantiles(answers.tokens), **answers.slices}
    counts, outside = COUNTS[run.output], run.config.recipe.data.outside
    pairs = zip(answers.target, answers.prediction, strict=True)
    some = [counts(true, said) and not (outside and true == outside) for true, said in pairs]
    empty = set()
    for column, values in columns.items():
        full = {value for value, is_counted in zip(values, some, strict=True) if is_counted}
        empty |= {f"{column}: {one or '(empty)'}" for one in {*values} - full}
    return [one for one in found if one.name not in empty]


def _worst(found: Sequence[Slice], whole: Measure) -> list[Block]:
    worst = found[:SHOWN]
    if len(found) < 2:
        return []
    said = verdicts(found, whole)
    note = (
        "95 % intervals of each slice alone. The verdicts are corrected for the number of slices, by Holm's "
        f"method. Slices of {LEAST} rows or more, the worst first."
    )
    weak = next((one for one, verdict in zip(found, said, strict=True) if verdict == "worse"), None)
    title = "No slice is worse than all rows beyond chance"
    if weak is not None:
        title = f"Worst slice: {short(weak.name, 40)}, {whole.name} {three(weak.value)} against {three(whole.whole)}"
    rows = [
        (
            short(one.name, 60),
            one.rows,
            f"{one.value:.3f}",
            "{:.3f} to {:.3f}".format(*one.interval) if one.interval else "-",
            verdict,
        )
        for one, verdict in zip(worst, said, strict=False)
    ]
    return [Table(title, ("slice", "rows", whole.name, "95 % interval", "vs. all"), rows, note, wide=True)]


def _unjudged(found: Sequence[Slice]) -> list[Block]:
    """The slices whose rows are too few to say anything: they are named, so that nobody takes them for sound."""
    if not found:
        return []
    named = ", ".join(f"{short(one.name, 60)} ({one.rows} rows, {three(one.value)})" for one in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    have = "1 slice has" if len(found) == 1 else f"{len(found)} slices have"
    return [Note(f"{have} fewer than {LEAST} rows: not judged: {named}{more}.")]


def verdicts(found: Sequence[Slice], whole: Measure) -> list[str]:
    """Each slice against all rows: alike, worse or better beyond chance, or - without an interval. The p of a slice is
    that of its interval, whose ends are 1.96 standard errors away; it is corrected for the number of slices, by Holm's
    method, as in a comparison of runs."""
    judged = [(place, one.interval) for place, one in enumerate(found) if one.interval is not None]
    values = []
    for place, (low, high) in judged:
        gap = whole.whole - found[place].value
        half = high - found[place].value if gap > 0 else found[place].value - low
        values.append(math.erfc(1.96 * abs(gap) / half / math.sqrt(2)) if half else float(gap == 0))
    said = ["-"] * len(found)
    for (place, _), p in zip(judged, stats.holm(values), strict=True):
        lower = found[place].value < whole.whole
        said[place] = "alike" if p >= ALPHA else "worse" if lower == whole.larger_is_better else "better"
    return said
