"""The comparison as one page that needs nothing else, in the look of the report."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rtrain.core.run_folder import Run
from rtrain.evaluation import compare_summary, compare_table
from rtrain.evaluation.changed_predictions import Flip, Kind
from rtrain.evaluation.compare import Compared
from rtrain.evaluation.differences import Against
from rtrain.evaluation.pairing import NAMES
from rtrain.evaluation.settings_diff import Setting
from rtrain.evaluation.training_curves import Curves, Point
from rtrain.metrics import per_class
from rtrain.metrics.registry import metric_for
from rtrain.report import stats
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Card, Cards, Cell, Figure, Note, Section, Table, Tile
from rtrain.report.drawing.charts import Bar, Line
from rtrain.report.drawing.page import render, write as write_page
from rtrain.report.drawing.svg import duration, rate, score_name, short

SHOWN = 10
"""Rows of a kind."""
MOST_SLICES = 20
MOST_CLASSES = 20
"""Classes that are shown of those with too few rows, and of the others."""
LONGEST = 500
"""Characters of a text."""
VALUE = 120


def default(found: Compared) -> Path:
    """`compare-A-B.html` with the sides' names, beside the first run."""
    names = "-".join(side.name.replace("/", "-") for side in found.sides)
    root = found.sides[0].run.folder.parent
    return (root.parent if Run(root).is_search else root) / f"compare-{names[:150]}.html"


def write(found: Compared, path: Path) -> Path:
    """Write the page, whole or not at all. Raises `UserError` where it cannot be written."""
    return write_page(path, page(found), "name another file with --out")


def page(found: Compared) -> str:
    sections = [_outcome(found), _settings(found), *_classes(found), *_slices(found), *_rows(found), _training(found)]
    title = ", ".join(f"{side.letter}: {side.name}" for side in found.sides)
    about = f"Models by rtrain beside each other, by the task {found.sides[0].config.recipe.task}"
    return render(title, about, _tiles(found), sections, lead=f"{found.verdict}.")


def _tiles(found: Compared) -> list[Tile]:
    if found.measured is None:
        return []
    first = found.measured.against[0].headline
    a = found.sides[0]
    tiles = [
        Tile(
            f"{compare_summary.named(first)} of {a.letter}",
            compare_summary.score(first, first.first),
            short(a.name, 40),
        )
    ]
    for one in found.measured.against:
        change = compare_summary.change(one.headline)
        value = compare_summary.score(one.headline, one.headline.other)
        tiles.append(
            Tile(f"{compare_summary.named(first)} of {one.side.letter}", value, f"{short(one.side.name, 40)}, {change}")
        )
    split = NAMES[found.measured.split]
    tiles.append(
        Tile(
            "common rows",
            f"{found.measured.rows:,}",
            f"of the {split} split: {compare_table.common_of(found.measured)}",
        )
    )
    return tiles


# ------------------------------------------------------------------------------------------------------------- answers


def _outcome(found: Compared) -> Section:
    if found.measured is None:
        reason = f"Answers cannot be compared row by row: {found.lacking}. Below is what can be compared."
        return Section("outcome", "Outcome", "", [Note(reason)])
    intro = (
        f"All on the same {found.measured.rows:,} {NAMES[found.measured.split]} rows: rows with the same texts and "
        "label, whatever file they come from."
    )
    if found.measured.left_out:
        intro += f" {found.measured.left_out:,} more were cut to other lengths, and are left out."
    return Section(
        "outcome", "Outcome", intro, [block for one in found.measured.against for block in _scores(found, one)]
    )


def _scores(found: Compared, one: Against) -> Iterator[Block]:
    a, b = found.sides[0].letter, one.side.letter
    rows = [
        (
            compare_summary.named(score),
            compare_summary.score(score, score.first),
            compare_summary.score(score, score.other),
            compare_summary.change(score),
            compare_summary.probability(score.p),
        )
        for score in one.scores
    ]
    note = (
        "Paired bootstrap: rows are drawn again and again, the same ones for both. p says how probable a difference of "
        "this sign would be if neither were better."
    )
    if one.mcnemar is not None:
        note += f" {compare_table.mcnemar(one, a, b)}: the verdict takes the larger p."
    if len(found.sides) > 2:
        note += " The verdict's p are corrected for the number of comparisons, by Holm's method."
    head = ("score", a, b, f"{b} less {a}", "p")
    yield Table(_sentence(compare_summary.of_one(one)), head, rows, note, wide=True)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _rows(found: Compared) -> Iterator[Section]:
    if found.measured is None:
        return
    a = found.sides[0].letter
    blocks, without = list[Block](), list[str]()
    for one in found.measured.against:
        b = one.side.letter
        for kind in one.kinds:
            title = f"{_sentence(kind.name)}: {kind.rows:,} row{'' if kind.rows == 1 else 's'}"
            if kind.shown:
                cards = [_card(flip, a, b) for flip in kind.shown[:SHOWN]]
                blocks.append(Cards(title, cards, _said_of(kind)))
            else:
                without.append(title)
    if without:
        blocks.append(Note(f"{'. '.join(without)}."))
    intro = "Rows that are answered otherwise. A few of one kind say more than a score."
    yield Section("rows", "Answered otherwise", intro, blocks)


def _said_of(kind: Kind) -> str:
    more = f", {SHOWN} of them; rtrain compare --json has {len(kind.shown):,}" if kind.rows > SHOWN else ""
    return f"{_sentence(kind.order)}{more}."


def _card(flip: Flip, a: str, b: str) -> Card:
    facts = [("true", short(flip.target, VALUE))] if flip.target else []
    for letter, answer, score in ((a, flip.first, flip.first_score), (b, flip.other, flip.other_score)):
        facts.append((letter, short(answer, VALUE) + ("" if score is None else f" ({score:.2f})")))
    return Card(flip.text if len(flip.text) <= LONGEST else f"{flip.text[:LONGEST]} …", facts, flip.where)


def _classes(found: Compared) -> Iterator[Section]:
    against = () if found.measured is None else found.measured.against
    blocks: list[Block] = []
    for one in against:
        letters = (found.sides[0].letter, one.side.letter)
        rows: list[Sequence[Cell]] = [
            (
                *(short(str(each["class"]), 40), each["support"]),
                *(f"{each[side][score]:.3f}" for score in per_class.SCORES for side in ("first", "other")),
                per_class.TOO_FEW if each["support"] < per_class.LEAST_SUPPORT else "",
            )
            for part in per_class.split_by_support(one.classes)
            for each in part[:MOST_CLASSES]
        ]
        if rows:
            names = [f"{score} {letter}" for score in ("precision", "recall", "F1") for letter in letters]
            title = f"{letters[1]} beside {letters[0]} by class"
            blocks.append(Table(title, ("class", "rows", *names, ""), rows, wide=True))
    if blocks:
        yield Section("classes", "Classes", "Scores of each class on the common rows.", blocks)


def _slices(found: Compared) -> Iterator[Section]:
    if found.measured is None:
        return
    blocks: list[Block] = []
    for one in found.measured.against:
        blocks += _slices_of(found.sides[0].letter, one)
    if blocks:
        intro = (
            "The difference on parts of the rows: quarters by length in tokens, and the values of the columns that the "
            "recipe names (data.slices). Marked is what stays beyond chance after Holm's correction over all slices."
        )
        yield Section("slices", "Slices", intro, blocks)


def _slices_of(a: str, one: Against) -> Iterator[Block]:
    if not one.slices:
        return
    b, beyond = one.side.letter, sum(bool(slice_.verdict) for slice_ in one.slices)
    title = (
        f"{beyond} of {len(one.slices)} slices tell {b} from {a}"
        if beyond
        else f"None of {len(one.slices)} slices tells {b} from {a} beyond chance"
    )
    shown = one.slices
    if len(shown) > MOST_SLICES:  # the middle says least
        shown = (*shown[: MOST_SLICES // 2], *shown[-MOST_SLICES // 2 :])
    unit = 100 if compare_summary.is_share(one.headline) else 1
    bars = [
        Bar(
            f"{slice_.column}: {slice_.value}" + (" (beyond chance)" if slice_.verdict else ""),
            unit * slice_.difference.difference,
            f"{compare_summary.figures(slice_.difference)}, {slice_.difference.rows:,} rows",
            (unit * slice_.difference.low, unit * slice_.difference.high),
        )
        for slice_ in shown
    ]
    name = compare_summary.named(one.headline)
    gain = f"{name} of {b} less {a}, in points" if unit == 100 else f"by how much {b} has less {name} than {a}"
    yield Figure(title, charts.bars(bars, gain), "Right of 0 is better; whiskers: 95 % intervals.")


# ------------------------------------------------------------------------------------------- how they came to be, cost


def _training(found: Compared) -> Section:
    score = score_name(metric_for(found.sides[0].output).headline.removeprefix("neg_"))
    sign = -1 if metric_for(found.sides[0].output).headline.startswith("neg_") else 1
    blocks = [
        *_curve(found, "Training loss", "training loss", lambda one: one.loss, 1),
        *_curve(found, f"Validation {score}", f"validation {score}", lambda one: one.score, sign),
    ]
    head = ("", *(side.letter for side in found.sides))
    note = (
        "The time from creation to end has everything in it, also pauses; seconds of training are those in which "
        "gradients were computed, and times workers what the machines were held for."
    )
    cost = Table("What it cost", head, _costs(found), note, wide=True)
    intro = "Over rows trained on, and over seconds of the starts, without the time between them."
    return Section("training", "Training", intro, [*blocks, cost])


def _costs(found: Compared) -> list[tuple[str, ...]]:
    """What each side cost, a line for each measure."""
    known = found.costs
    return [
        ("status", *(one.status for one in known)),
        ("updates", *(f"{one.updates:,}" for one in known)),
        ("rows trained on", *(f"{one.rows_seen:,}" for one in known)),
        ("time from creation to end", *(duration(one.seconds) for one in known)),
        ("seconds of training", *(f"{one.train_seconds:,.1f}" for one in known)),
        ("times workers", *(f"{one.worker_seconds:,.1f}" for one in known)),
        ("rows/s", *(rate(one.rows_per_second) for one in known)),
        ("MB of weights that answer", *("-" if one.megabytes is None else f"{one.megabytes:,.1f}" for one in known)),
    ]


def _curve(
    found: Compared, title: str, label: str, of: Callable[[Curves], Sequence[Point]], sign: int
) -> Iterator[Figure]:
    known = [(side.letter, of(curves)) for side, curves in zip(found.sides, found.curves, strict=True)]
    for axis, x in (("rows", "rows trained on"), ("seconds", "seconds")):
        # An entry for a side without points keeps the colours of the others.
        lines = [
            Line(
                letter,
                *stats.thin(
                    [float(getattr(point, axis)) for point in points], [sign * point.value for point in points]
                ),
                dots=len(points) <= 60 and label.startswith("validation"),
            )
            for letter, points in known
        ]
        if any(line.xs for line in lines):
            yield Figure(f"{title} over {axis}", charts.lines(lines, x, label), "")


# ------------------------------------------------------------------------------------------------------------ settings


def _settings(found: Compared) -> Section:
    known = found.settings
    blocks = [
        _differences(found, "Settings that change the weights", known.weights),
        _differences(found, "Settings that change no weight", known.others),
        _differences(found, "Versions", known.versions),
        _differences(found, "Digests", known.digests),
    ]
    return Section("settings", "What was set otherwise", "", blocks)


def _differences(found: Compared, title: str, settings: Sequence[Setting]) -> Block:
    if not settings:
        return Note(f"{title}: all the same.")
    rows = [(short(one.name, VALUE), *(short(value, VALUE) for value in one.values)) for one in settings]
    return Table(title, ("name", *(side.letter for side in found.sides)), rows, wide=True)
