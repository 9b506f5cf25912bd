"""The comparison as one self-contained HTML page in the style of the report."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rtrain.core.run_folder import Run
from rtrain.evaluation import compare_summary, compare_table
from rtrain.evaluation.changed_predictions import ChangedPrediction, ChangeGroup
from rtrain.evaluation.compare import RunComparison
from rtrain.evaluation.differences import CandidateResult
from rtrain.evaluation.pairing import SPLIT_NAMES
from rtrain.evaluation.settings_diff import SettingDifference
from rtrain.evaluation.training_curves import CurvePoint, Curves
from rtrain.metrics import per_class
from rtrain.metrics.registry import get_metric
from rtrain.report import stats
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Card, Cards, Cell, Figure, Note, Section, Table, Tile
from rtrain.report.drawing.charts import Bar, LineSeries
from rtrain.report.drawing.page import render_html, write_page as write_page
from rtrain.report.drawing.svg import format_duration, format_rate, humanize_score_name, truncate

MAX_SHOWN_ROWS = 10
"""Rows shown per group."""
MAX_SLICES = 20
MAX_CLASSES = 20
"""Shown classes: of those with too few rows, and of the others."""
MAX_TEXT_CHARS = 500
"""Characters of a shown text."""
MAX_VALUE_CHARS = 120


def default_path(comparison: RunComparison) -> Path:
    """`compare-A-B.html` with the candidates' names, beside the first run."""
    names = "-".join(candidate.name.replace("/", "-") for candidate in comparison.candidates)
    root = comparison.candidates[0].run.folder.parent
    return (root.parent if Run(root).is_search else root) / f"compare-{names[:150]}.html"


def write_comparison(comparison: RunComparison, path: Path) -> Path:
    """Write the page atomically. Raises `UserError` if it cannot be written."""
    return write_page(path, render_comparison(comparison), "name another file with --out")


def render_comparison(comparison: RunComparison) -> str:
    sections = [
        _build_outcome(comparison),
        _build_settings(comparison),
        *_build_classes(comparison),
        *_build_slices(comparison),
        *_build_changed_rows(comparison),
        _build_training(comparison),
    ]
    title = ", ".join(f"{candidate.letter}: {candidate.name}" for candidate in comparison.candidates)
    description = f"Comparison of rtrain models for the task {comparison.candidates[0].config.recipe.task}"
    return render_html(title, description, _build_tiles(comparison), sections, lead=f"{comparison.verdict}.")


def _build_tiles(comparison: RunComparison) -> list[Tile]:
    if comparison.answer_comparison is None:
        return []
    first = comparison.answer_comparison.results[0].headline
    a = comparison.candidates[0]
    tiles = [
        Tile(
            f"{compare_summary.format_score_name(first)} of {a.letter}",
            compare_summary.format_score(first, first.first),
            truncate(a.name, 40),
        )
    ]
    for candidate_result in comparison.answer_comparison.results:
        change = compare_summary.format_change(candidate_result.headline)
        value = compare_summary.format_score(candidate_result.headline, candidate_result.headline.other)
        tiles.append(
            Tile(
                f"{compare_summary.format_score_name(first)} of {candidate_result.candidate.letter}",
                value,
                f"{truncate(candidate_result.candidate.name, 40)}, {change}",
            )
        )
    split = SPLIT_NAMES[comparison.answer_comparison.split]
    tiles.append(
        Tile(
            "common rows",
            f"{comparison.answer_comparison.rows:,}",
            f"of the {split} split: {compare_table.format_common_rows(comparison.answer_comparison)}",
        )
    )
    return tiles


# ------------------------------------------------------------------------------------------------------------- answers


def _build_outcome(comparison: RunComparison) -> Section:
    if comparison.answer_comparison is None:
        reason = (
            f"Answers cannot be compared row by row: {comparison.missing_reason}. Settings and training are "
            "compared below."
        )
        return Section("outcome", "Outcome", "", [Note(reason)])
    intro = (
        f"All scores are on the same {comparison.answer_comparison.rows:,} "
        f"{SPLIT_NAMES[comparison.answer_comparison.split]} "
        "rows. Rows are the same if their texts and "
        "label are equal, whatever their file."
    )
    if comparison.answer_comparison.excluded_rows:
        intro += (
            f" {comparison.answer_comparison.excluded_rows:,} more were truncated to different lengths and are "
            "excluded."
        )
    return Section(
        "outcome",
        "Outcome",
        intro,
        [block for result in comparison.answer_comparison.results for block in _build_score_table(comparison, result)],
    )


def _build_score_table(comparison: RunComparison, candidate_result: CandidateResult) -> Iterator[Block]:
    a, b = comparison.candidates[0].letter, candidate_result.candidate.letter
    rows = [
        (
            compare_summary.format_score_name(score),
            compare_summary.format_score(score, score.first),
            compare_summary.format_score(score, score.other),
            compare_summary.format_change(score),
            compare_summary.format_p_value(score.p),
        )
        for score in candidate_result.scores
    ]
    note = (
        "Paired bootstrap: both models are scored on the same resampled rows. p is the probability of a difference of "
        "this sign if neither were better."
    )
    if candidate_result.mcnemar is not None:
        note += f" {compare_table.format_mcnemar(candidate_result, a, b)}: the verdict takes the larger p."
    if len(comparison.candidates) > 2:
        note += " The verdict's p are corrected for the number of comparisons, by Holm's method."
    head = ("score", a, b, f"{b} - {a}", "p")
    yield Table(_capitalize(compare_summary.format_verdict(candidate_result)), head, rows, note, wide=True)


def _capitalize(words: str) -> str:
    return words[:1].upper() + words[1:]


def _build_changed_rows(comparison: RunComparison) -> Iterator[Section]:
    if comparison.answer_comparison is None:
        return
    a = comparison.candidates[0].letter
    blocks, empty_groups = list[Block](), list[str]()
    for candidate_result in comparison.answer_comparison.results:
        b = candidate_result.candidate.letter
        for kind in candidate_result.change_groups:
            title = f"{_capitalize(kind.name)}: {kind.rows:,} row{'' if kind.rows == 1 else 's'}"
            if kind.shown:
                cards = [_build_card(flip, a, b) for flip in kind.shown[:MAX_SHOWN_ROWS]]
                blocks.append(Cards(title, cards, _format_order_note(kind)))
            else:
                empty_groups.append(title)
    if empty_groups:
        blocks.append(Note(f"{'. '.join(empty_groups)}."))
    intro = "Rows with different predictions, grouped by change."
    yield Section("rows", "Changed predictions", intro, blocks)


def _format_order_note(group: ChangeGroup) -> str:
    more_text = (
        f", {MAX_SHOWN_ROWS} of them; rtrain compare --json has {len(group.shown):,}"
        if group.rows > MAX_SHOWN_ROWS
        else ""
    )
    return f"{_capitalize(group.sort_order)}{more_text}."


def _build_card(change: ChangedPrediction, a: str, b: str) -> Card:
    facts = [("true", truncate(change.target, MAX_VALUE_CHARS))] if change.target else []
    for letter, answer, score in ((a, change.first, change.first_score), (b, change.other, change.other_score)):
        facts.append((letter, truncate(answer, MAX_VALUE_CHARS) + ("" if score is None else f" ({score:.2f})")))
    return Card(
        change.text if len(change.text) <= MAX_TEXT_CHARS else f"{change.text[:MAX_TEXT_CHARS]} …",
        facts,
        change.location,
    )


def _build_classes(comparison: RunComparison) -> Iterator[Section]:
    against = () if comparison.answer_comparison is None else comparison.answer_comparison.results
    blocks: list[Block] = []
    for candidate_result in against:
        letters = (comparison.candidates[0].letter, candidate_result.candidate.letter)
        rows: list[Sequence[Cell]] = [
            (
                *(truncate(str(entry["class"]), 40), entry["support"]),
                *(f"{entry[candidate][score]:.3f}" for score in per_class.SCORES for candidate in ("first", "other")),
                per_class.TOO_FEW_ROWS if entry["support"] < per_class.MIN_SUPPORT else "",
            )
            for part in per_class.split_by_support(candidate_result.classes)
            for entry in part[:MAX_CLASSES]
        ]
        if rows:
            names = [f"{score} {letter}" for score in ("precision", "recall", "F1") for letter in letters]
            title = f"{letters[1]} against {letters[0]} by class"
            blocks.append(Table(title, ("class", "rows", *names, ""), rows, wide=True))
    if blocks:
        yield Section("classes", "Classes", "Scores of each class on the common rows.", blocks)


def _build_slices(comparison: RunComparison) -> Iterator[Section]:
    if comparison.answer_comparison is None:
        return
    blocks: list[Block] = []
    for candidate_result in comparison.answer_comparison.results:
        blocks += _build_slice_chart(comparison.candidates[0].letter, candidate_result)
    if blocks:
        intro = (
            "The difference on parts of the rows: quarters by length in tokens, and the values of the columns that the "
            "recipe names (data.slices). Differences that stay significant after Holm's correction over all slices "
            "are marked."
        )
        yield Section("slices", "Slices", intro, blocks)


def _build_slice_chart(a: str, candidate_result: CandidateResult) -> Iterator[Block]:
    if not candidate_result.slices:
        return
    b, significant_slices = (
        candidate_result.candidate.letter,
        sum(bool(slice_.verdict) for slice_ in candidate_result.slices),
    )
    title = (
        f"{significant_slices} of {len(candidate_result.slices)} slices differ significantly between {a} and {b}"
        if significant_slices
        else f"None of {len(candidate_result.slices)} slices differs significantly between {a} and {b}"
    )
    shown_slices = candidate_result.slices
    if len(shown_slices) > MAX_SLICES:  # the middle is the least informative
        shown_slices = (*shown_slices[: MAX_SLICES // 2], *shown_slices[-MAX_SLICES // 2 :])
    unit = 100 if compare_summary.is_share(candidate_result.headline) else 1
    bars = [
        Bar(
            f"{slice_.column}: {slice_.value}" + (" (significant)" if slice_.verdict else ""),
            unit * slice_.difference.difference,
            f"{compare_summary.format_difference(slice_.difference)}, {slice_.difference.rows:,} rows",
            (unit * slice_.difference.low, unit * slice_.difference.high),
        )
        for slice_ in shown_slices
    ]
    name = compare_summary.format_score_name(candidate_result.headline)
    gain = f"{name} of {b} minus {a}, in points" if unit == 100 else f"{name} of {a} minus {b}"
    yield Figure(title, charts.draw_bars(bars, gain), "Right of 0 is better; whiskers: 95 % intervals.")


# ------------------------------------------------------------------------------------------------------ training, cost


def _build_training(comparison: RunComparison) -> Section:
    score = humanize_score_name(get_metric(comparison.candidates[0].output).headline.removeprefix("neg_"))
    sign = -1 if get_metric(comparison.candidates[0].output).headline.startswith("neg_") else 1
    blocks = [
        *_build_curves(comparison, "Training loss", "training loss", lambda curves: curves.loss, 1),
        *_build_curves(comparison, f"Validation {score}", f"validation {score}", lambda curves: curves.score, sign),
    ]
    head = ("", *(candidate.letter for candidate in comparison.candidates))
    note = (
        "The time from creation to end includes pauses. Seconds of training are the time of computing gradients; times "
        "workers, they measure the use of the machines."
    )
    cost = Table("Cost", head, _cost_rows(comparison), note, wide=True)
    intro = "Over rows trained on, and over the seconds of all attempts without the time between them."
    return Section("training", "Training", intro, [*blocks, cost])


def _cost_rows(comparison: RunComparison) -> list[tuple[str, ...]]:
    """Cost of each candidate, one line per measure."""
    costs = comparison.costs
    return [
        ("status", *(cost.status for cost in costs)),
        ("steps", *(f"{cost.steps:,}" for cost in costs)),
        ("rows trained on", *(f"{cost.rows_seen:,}" for cost in costs)),
        ("time from creation to end", *(format_duration(cost.seconds) for cost in costs)),
        ("seconds of training", *(f"{cost.train_seconds:,.1f}" for cost in costs)),
        ("times workers", *(f"{cost.worker_seconds:,.1f}" for cost in costs)),
        ("rows/s", *(format_rate(cost.rows_per_second) for cost in costs)),
        ("MB of weights", *("-" if cost.megabytes is None else f"{cost.megabytes:,.1f}" for cost in costs)),
    ]


def _build_curves(
    comparison: RunComparison,
    title: str,
    label: str,
    select_points: Callable[[Curves], Sequence[CurvePoint]],
    sign: int,
) -> Iterator[Figure]:
    series = [
        (candidate.letter, select_points(curves))
        for candidate, curves in zip(comparison.candidates, comparison.curves, strict=True)
    ]
    for axis, x in (("rows", "rows trained on"), ("seconds", "seconds")):
        # An entry without points keeps the colors of the other candidates.
        lines = [
            LineSeries(
                letter,
                *stats.thin_curve(
                    [float(getattr(point, axis)) for point in points], [sign * point.value for point in points]
                ),
                has_dots=len(points) <= 60 and label.startswith("validation"),
            )
            for letter, points in series
        ]
        if any(line.xs for line in lines):
            yield Figure(f"{title} over {axis}", charts.draw_lines(lines, x, label), "")


# ------------------------------------------------------------------------------------------------------------ settings


def _build_settings(comparison: RunComparison) -> Section:
    differences = comparison.settings
    blocks = [
        _build_setting_table(comparison, "Settings that change the weights", differences.weight_settings),
        _build_setting_table(comparison, "Settings that change no weight", differences.other_settings),
        _build_setting_table(comparison, "Versions", differences.versions),
        _build_setting_table(comparison, "Digests", differences.digests),
    ]
    return Section("settings", "Differences in settings", "", blocks)


def _build_setting_table(comparison: RunComparison, title: str, settings: Sequence[SettingDifference]) -> Block:
    if not settings:
        return Note(f"{title}: all the same.")
    rows = [
        (truncate(setting.name, MAX_VALUE_CHARS), *(truncate(value, MAX_VALUE_CHARS) for value in setting.values))
        for setting in settings
    ]
    return Table(title, ("name", *(candidate.letter for candidate in comparison.candidates)), rows, wide=True)
