"""What the answer to each row is worth, by the kind of output: from targets and answers as a run's files have them.

The scores are those of `rtrain.metrics.registry`, over the common rows alone. Two kinds differ. An answer in words
(`spans`) is judged by its words beside those of the first true answer, since the files keep no other. Where rows may be
outside of all classes, the accuracy is that of all rows with those refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import Head, Ragged
from rtrain.data.store.store import Store
from rtrain.metrics import classification, entities, per_class, registry, rouge, spans, summary_rows
from rtrain.metrics.registry import ACCURACY_WITH_REFUSALS, MACRO
from rtrain.metrics.sums import Additive, Bools, Floats, Ints, joined, means, ratio

Column = npt.NDArray[Any]


class Sheet(NamedTuple):
    """One side's answers to some rows; strings, floats or lists, as `rtrain.report.row_predictions` reads them."""

    target: Column
    prediction: Column
    loss: Floats
    facts: Mapping[str, Any]
    """Facts of the head: names of heads, the scale of numbers, the label for rows outside."""
    store: Store | None
    split: str
    position: Ints
    """Places of the rows in the store's split."""


@dataclass(frozen=True)
class Judged:
    """What one side's answers are worth; an entry per row."""

    scores: Additive
    headline: str
    """The score by which sides are compared, one of `scores`; larger is better."""
    worth: Floats
    """Worth of each row's answer; larger is better."""
    right: Bools | None
    """Where answers are right or wrong; None where they are more or less good."""
    main: Additive
    """The headline alone, or among few: it is resampled for each slice."""
    classes: Sequence[per_class.Class] = ()
    """Scores of each class; none where answers are no labels."""


def judge(output: str, sheet: Sheet) -> Judged:
    """Judge answers. Where the kind has no answer that can be judged, e.g. one that a later task brings, their loss
    counts."""
    found = JUDGES[output](sheet) if output in JUDGES else None
    if found is None:
        return _losses(sheet)
    heads = _names_of_heads(sheet) if output == "heads" else ()
    return replace(found, classes=per_class.score_answers(output, sheet.target, sheet.prediction, heads))


def reconciled(output: str, targets: Sequence[Column]) -> tuple[Column, Bools]:
    """(one target for each row, whether the sides' targets are of one row).

    A label that the training rows of one side lack is none among its targets, and stands among another's. A text that
    one side has cut has fewer words, and its tags cannot be compared.
    """
    merged = targets[0].copy()
    same = np.ones(len(merged), dtype=np.bool_)
    if output not in MERGED:
        return merged, same
    for row, sides in enumerate(zip(*targets, strict=True)):
        if isinstance(sides[0], str):
            merged[row] = next((one for one in sides if one), "")
        elif output == "labels":
            merged[row] = sorted(set().union(*sides))
        elif len({len(one) for one in sides}) > 1:
            same[row] = False
        else:
            empty = ("", "O")
            merged[row] = [
                next((one for one in part if one not in empty), part[0]) for part in zip(*sides, strict=True)
            ]
    return merged, same


MERGED = ("classes", "labels", "heads", "tags")
"""Kinds of output whose targets are labels."""


def _right(sheet: Sheet) -> Bools:
    pairs = zip(sheet.target, sheet.prediction, strict=True)
    return np.fromiter((bool(want == have) for want, have in pairs), dtype=np.bool_, count=len(sheet.target))


def _exact(scores: Additive, headline: str, right: Bools) -> Judged:
    return Judged(scores, headline, right.astype(np.float64), right, means({headline: right}))


def keep_scores(additive: Additive, names: tuple[str, ...]) -> Additive:
    """These scores alone: slices are resampled by hundreds."""

    def score(sums: Floats) -> dict[str, Floats]:
        found = additive.score(sums)
        return {name: found[name] for name in names}

    return Additive(additive.rows, score)


# ------------------------------------------------------------------------------------------------------ labels of rows


def _classes(sheet: Sheet) -> Judged:
    right = _right(sheet) & (sheet.target != "")
    if "outside" in sheet.facts:
        return _exact(means({ACCURACY_WITH_REFUSALS: right}), ACCURACY_WITH_REFUSALS, right)
    true, given, count = _codes(sheet.target, sheet.prediction)
    return _exact(keep_scores(classification.additive(true, given, count), ("accuracy", *MACRO)), "accuracy", right)


def _codes(target: Sequence[Any] | Column, prediction: Sequence[Any] | Column) -> tuple[Ints, Ints, int]:
    """Numbers of labels, -1 where there is none; and how many labels there are."""
    names = sorted({*target, *prediction} - {""})
    number = {name: place for place, name in enumerate(names)}
    true, given = (np.array([number.get(one, -1) for one in side], dtype=np.int64) for side in (target, prediction))
    # A row that is given nothing is given a label of its own, which no row has.
    return true, np.where(given < 0, len(names), given), len(names) + 1


def _labels(sheet: Sheet) -> Judged:
    names = sorted({name for side in (sheet.target, sheet.prediction) for row in side for name in row})
    number = {name: place for place, name in enumerate(names)}
    sides = [np.zeros((len(sheet.target), len(names)), dtype=np.bool_) for _ in range(2)]
    for side, rows in zip(sides, (sheet.target, sheet.prediction), strict=True):
        for place, row in enumerate(rows):
            side[place, [number[name] for name in row]] = True
    every = classification.additive_multilabel(*sides)
    shown = ("micro_f1", "micro_precision", "micro_recall", "macro_f1", "subset_accuracy")
    right = np.all(sides[0] == sides[1], axis=1)
    # What a row adds to micro F1: both true and given, true, given.
    sums = np.stack([(sides[0] & sides[1]).sum(axis=1), sides[0].sum(axis=1), sides[1].sum(axis=1)], axis=1)
    main = Additive(sums.astype(np.float64), lambda t: {"micro_f1": ratio(2 * t[..., 0], t[..., 1] + t[..., 2])})
    return Judged(keep_scores(every, shown), "micro_f1", right.astype(np.float64), right, main)


def _heads(sheet: Sheet) -> Judged:
    names = _names_of_heads(sheet)
    parts, present = [], np.zeros((len(sheet.target), len(names)))
    good = np.zeros_like(present)
    for place, name in enumerate(names):
        target, given = ([row[place] for row in side] for side in (sheet.target, sheet.prediction))
        present[:, place] = [bool(one) for one in target]
        good[:, place] = [bool(one) and one == other for one, other in zip(target, given, strict=True)]
        parts.append(_share(f"{name}_accuracy", good[:, place], present[:, place]))
    scores = registry.with_mean(joined(*parts), "mean_accuracy", [f"{name}_accuracy" for name in names], present)
    right = np.asarray((good == present).all(axis=1))
    return Judged(scores, "mean_accuracy", right.astype(np.float64), right, scores)


def _names_of_heads(sheet: Sheet) -> list[str]:
    width = max((len(row) for row in sheet.target), default=0)
    known = [name for name, _ in sheet.facts.get("heads", ())]
    return known if len(known) == width else [f"head_{place + 1}" for place in range(width)]


def _share(name: str, part: Floats, whole: Floats) -> Additive:
    return Additive(np.stack([part, whole], axis=1), lambda sums: {name: ratio(sums[..., 0], sums[..., 1])})


# ------------------------------------------------------------------------------------------------------- other answers


def _number(sheet: Sheet) -> Judged:
    true, given = (np.asarray(side, dtype=np.float64) for side in (sheet.target, sheet.prediction))
    scores = registry.additive_number(Ragged.even(given), Ragged.even(true), Head((), sheet.facts))
    return Judged(scores, "neg_rmse", -np.abs(given - true), None, scores)


def _tags(sheet: Sheet) -> Judged:
    right = _right(sheet)
    words = [
        sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(sheet.target, sheet.prediction, strict=True)
    ]
    whole = np.array([len(row) for row in sheet.target], dtype=np.float64)
    whole_entities = entities.additive(list(sheet.target), list(sheet.prediction))
    scores = joined(whole_entities, _share("word_accuracy", np.asarray(words, dtype=np.float64), whole))
    return Judged(scores, "f1", right.astype(np.float64), right, whole_entities)


def _spans(sheet: Sheet) -> Judged:
    pairs = [(have, [want] if want else []) for want, have in zip(sheet.target, sheet.prediction, strict=True)]
    exact = np.array([spans.exact_match(*pair) for pair in pairs])
    f1 = np.array([spans.f1(*pair) for pair in pairs])
    scores = means({"f1": f1, "exact_match": exact})
    return Judged(scores, "f1", f1, exact > 0, scores)


def _summary(sheet: Sheet) -> Judged | None:
    """By ROUGE, for which the token store has the words; without it there is the loss."""
    if sheet.store is None:
        return None
    rows = []
    for places, numbers in zip(sheet.store.targets(sheet.split, sheet.position), sheet.prediction, strict=True):
        words, _ = summary_rows.words_of(places)
        rows.append(rouge.rouge(words.of(int(number) - 1 for number in numbers), words.reference))
    table = np.array(rows, dtype=np.float64).reshape(-1, len(rouge.ROUGES))
    columns = dict(zip(rouge.ROUGES, table.T, strict=True))
    scores = means({"rouge": table.mean(axis=1), **columns})
    return Judged(scores, "rouge", table.mean(axis=1), None, scores)


GUESSED = re.compile(r"(\d+) of (\d+) ")


def _tokens(sheet: Sheet) -> Judged | None:
    """Masked tokens: a row's answer says how many were guessed of how many."""
    found = [GUESSED.match(one) for one in sheet.prediction]
    if not all(found) or not np.isfinite(sheet.loss).all():
        return None
    right, guessed = np.array([[int(one[1]), int(one[2])] for one in found if one], dtype=np.float64).reshape(-1, 2).T
    rows = np.stack([guessed, right, sheet.loss * guessed], axis=1)
    scores = registry.additive_tokens(Ragged.even(rows), Ragged.even(rows), Head())
    return Judged(scores, "neg_loss", -sheet.loss, None, scores)


def _losses(sheet: Sheet) -> Judged:
    known = np.isfinite(sheet.loss)
    loss = np.where(known, sheet.loss, sheet.loss[known].max(initial=0.0))  # an endless loss has no mean
    scores = means({"neg_loss": -loss})
    return Judged(scores, "neg_loss", -loss, None, scores)


JUDGES: Mapping[str, Callable[[Sheet], Judged | None]] = {
    "classes": _classes,
    "labels": _labels,
    "heads": _heads,
    "number": _number,
    "tags": _tags,
    "spans": _spans,
    "summary": _summary,
    "tokens": _tokens,
}
