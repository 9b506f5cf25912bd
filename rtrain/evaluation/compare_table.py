"""The comparison as a terminal shows it: the outcome first, then scores, slices and settings. The page has the rest."""

from collections.abc import Iterator, Sequence

from rtrain.evaluation import compare_summary
from rtrain.evaluation.compare import Compared
from rtrain.evaluation.differences import Against, Measured
from rtrain.evaluation.pairing import NAMES
from rtrain.evaluation.settings_diff import Setting
from rtrain.metrics import per_class
from rtrain.report.drawing.svg import short, visible

MOST_SETTINGS = 30
WIDEST = 40


def text(found: Compared) -> str:
    lines = [found.verdict, ""]
    lines += [f"{side.letter}  {side.folder if not side.own else side.run}" for side in found.sides]
    if found.measured is not None:
        lines += ["", *_rows(found.measured)]
        for one in found.measured.against:
            lines += ["", *_against(found, one)]
    lines += ["", *_settings(found)]
    return "\n".join(visible(line) for line in lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other, the first one flush left; the others are figures for the most part."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _rows(found: Measured) -> Iterator[str]:
    yield f"{found.rows:,} {NAMES[found.split]} rows that all have answered, of {common_of(found)}"
    if found.left_out:
        yield f"{found.left_out:,} more are left out: their texts were cut at different places"


def common_of(found: Measured) -> str:
    return f"{found.of[0]:,} in each" if len(set(found.of)) == 1 else " and ".join(f"{count:,}" for count in found.of)


def _against(found: Compared, one: Against) -> Iterator[str]:
    a, b = found.sides[0].letter, one.side.letter
    head = ("score", a, b, f"{b} less {a} (95 % interval)", "p")
    yield from table(
        [head]
        + [
            (
                compare_summary.named(score),
                compare_summary.score(score, score.first),
                compare_summary.score(score, score.other),
                compare_summary.change(score),
                compare_summary.probability(score.p),
            )
            for score in one.scores
        ]
    )
    if one.mcnemar is not None:
        yield mcnemar(one, a, b)
    if one.classes:
        yield ""
        yield from per_class.format_pairs(one.classes, (a, b))
        yield ""
    beyond = [slice_ for slice_ in one.slices if slice_.verdict]
    for slice_ in beyond:
        side = "better" if slice_.verdict > 0 else "worse"
        figures = compare_summary.figures(slice_.difference)
        where = f"{slice_.column} is {short(slice_.value, WIDEST)}"
        yield f"{b} is {side} where {where}: {figures} ({slice_.difference.rows:,} rows)"
    if one.slices and not beyond:
        yield f"no slice of {len(one.slices)} tells {b} from {a} beyond chance"
    yield from (f"{kind.name}: {kind.rows:,} row{'' if kind.rows == 1 else 's'}" for kind in one.kinds)


def mcnemar(one: Against, a: str, b: str) -> str:
    assert one.mcnemar is not None
    lost, won = one.mcnemar.lost, one.mcnemar.won
    p = compare_summary.probability(one.mcnemar.p)
    return f"McNemar, exact: {lost:,} rows right in {a} alone, {won:,} in {b} alone, p {p}"


def _settings(found: Compared) -> Iterator[str]:
    known = found.settings
    letters = [side.letter for side in found.sides]
    groups = (
        ("settings that change the weights", known.weights),
        ("settings that change no weight", known.others),
        ("versions", known.versions),
        ("digests", known.digests),
    )
    same = [name for name, settings in groups if not settings]
    for name, settings in groups:
        if settings:
            yield from table([(name, *letters), *_cells(settings[:MOST_SETTINGS])])
            if len(settings) > MOST_SETTINGS:
                yield f"and {len(settings) - MOST_SETTINGS} more"
    if same:
        yield f"the same: {', '.join(same)}"


def _cells(settings: Sequence[Setting]) -> list[tuple[str, ...]]:
    return [(f"  {short(one.name, WIDEST)}", *(short(value, WIDEST) for value in one.values)) for one in settings]
