"""Scores by length and by slice column, against the score of all rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain.metrics.slices import MIN_ROWS, bin_by_quantile
from rtrain.report import stats
from rtrain.report.collect import RunData
from rtrain.report.drawing.blocks import Block, Note, Section, Table
from rtrain.report.drawing.svg import format_significant, humanize_score_name, truncate

ALPHA = 0.05
"""Significance level of the corrected p."""
LENGTH = "length"
"""Name of the slices by tokens in scores-<split>.json."""
MAX_SHOWN_SLICES = 15

COUNTED_ROW_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "classes": lambda true, predicted: True,
    "labels": lambda true, predicted: bool(len(true) or len(predicted)),
    "heads": lambda true, predicted: any(true),
    "tags": lambda true, predicted: {*true, *predicted} != {"O"},
}
"""Whether a row counts in the score of its slice, by target and prediction; other outputs count all rows."""


@dataclass(frozen=True)
class ScoreSlice:
    name: str
    rows: int
    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class HeadlineMeasure:
    """The headline score for display: an error instead of its negative."""

    name: str
    sign: int
    overall_value: float
    """Value over all rows."""

    @property
    def larger_is_better(self) -> bool:
        return self.sign > 0


def build_section(run: RunData) -> Section | None:
    if run.answers is None or run.scores is None:
        return None
    blocks = _build_worst_table(drop_empty_slices(run, list_slices(run.scores)), measure_headline(run.scores))
    blocks += _build_unjudged_note(drop_empty_slices(run, list_slices(run.scores, is_judged=False)))
    if not blocks:
        return None
    intro = (
        "A score over all rows can hide a group of rows with bad scores. Slices are quarters by length "
        "(in tokens) and the values of every further column that the recipe names (data.slices)."
    )
    return Section("slices", "Slices", intro, blocks)


def measure_headline(scores: dict[str, Any]) -> HeadlineMeasure:
    name = scores["headline"]
    sign = -1 if name.startswith("neg_") else 1
    return HeadlineMeasure(humanize_score_name(name.removeprefix("neg_")), sign, sign * scores["scores"][name])


def list_slices(scores: dict[str, Any], is_judged: bool = True) -> list[ScoreSlice]:
    """List the slices with at least `MIN_ROWS` rows, the worst first; without `is_judged` the smaller slices."""
    name, headline = scores["headline"], measure_headline(scores)
    score_slices = []
    for column, entries in scores["slices"].items():
        if len(entries) < 2:  # a single value, or only rare values: nothing to compare
            continue
        for entry in entries:
            if (entry["rows"] >= MIN_ROWS) != is_judged or name not in entry["scores"]:
                continue
            value = headline.sign * entry["scores"][name]
            ends = None
            if name == "accuracy":  # a share: resamples of all-correct rows have no spread
                ends = stats.wilson_interval(round(value * entry["rows"]), entry["rows"])
            elif "interval" in entry:
                low, high = sorted(headline.sign * end for end in entry["interval"])
                ends = (low, high)
            # A merged slice may still be small; then the names of its values are more useful.
            value_text = ", ".join(entry["examples"]) if "merged" in entry and not is_judged else entry["value"]
            score_slices.append(ScoreSlice(f"{column}: {value_text or '(empty)'}", entry["rows"], value, ends))
    return sorted(score_slices, key=lambda score_slice: headline.sign * score_slice.value)


def drop_empty_slices(run: RunData, slices: Sequence[ScoreSlice]) -> list[ScoreSlice]:
    """Drop slices without a counted row (no true or predicted entity or label, no in-scope row): their score of 0 is no
    mistake."""
    answers = run.answers
    if answers is None or run.output not in COUNTED_ROW_RULES:
        return list(slices)
    columns = {LENGTH: bin_by_quantile(answers.tokens), **answers.slices}
    counts, outside = COUNTED_ROW_RULES[run.output], run.config.recipe.data.out_of_scope_label
    pairs = zip(answers.target, answers.prediction, strict=True)
    is_counted_row = [counts(true, predicted) and not (outside and true == outside) for true, predicted in pairs]
    empty_names = set()
    for column, values in columns.items():
        counted_values = {value for value, is_counted in zip(values, is_counted_row, strict=True) if is_counted}
        empty_names |= {f"{column}: {value or '(empty)'}" for value in {*values} - counted_values}
    return [score_slice for score_slice in slices if score_slice.name not in empty_names]


def _build_worst_table(slices: Sequence[ScoreSlice], headline: HeadlineMeasure) -> list[Block]:
    worst = slices[:MAX_SHOWN_SLICES]
    if len(slices) < 2:
        return []
    slice_verdicts = judge_slices(slices, headline)
    note = (
        "95 % intervals of each slice alone. The verdicts are corrected for the number of slices, by Holm's "
        f"method. Slices of {MIN_ROWS} rows or more, the worst first."
    )
    weak = next(
        (score_slice for score_slice, verdict in zip(slices, slice_verdicts, strict=True) if verdict == "worse"), None
    )
    title = "No slice is significantly worse than all rows"
    if weak is not None:
        title = (
            f"Worst slice: {truncate(weak.name, 40)}, {headline.name} {format_significant(weak.value)} against "
            f"{format_significant(headline.overall_value)}"
        )
    rows = [
        (
            truncate(score_slice.name, 60),
            score_slice.rows,
            f"{score_slice.value:.3f}",
            "{:.3f} to {:.3f}".format(*score_slice.interval) if score_slice.interval else "-",
            verdict,
        )
        for score_slice, verdict in zip(worst, slice_verdicts, strict=False)
    ]
    return [Table(title, ("slice", "rows", headline.name, "95 % interval", "vs. all"), rows, note, wide=True)]


def _build_unjudged_note(slices: Sequence[ScoreSlice]) -> list[Block]:
    """List the slices with too few rows, which are not judged."""
    if not slices:
        return []
    slices_text = ", ".join(
        f"{truncate(score_slice.name, 60)} ({score_slice.rows} rows, {format_significant(score_slice.value)})"
        for score_slice in slices[:MAX_SHOWN_SLICES]
    )
    more_text = f" and {len(slices) - MAX_SHOWN_SLICES} more" if len(slices) > MAX_SHOWN_SLICES else ""
    subject = "1 slice has" if len(slices) == 1 else f"{len(slices)} slices have"
    return [Note(f"{subject} fewer than {MIN_ROWS} rows: not judged: {slices_text}{more_text}.")]


def judge_slices(slices: Sequence[ScoreSlice], headline: HeadlineMeasure) -> list[str]:
    """Compare each slice with all rows: alike, worse or better (significantly), or `-` without an interval.

    p follows from the interval, whose half-width is 1.96 standard errors, and is corrected by Holm's method.
    """
    intervals = [
        (place, score_slice.interval) for place, score_slice in enumerate(slices) if score_slice.interval is not None
    ]
    values = []
    for place, (low, high) in intervals:
        difference = headline.overall_value - slices[place].value
        half_width = high - slices[place].value if difference > 0 else slices[place].value - low
        values.append(
            math.erfc(1.96 * abs(difference) / half_width / math.sqrt(2)) if half_width else float(difference == 0)
        )
    slice_verdicts = ["-"] * len(slices)
    for (place, _), p in zip(intervals, stats.holm_correction(values), strict=True):
        is_lower = slices[place].value < headline.overall_value
        slice_verdicts[place] = (
            "alike" if p >= ALPHA else "worse" if is_lower == headline.larger_is_better else "better"
        )
    return slice_verdicts
