"""One side against the first one: scores with intervals, McNemar's test, slices, flipped rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rtrain.core.errors import UserError
from rtrain.data.store.store import Store
from rtrain.evaluation import changed_predictions, row_scores, significance
from rtrain.evaluation.candidates import Side
from rtrain.evaluation.pairing import Paired
from rtrain.evaluation.row_scores import Judged, Sheet
from rtrain.evaluation.significance import Difference
from rtrain.metrics import per_class
from rtrain.metrics.scores import LENGTH, MOST_SLICES
from rtrain.metrics.slices import LEAST, Group, groups, quantiles
from rtrain.metrics.sums import Additive, Bools, Ints
from rtrain.report import stats

SLICE_REPLICATES = 1000
"""The fewest resamples of a slice."""
REPLICATES_A_SLICE = 80
"""Resamples of each slice for every slice that there is: the least p, of 2 in so many, is below 0.05 after Holm's
correction too."""


@dataclass(frozen=True)
class Slice:
    column: str
    value: str
    difference: Difference
    """Its p is corrected for the number of slices, by Holm's method."""

    @property
    def verdict(self) -> int:
        """1: the other side is better there, -1: worse, 0: not told apart."""
        return self.difference.verdict


@dataclass(frozen=True)
class Flipped:
    """McNemar's test: how many rows only the first side has right, how many only the other, and the exact p."""

    lost: int
    won: int
    p: float


@dataclass(frozen=True)
class Against:
    """What is found of a side beside the first one."""

    side: Side
    headline: Difference
    """Its p is corrected for the number of sides; for classes it is the larger of the bootstrap's and McNemar's."""
    scores: tuple[Difference, ...]
    """Every score, p as the bootstrap gives it."""
    mcnemar: Flipped | None
    slices: tuple[Slice, ...]
    """Those where the side is worst first."""
    kinds: tuple[changed_predictions.Kind, ...]
    classes: Sequence[per_class.Class] = ()
    """Scores of each class by both sides."""


@dataclass(frozen=True)
class Measured:
    split: str
    rows: int
    of: tuple[int, ...]
    """All rows of each side's file."""
    left_out: int
    """Common rows that the sides have cut to different lengths."""
    against: tuple[Against, ...]


def measure(sides: Sequence[Side], paired: Paired) -> Measured:
    """Each side against the first one, on the common rows."""
    judged, at = _judged(sides, paired)
    if not len(at[0]):
        raise UserError(
            f"none of the {len(paired):,} common rows has targets that can be compared: their texts were cut to other "
            "lengths, or the heads are not the same; compare runs of one data.max_tokens and one set of heads",
            code="no_common_rows",
        )
    found = [_against(sides, paired, at, judged, place) for place in range(1, len(sides))]
    corrected = stats.holm([one.headline.p for one in found])
    return Measured(
        split=paired.split,
        rows=len(at[0]),
        of=tuple(len(answers.rows) for answers in paired.answers),
        left_out=len(paired) - len(at[0]),
        against=tuple(
            replace(one, headline=replace(one.headline, p=p)) for one, p in zip(found, corrected, strict=True)
        ),
    )


def headline(sides: Sequence[Side], paired: Paired) -> Difference:
    """The headline of the second of two sides beside the first."""
    (first, other), _ = _judged(sides, paired)
    return _headline(sides[0].output, first, other)[0]


def _judged(sides: Sequence[Side], paired: Paired) -> tuple[list[Judged], list[Ints]]:
    """What each side's answers are worth, and the places of the judged rows in its file."""
    output = sides[0].output
    targets = [answers.rows.target[at] for answers, at in zip(paired.answers, paired.at, strict=True)]
    target, same = row_scores.reconciled(output, targets)
    at = [own[same] for own in paired.at]
    sheets = [_sheet(side, paired, place, at[place], target[same]) for place, side in enumerate(sides)]
    if output == "number":
        for side, sheet in zip(sides, sheets, strict=True):
            if not np.isfinite(sheet.prediction.astype(np.float64)).all():
                reason = "answers with what is no finite number: its training has gone astray"
                raise UserError(f"{side} {reason}; compare runs that have learned something", code="not_finite")
        # On the scale of the first: scores by two scales say nothing of each other.
        sheets = [sheet._replace(facts=sheets[0].facts) for sheet in sheets]
    if any(sheet.store is None for sheet in sheets):
        # By what all of them have: a summary whose store is gone is judged by its loss, and so are the others.
        sheets = [sheet._replace(store=None) for sheet in sheets]
    if any("outside" in sheet.facts for sheet in sheets):
        # A side that knows of no outside is right of no such row.
        sheets = [sheet._replace(facts={"outside": "", **sheet.facts}) for sheet in sheets]
    return [row_scores.judge(output, sheet) for sheet in sheets], at


def _headline(output: str, first: Judged, other: Judged) -> tuple[Difference, Flipped | None, list[Difference]]:
    """(the headline with the p that decides, McNemar's test of classes, every score)."""
    scores = significance.differences(first.scores, other.scores)
    found = next(one for one in scores if one.name == first.headline)
    flipped = count_flips(first.right, other.right) if output == "classes" else None
    return (found if flipped is None else replace(found, p=max(found.p, flipped.p))), flipped, scores


def _sheet(side: Side, paired: Paired, place: int, at: Ints, target: row_scores.Column) -> Sheet:
    # Only a summary is judged by more than its file holds; another kind must not fail for want of the store.
    answers, where = paired.answers[place], side.run.store if side.output == "summary" else None
    return Sheet(
        target=target,
        prediction=answers.rows.prediction[at],
        loss=answers.rows.loss[at],
        facts={} if side.made is None else side.made.facts,
        store=None if where is None else Store(where),
        split=paired.split,
        position=answers.position[at],
    )


def _against(
    sides: Sequence[Side], paired: Paired, at: Sequence[Ints], judged: Sequence[Judged], place: int
) -> Against:
    first, other = judged[0], judged[place]
    decisive, flipped, scores = _headline(sides[0].output, first, other)
    rows = paired.answers[0].rows
    columns = {name: [values[row] for row in at[0]] for name, values in rows.slices.items()}
    if LENGTH not in columns:
        columns[LENGTH] = quantiles(rows.tokens[at[0]])
    letters = (sides[0].letter, sides[place].letter)
    both = (paired.answers[0], paired.answers[place])
    return Against(
        side=sides[place],
        headline=decisive,
        scores=tuple(scores),
        mcnemar=flipped,
        slices=tuple(slices(first.main, other.main, first.headline, columns)),
        kinds=tuple(changed_predictions.kinds(sides[0].output, first, other, both, (at[0], at[place]), letters)),
        classes=per_class.pair_classes(first.classes, other.classes),
    )


def count_flips(first: Bools | None, other: Bools | None) -> Flipped | None:
    """Right answers lost and won; None where answers are not right or wrong."""
    if first is None or other is None:
        return None
    lost, won = int((first & ~other).sum()), int((~first & other).sum())
    return Flipped(lost, won, significance.mcnemar(lost, won))


def slices(
    first: Additive, other: Additive, headline: str, columns: Mapping[str, Sequence[str]], least: int = LEAST
) -> list[Slice]:
    """The difference on the rows of each value, where it is the worst first. Rare values are one slice, and so are all
    but the `MOST_SLICES` most frequent. A column in which all rows have one value says nothing, nor do fewer than
    `LEAST` rows."""
    parts: list[tuple[str, Group]] = []
    for column, values in columns.items():
        every = groups(values, 1 if column == LENGTH else least, MOST_SLICES)
        parts += [(column, one) for one in every if len(one.rows) >= LEAST] if len(every) > 1 else []
    replicates, found = max(SLICE_REPLICATES, REPLICATES_A_SLICE * len(parts)), list[Difference]()
    for _, part in parts:
        a, b = (Additive(side.rows[part.rows], side.score) for side in (first, other))
        found.append(next(one for one in significance.differences(a, b, replicates) if one.name == headline))
    corrected = stats.holm([one.p for one in found])
    made = [
        Slice(column, part.value, replace(one, p=p))
        for (column, part), one, p in zip(parts, found, corrected, strict=True)
    ]
    return sorted(made, key=lambda one: one.difference.difference)
