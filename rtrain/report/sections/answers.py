"""Predictions of the best weights: scores with intervals, calibration, blocks by kind of output, and slices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rtrain.metrics.scores import MIN_ROWS, bin_by_quantile
from rtrain.report import charts, stats
from rtrain.report.collect import RunData
from rtrain.report.page import Block, Figure, Note, Section, Table
from rtrain.report.sections import outputs
from rtrain.report.svg import format_significant, humanize_score_name, truncate

SPLIT_NAMES = {"test": "test", "valid": "validation"}
UNITS = {"labels": "yes or no to a label", "tags": "tags of words", "summary": "sentences, taken by the oracle or not"}
"""Unit of the confidence, if it is not a row's answer."""


def score_intervals(run: RunData) -> Mapping[str, tuple[float, float]]:
    """95 % bootstrap intervals by score, for scores that are sums over rows."""
    bootstrap: Mapping[str, Any] = (run.scores or {}).get("intervals", {}).get("scores", {})
    return {name: (low, high) for name, (low, high) in bootstrap.items()}


def build_answers_section(run: RunData) -> Section:
    answers = run.answers
    if answers is None:
        text = "The run has neither predictions-test.parquet nor predictions-valid.parquet."
        return Section("answers", "Answers", "", [Note(text)])
    intro = f"Predictions of the best weights on the {len(answers):,} {SPLIT_NAMES[answers.split]} rows."
    if run.scores is None:
        text = f"The run has no scores-{answers.split}.json, so scores of labels, intervals and slices are unknown."
        return Section("answers", "Answers", intro, [Note(text)])
    tables = run.scores["tables"]
    blocks: list[Block] = [_build_score_table(run, run.scores)]
    if "calibration" in tables:
        blocks += _build_calibration(tables["calibration"], UNITS.get(run.scores["output"], "answers"))
    blocks += _BUILDERS.get(run.scores["output"], _build_nothing)(run, tables)
    return Section("answers", "Answers", intro, blocks)


def _build_score_table(run: RunData, scores: Mapping[str, Any]) -> Table:
    ends = score_intervals(run)
    # A negated error is for comparisons; the table has the error itself.
    left_out = ("neg_", *(outputs.REFERENCE_PREFIXES if scores["output"] == "summary" else ()))
    rows = [
        (humanize_score_name(name), _format_score(value), format_interval(ends.get(name)))
        for name, value in scores["scores"].items()
        if name != "rows" and not name.startswith(left_out)
    ]
    note = (
        "Bootstrap over the rows: 95 of 100 such intervals contain the true score. Models with widely overlapping "
        "intervals do not differ significantly. Areas under curves have no interval."
    )
    return Table("Scores with intervals", ("score", "value", "95 % interval"), rows, note)


def format_interval(ends: Sequence[float] | None) -> str:
    """Format the interval, or `-` if its ends are equal: resamples of equal rows are equal."""
    return "-" if ends is None or ends[0] == ends[1] else " to ".join(map(_format_score, ends))


def _format_score(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"  # shares, errors; perplexities


def _build_calibration(calibration: Mapping[str, Any], unit: str, head: str = "") -> list[Block]:
    bins = [calibration_bin for calibration_bin in calibration["bins"] if calibration_bin["rows"]]
    rows = np.array([calibration_bin["rows"] for calibration_bin in bins])
    if not rows.sum():
        return []
    confidence, accuracy = (
        np.array([calibration_bin[name] for calibration_bin in bins]) for name in ("confidence", "accuracy")
    )
    mean_confidence, mean_accuracy = (
        float(np.average(confidence, weights=rows)),
        float(np.average(accuracy, weights=rows)),
    )
    description = (
        "well calibrated"
        if abs(mean_confidence - mean_accuracy) < 0.02
        else "overconfident"
        if mean_confidence > mean_accuracy
        else "underconfident"
    )
    note = (
        "On the dashed line confidence and accuracy are equal; below it the model is overconfident. Dots are bins of "
        f"{unit}; their area is the number of entries. Expected calibration error (mean distance from the line): "
        f"{calibration['ece']:.3f}."
    )
    title = (
        f"{head}The model is {description}: confidence {100 * mean_confidence:.0f} %, accuracy "
        f"{100 * mean_accuracy:.0f} %"
    )
    return [Figure(title, charts.draw_reliability(confidence, accuracy, rows.tolist()), note)]


def _build_class_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    return outputs.build_confusion_blocks(tables)


def _build_label_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    chances = sorted(label_scores["threshold"] for label_scores in tables["per_class"])
    note = f"Thresholds of the labels: {chances[0]:.2f} to {chances[-1]:.2f}." if chances else ""
    return [outputs.build_worst_table(tables), *([Note(note)] if note else [])]


def _build_head_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for name, tables_of_head in tables["heads"].items():
        blocks += _build_calibration(tables_of_head["calibration"], "answers", f"{name}: ")
        blocks += outputs.build_confusion_blocks(tables_of_head, f"{name}: ")
    return blocks


def _build_nothing(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    return []


_BUILDERS: Mapping[str, Callable[[RunData, Mapping[str, Any]], list[Block]]] = {
    "classes": _build_class_blocks,
    "labels": _build_label_blocks,
    "heads": _build_head_blocks,
    "number": outputs.build_number_blocks,
    "tags": outputs.build_entity_blocks,
    "spans": outputs.build_question_blocks,
    "summary": outputs.build_summary_blocks,
    "tokens": outputs.build_loss_blocks,
}
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


def build_slices_section(run: RunData) -> Section | None:
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


def worse_slices(run: RunData) -> list[ScoreSlice]:
    """List the slices that are significantly worse than all rows, the worst first."""
    if run.scores is None or not run.scores["rows"]:
        return []
    slices = drop_empty_slices(run, list_slices(run.scores))
    verdicts = judge_slices(slices, measure_headline(run.scores))
    return [score_slice for score_slice, verdict in zip(slices, verdicts, strict=True) if verdict == "worse"]


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
