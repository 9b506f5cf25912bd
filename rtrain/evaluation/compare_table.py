"""The comparison as text: the verdict, then scores, slices and settings. The page has the rest."""

from collections.abc import Iterator, Sequence

from rtrain.evaluation import compare_summary
from rtrain.evaluation.compare import RunComparison
from rtrain.evaluation.differences import AnswerComparison, CandidateResult
from rtrain.evaluation.pairing import SPLIT_NAMES
from rtrain.evaluation.settings_diff import SettingDifference
from rtrain.metrics import per_class
from rtrain.report.drawing.svg import escape_controls, truncate

MAX_SETTINGS = 30
MAX_CELL_WIDTH = 40


def format_comparison(comparison: RunComparison) -> str:
    lines = [comparison.verdict, ""]
    lines += [
        f"{candidate.letter}  {candidate.folder if not candidate.is_run_artifact else candidate.run}"
        for candidate in comparison.candidates
    ]
    if comparison.answer_comparison is not None:
        lines += ["", *_format_rows(comparison.answer_comparison)]
        for candidate_result in comparison.answer_comparison.results:
            lines += ["", *_format_result(comparison, candidate_result)]
    lines += ["", *_format_settings(comparison)]
    return "\n".join(escape_controls(line) for line in lines)


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _format_rows(answer_comparison: AnswerComparison) -> Iterator[str]:
    yield (
        f"{answer_comparison.rows:,} common {SPLIT_NAMES[answer_comparison.split]} rows of "
        f"{format_common_rows(answer_comparison)}"
    )
    if answer_comparison.excluded_rows:
        yield f"{answer_comparison.excluded_rows:,} more are excluded: their texts were truncated to different lengths"


def format_common_rows(answer_comparison: AnswerComparison) -> str:
    return (
        f"{answer_comparison.split_rows[0]:,} in each"
        if len(set(answer_comparison.split_rows)) == 1
        else " and ".join(f"{count:,}" for count in answer_comparison.split_rows)
    )


def _format_result(comparison: RunComparison, candidate_result: CandidateResult) -> Iterator[str]:
    a, b = comparison.candidates[0].letter, candidate_result.candidate.letter
    head = ("score", a, b, f"{b} - {a} (95 % interval)", "p")
    yield from format_table(
        [head]
        + [
            (
                compare_summary.format_score_name(score),
                compare_summary.format_score(score, score.first),
                compare_summary.format_score(score, score.other),
                compare_summary.format_change(score),
                compare_summary.format_p_value(score.p),
            )
            for score in candidate_result.scores
        ]
    )
    if candidate_result.mcnemar is not None:
        yield format_mcnemar(candidate_result, a, b)
    if candidate_result.classes:
        yield ""
        yield from per_class.format_pairs(candidate_result.classes, (a, b))
        yield ""
    significant_slices = [slice_ for slice_ in candidate_result.slices if slice_.verdict]
    for slice_ in significant_slices:
        direction = "better" if slice_.verdict > 0 else "worse"
        figures = compare_summary.format_difference(slice_.difference)
        slice_text = f"{slice_.column} is {truncate(slice_.value, MAX_CELL_WIDTH)}"
        yield f"{b} is {direction} where {slice_text}: {figures} ({slice_.difference.rows:,} rows)"
    if candidate_result.slices and not significant_slices:
        yield f"none of {len(candidate_result.slices)} slices differs significantly between {a} and {b}"
    yield from (
        f"{kind.name}: {kind.rows:,} row{'' if kind.rows == 1 else 's'}" for kind in candidate_result.change_groups
    )


def format_mcnemar(candidate_result: CandidateResult, a: str, b: str) -> str:
    assert candidate_result.mcnemar is not None
    lost, won = candidate_result.mcnemar.lost, candidate_result.mcnemar.won
    p = compare_summary.format_p_value(candidate_result.mcnemar.p)
    return f"McNemar, exact: {lost:,} rows right in {a} alone, {won:,} in {b} alone, p {p}"


def _format_settings(comparison: RunComparison) -> Iterator[str]:
    differences = comparison.settings
    letters = [candidate.letter for candidate in comparison.candidates]
    groups = (
        ("settings that change the weights", differences.weight_settings),
        ("settings that change no weight", differences.other_settings),
        ("versions", differences.versions),
        ("digests", differences.digests),
    )
    unchanged = [name for name, settings in groups if not settings]
    for name, settings in groups:
        if settings:
            yield from format_table([(name, *letters), *_format_cells(settings[:MAX_SETTINGS])])
            if len(settings) > MAX_SETTINGS:
                yield f"and {len(settings) - MAX_SETTINGS} more"
    if unchanged:
        yield f"the same: {', '.join(unchanged)}"


def _format_cells(settings: Sequence[SettingDifference]) -> list[tuple[str, ...]]:
    return [
        (f"  {truncate(setting.name, MAX_CELL_WIDTH)}", *(truncate(value, MAX_CELL_WIDTH) for value in setting.values))
        for setting in settings
    ]
