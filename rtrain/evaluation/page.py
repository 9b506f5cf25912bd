"""The comparison as text for the terminal, and as one self-contained HTML page in the style of the report."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rtrain.core.run_folder import Run
from rtrain.evaluation import compare, significance
from rtrain.evaluation.candidates import CurvePoint, Curves, SettingDifference, SettingDifferences
from rtrain.evaluation.compare import AnswerComparison, CandidateResult, ChangedPrediction, ChangeGroup, RunComparison
from rtrain.evaluation.pairing import SPLIT_NAMES
from rtrain.metrics import per_class
from rtrain.metrics.registry import get_metric
from rtrain.report import charts, stats
from rtrain.report.charts import Bar, LineSeries
from rtrain.report.page import (
    Block,
    Card,
    Cards,
    Cell,
    Figure,
    Note,
    Section,
    Table,
    Tile,
    render_html,
    write_page,
)
from rtrain.report.svg import escape_controls, format_duration, format_rate, humanize_score_name, truncate

MAX_TEXT_SETTINGS, MAX_CELL_WIDTH = 30, 40
"""Settings, and characters of a cell, in the text."""
MAX_SHOWN_ROWS = 10
"""Rows shown per group."""
MAX_SLICES = 20
MAX_CLASSES = 20
"""Shown classes: of those with too few rows, and of the others."""
MAX_TEXT_CHARS = 500
"""Characters of a shown text."""
MAX_VALUE_CHARS = 120


# ---------------------------------------------------------------------------------------------------------------- text


def format_comparison(comparison: RunComparison) -> str:
    """Format the verdict, scores, slices and settings; the page has the rest."""
    lines = [comparison.verdict, ""]
    lines += [
        f"{candidate.letter}  {candidate.run if candidate.is_run_artifact else candidate.folder}"
        for candidate in comparison.candidates
    ]
    if (answers := comparison.answer_comparison) is not None:
        lines += ["", f"{answers.rows:,} common {SPLIT_NAMES[answers.split]} rows of {_format_common_rows(answers)}"]
        if answers.excluded_rows:
            lines.append(
                f"{answers.excluded_rows:,} more are excluded: their texts were truncated to different lengths"
            )
        for result in answers.results:
            lines += ["", *_format_result(comparison.candidates[0].letter, result)]
    letters = [candidate.letter for candidate in comparison.candidates]
    lines += ["", *_format_settings(letters, comparison.settings)]
    return "\n".join(escape_controls(line) for line in lines)


def _format_result(a: str, result: CandidateResult) -> Iterator[str]:
    b = result.candidate.letter
    header = ("score", a, b, f"{b} - {a} (95 % interval)", "p")
    yield from _format_table([header, *map(significance.format_cells, result.scores)])
    if result.mcnemar is not None:
        yield _format_mcnemar(a, result)
    if result.classes:
        yield from ("", *per_class.format_pairs(result.classes, (a, b)), "")
    for slice_ in result.slices:
        if slice_.verdict:
            direction = "better" if slice_.verdict > 0 else "worse"
            figures = significance.format_difference(slice_.difference)
            slice_text = f"{slice_.column} is {truncate(slice_.value, MAX_CELL_WIDTH)}"
            yield f"{b} is {direction} where {slice_text}: {figures} ({slice_.difference.rows:,} rows)"
    if result.slices and not any(slice_.verdict for slice_ in result.slices):
        yield f"none of {len(result.slices)} slices differs significantly between {a} and {b}"
    yield from map(_format_group_size, result.change_groups)


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _format_common_rows(answers: AnswerComparison) -> str:
    if len(set(answers.split_rows)) == 1:
        return f"{answers.split_rows[0]:,} in each"
    return " and ".join(f"{count:,}" for count in answers.split_rows)


def _format_mcnemar(a: str, result: CandidateResult) -> str:
    assert result.mcnemar is not None
    lost, won, p = result.mcnemar.lost, result.mcnemar.won, significance.format_p_value(result.mcnemar.p)
    return f"McNemar, exact: {lost:,} rows right in {a} alone, {won:,} in {result.candidate.letter} alone, p {p}"


def _format_group_size(group: ChangeGroup) -> str:
    return f"{group.name}: {group.rows:,} row{'' if group.rows == 1 else 's'}"


def _format_settings(letters: Sequence[str], differences: SettingDifferences) -> Iterator[str]:
    groups = _setting_groups(differences)
    for name, settings in groups:
        if settings:
            yield from _format_table(
                [(name, *letters), *_setting_cells(settings[:MAX_TEXT_SETTINGS], MAX_CELL_WIDTH, "  ")]
            )
            if len(settings) > MAX_TEXT_SETTINGS:
                yield f"and {len(settings) - MAX_TEXT_SETTINGS} more"
    if unchanged := [name for name, settings in groups if not settings]:
        yield f"the same: {', '.join(unchanged)}"


def _setting_groups(differences: SettingDifferences) -> list[tuple[str, Sequence[SettingDifference]]]:
    return [
        ("settings that change the weights", differences.weight_settings),
        ("settings that change no weight", differences.other_settings),
        ("versions", differences.versions),
        ("digests", differences.digests),
    ]


def _setting_cells(settings: Sequence[SettingDifference], max_width: int, indent: str = "") -> list[tuple[str, ...]]:
    return [
        (indent + truncate(setting.name, max_width), *(truncate(value, max_width) for value in setting.values))
        for setting in settings
    ]


# ---------------------------------------------------------------------------------------------------------------- page


def default_path(comparison: RunComparison) -> Path:
    """`compare-A-B.html` with the candidates' names, beside the first run."""
    names = "-".join(candidate.name.replace("/", "-") for candidate in comparison.candidates)
    root = comparison.candidates[0].run.folder.parent
    return (root.parent if Run(root).is_search else root) / f"compare-{names[:150]}.html"


def write_comparison(comparison: RunComparison, path: Path) -> Path:
    """Write the page atomically. Raises `UserError` if it cannot be written."""
    return write_page(path, render_comparison(comparison), "name another file with --out")


def render_comparison(comparison: RunComparison) -> str:
    first, answers = comparison.candidates[0], comparison.answer_comparison
    settings = _build_settings(comparison)
    if answers is None:
        reason = (
            f"Answers cannot be compared row by row: {comparison.missing_reason}. Settings and training are compared "
            "below."
        )
        tiles, sections = [], [Section("outcome", "Outcome", "", [Note(reason)]), settings]
    else:
        tiles = _build_tiles(comparison, answers)
        sections = [
            _build_outcome(first.letter, answers),
            settings,
            *_build_classes(first.letter, answers),
            *_build_slices(first.letter, answers),
            _build_changed_rows(first.letter, answers),
        ]
    title = ", ".join(f"{candidate.letter}: {candidate.name}" for candidate in comparison.candidates)
    description = f"Comparison of rtrain models for the task {first.config.recipe.task}"
    sections.append(_build_training(comparison))
    return render_html(title, description, tiles, sections, lead=f"{comparison.verdict}.")


def _build_tiles(comparison: RunComparison, answers: AnswerComparison) -> list[Tile]:
    first, headline = comparison.candidates[0], answers.results[0].headline
    score_name = significance.format_score_name(headline)
    return [
        Tile(
            f"{score_name} of {first.letter}",
            significance.format_score(headline, headline.first),
            truncate(first.name, 40),
        ),
        *(
            Tile(
                f"{score_name} of {result.candidate.letter}",
                significance.format_score(result.headline, result.headline.other),
                f"{truncate(result.candidate.name, 40)}, {significance.format_change(result.headline)}",
            )
            for result in answers.results
        ),
        Tile(
            "common rows",
            f"{answers.rows:,}",
            f"of the {SPLIT_NAMES[answers.split]} split: {_format_common_rows(answers)}",
        ),
    ]


# ------------------------------------------------------------------------------------------------------------- answers


def _build_outcome(a: str, answers: AnswerComparison) -> Section:
    intro = (
        f"All scores are on the same {answers.rows:,} {SPLIT_NAMES[answers.split]} rows. Rows are the same if their "
        "texts and label are equal, whatever their file."
    )
    if answers.excluded_rows:
        intro += f" {answers.excluded_rows:,} more were truncated to different lengths and are excluded."
    return Section("outcome", "Outcome", intro, [_build_score_table(a, answers, result) for result in answers.results])


def _build_score_table(a: str, answers: AnswerComparison, result: CandidateResult) -> Block:
    b = result.candidate.letter
    note = (
        "Paired bootstrap: both models are scored on the same resampled rows. p is the probability of a difference of "
        "this sign if neither were better."
    )
    if result.mcnemar is not None:
        note += f" {_format_mcnemar(a, result)}: the verdict takes the larger p."
    if len(answers.results) > 1:
        note += " The verdict's p are corrected for the number of comparisons, by Holm's method."
    rows = [significance.format_cells(score) for score in result.scores]
    return Table(_capitalize(compare.format_verdict(result)), ("score", a, b, f"{b} - {a}", "p"), rows, note, wide=True)


def _capitalize(words: str) -> str:
    return words[:1].upper() + words[1:]


def _build_changed_rows(a: str, answers: AnswerComparison) -> Section:
    blocks, empty_groups = list[Block](), list[str]()
    for result in answers.results:
        for group in result.change_groups:
            title = _capitalize(_format_group_size(group))
            if group.shown:
                cards = [_build_card(change, a, result.candidate.letter) for change in group.shown[:MAX_SHOWN_ROWS]]
                blocks.append(Cards(title, cards, _format_order_note(group)))
            else:
                empty_groups.append(title)
    if empty_groups:
        blocks.append(Note(f"{'. '.join(empty_groups)}."))
    return Section("rows", "Changed predictions", "Rows with different predictions, grouped by change.", blocks)


def _format_order_note(group: ChangeGroup) -> str:
    if group.rows <= MAX_SHOWN_ROWS:
        return f"{_capitalize(group.sort_order)}."
    more_text = f"{MAX_SHOWN_ROWS} of them; rtrain compare --json has {len(group.shown):,}"
    return f"{_capitalize(group.sort_order)}, {more_text}."


def _build_card(change: ChangedPrediction, a: str, b: str) -> Card:
    facts = [("true", truncate(change.target, MAX_VALUE_CHARS))] if change.target else []
    for letter, answer, score in ((a, change.first, change.first_score), (b, change.other, change.other_score)):
        facts.append((letter, truncate(answer, MAX_VALUE_CHARS) + ("" if score is None else f" ({score:.2f})")))
    text = change.text if len(change.text) <= MAX_TEXT_CHARS else f"{change.text[:MAX_TEXT_CHARS]} …"
    return Card(text, facts, change.location)


def _build_classes(a: str, answers: AnswerComparison) -> Iterator[Section]:
    blocks: list[Block] = []
    for result in answers.results:
        letters = (a, result.candidate.letter)
        rows: list[Sequence[Cell]] = [
            (
                *(truncate(str(entry["class"]), 40), entry["support"]),
                *(f"{entry[model][score]:.3f}" for score in per_class.SCORES for model in ("first", "other")),
                per_class.TOO_FEW_ROWS if entry["support"] < per_class.MIN_SUPPORT else "",
            )
            for part in per_class.split_by_support(result.classes)
            for entry in part[:MAX_CLASSES]
        ]
        if rows:
            names = [f"{score} {letter}" for score in ("precision", "recall", "F1") for letter in letters]
            title = f"{letters[1]} against {a} by class"
            blocks.append(Table(title, ("class", "rows", *names, ""), rows, wide=True))
    if blocks:
        yield Section("classes", "Classes", "Scores of each class on the common rows.", blocks)


def _build_slices(a: str, answers: AnswerComparison) -> Iterator[Section]:
    intro = (
        "The difference on parts of the rows: quarters by length in tokens, and the values of the columns that the "
        "recipe names (data.slices). Differences that stay significant after Holm's correction over all slices "
        "are marked."
    )
    if blocks := [_build_slice_chart(a, result) for result in answers.results if result.slices]:
        yield Section("slices", "Slices", intro, blocks)


def _build_slice_chart(a: str, result: CandidateResult) -> Block:
    b, slices = result.candidate.letter, result.slices
    num_significant = sum(bool(slice_.verdict) for slice_ in slices)
    title = (
        f"{num_significant} of {len(slices)} slices differ significantly between {a} and {b}"
        if num_significant
        else f"None of {len(slices)} slices differs significantly between {a} and {b}"
    )
    if len(slices) > MAX_SLICES:  # the middle is the least informative
        slices = (*slices[: MAX_SLICES // 2], *slices[-MAX_SLICES // 2 :])
    unit = 100 if significance.is_share(result.headline) else 1
    bars = [
        Bar(
            f"{slice_.column}: {slice_.value}" + (" (significant)" if slice_.verdict else ""),
            unit * slice_.difference.difference,
            f"{significance.format_difference(slice_.difference)}, {slice_.difference.rows:,} rows",
            (unit * slice_.difference.low, unit * slice_.difference.high),
        )
        for slice_ in slices
    ]
    name = significance.format_score_name(result.headline)
    gain = f"{name} of {b} minus {a}, in points" if unit == 100 else f"{name} of {a} minus {b}"
    return Figure(title, charts.draw_bars(bars, gain), "Right of 0 is better; whiskers: 95 % intervals.")


# ------------------------------------------------------------------------------------------------------ training, cost


def _build_training(comparison: RunComparison) -> Section:
    headline = get_metric(comparison.candidates[0].output).headline
    score, sign = humanize_score_name(headline.removeprefix("neg_")), -1 if headline.startswith("neg_") else 1
    blocks = [
        *_build_curves(comparison, "training loss", lambda curves: curves.loss, 1),
        *_build_curves(comparison, f"validation {score}", lambda curves: curves.score, sign),
    ]
    note = (
        "The time from creation to end includes pauses. Seconds of training are the time of computing gradients; times "
        "workers, they measure the use of the machines."
    )
    costs = comparison.costs
    rows = [
        ("status", *(cost.status for cost in costs)),
        ("steps", *(f"{cost.steps:,}" for cost in costs)),
        ("rows trained on", *(f"{cost.rows_seen:,}" for cost in costs)),
        ("time from creation to end", *(format_duration(cost.seconds) for cost in costs)),
        ("seconds of training", *(f"{cost.train_seconds:,.1f}" for cost in costs)),
        ("times workers", *(f"{cost.worker_seconds:,.1f}" for cost in costs)),
        ("rows/s", *(format_rate(cost.rows_per_second) for cost in costs)),
        ("MB of weights", *("-" if cost.megabytes is None else f"{cost.megabytes:,.1f}" for cost in costs)),
    ]
    header = ("", *(candidate.letter for candidate in comparison.candidates))
    intro = "Over rows trained on, and over the seconds of all attempts without the time between them."
    return Section("training", "Training", intro, [*blocks, Table("Cost", header, rows, note, wide=True)])


def _build_curves(
    comparison: RunComparison, label: str, select_points: Callable[[Curves], Sequence[CurvePoint]], sign: int
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
            yield Figure(f"{_capitalize(label)} over {axis}", charts.draw_lines(lines, x, label), "")


# ------------------------------------------------------------------------------------------------------------ settings


def _build_settings(comparison: RunComparison) -> Section:
    header = ("name", *(candidate.letter for candidate in comparison.candidates))
    blocks: list[Block] = [
        Table(_capitalize(title), header, _setting_cells(settings, MAX_VALUE_CHARS), wide=True)
        if settings
        else Note(f"{_capitalize(title)}: all the same.")
        for title, settings in _setting_groups(comparison.settings)
    ]
    return Section("settings", "Differences in settings", "", blocks)
