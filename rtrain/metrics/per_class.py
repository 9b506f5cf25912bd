"""Scores of each class as a terminal shows them, of one model or of two beside each other.

A class is a dictionary of `rtrain.metrics.tables`: class, precision, recall, f1, support (rows or entities of that
class), predicted. The dictionary of two models has class, support, and `first` and `other` with the remaining figures.
Classes with fewer than `LEAST_SUPPORT` come first, since a mean over all rows hides them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.metrics import entities
from rtrain.metrics.sums import ratio

LEAST_SUPPORT = 5
"""Rows of a class below which its scores say nothing."""
MOST_SHOWN = 20
"""Classes up to which all are shown; of more the `WORST` with the lowest F1."""
WORST = 10
MOST_NAMED = 10
"""Classes with too few rows that are named where not all are shown."""
SCORES = ("precision", "recall", "f1")
TOO_FEW = "too few rows to judge"
WIDTH = 24
Class = Mapping[str, Any]
Objects = npt.NDArray[np.object_]


def collect_classes(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The classes of a split's tables; of several heads each label behind the name of its head."""
    parts = tables["heads"].items() if "heads" in tables else [("", tables)]
    return [
        {**one, "class": f"{head}: {one['class']}" if head else one["class"]}
        for head, part in parts
        for one in part.get("per_class", ())
    ]


def score_answers(
    output: str, target: Sequence[Any] | Objects, prediction: Sequence[Any] | Objects, heads: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The classes of rows whose answers are known as labels: a label ("" for none), a list of labels or tags, or a
    label for each of the `heads`."""
    if output == "heads":
        every = []
        for place, name in enumerate(heads):
            pairs = [(row[place], said[place]) for row, said in zip(target, prediction, strict=True) if row[place]]
            own = score_answers("classes", *zip(*pairs, strict=True)) if pairs else []
            every += [{**one, "class": f"{name}: {one['class']}"} for one in own]
        return every
    if output == "tags":
        types = entities.per_type(list(target), list(prediction))
        return [{"class": name, **scores._asdict()} for name, scores in types.items()]
    if output not in ("classes", "labels"):
        return []
    sides = [[{one} - {""} if isinstance(one, str) else set(one) for one in side] for side in (target, prediction)]
    right, support, predicted = Counter[str](), Counter[str](), Counter[str]()
    for true, given in zip(*sides, strict=True):
        right.update(true & given)
        support.update(true)
        predicted.update(given)
    names = sorted({*support, *predicted})
    counts = [np.array([counter[name] for name in names]) for counter in (right, support, predicted)]
    precision, recall, f1 = (
        ratio(above, below).tolist()
        for above, below in (
            (counts[0], counts[2]),
            (counts[0], counts[1]),
            (2 * counts[0], counts[1] + counts[2]),
        )
    )
    return [
        {**dict(zip(("class", *SCORES), one, strict=True)), "support": support[one[0]], "predicted": predicted[one[0]]}
        for one in zip(names, precision, recall, f1, strict=True)
    ]


def pair_classes(first: Sequence[Class], other: Sequence[Class]) -> list[dict[str, Any]]:
    """The classes of two models on the same rows."""
    nothing = dict.fromkeys((*SCORES, "predicted"), 0)
    sides = [{one["class"]: one for one in side} for side in (first, other)]
    return [
        {
            "class": name,
            "support": max(side.get(name, {}).get("support", 0) for side in sides),
            **{
                key: {score: side.get(name, nothing)[score] for score in nothing}
                for key, side in zip(("first", "other"), sides, strict=True)
            },
        }
        for name in dict.fromkeys([*sides[0], *sides[1]])
    ]


def split_by_support(classes: Sequence[Class]) -> tuple[list[Class], list[Class]]:
    """(classes with too few rows to judge, the rarest first; the others, in their order)."""
    few = sorted((one for one in classes if one["support"] < LEAST_SUPPORT), key=lambda one: int(one["support"]))
    return few, [one for one in classes if one["support"] >= LEAST_SUPPORT]


def format_classes(classes: Sequence[Class]) -> Iterator[str]:
    """A line for each class; nothing where there are none."""
    yield from _lines(
        classes,
        "".join(f"{name:>10}" for name in ("precision", "recall", "F1")),
        lambda one: "".join(f"{one[name]:>10.4f}" for name in SCORES),
        lambda one: float(one["f1"]),
    )


def format_pairs(classes: Sequence[Class], letters: tuple[str, str]) -> Iterator[str]:
    """The same of two models, which `letters` name."""
    sides = tuple(zip(("first", "other"), letters, strict=True))
    yield from _lines(
        classes,
        "".join(f"{f'{score} {letter}':>20}" for score in ("recall", "F1") for _, letter in sides),
        lambda one: "".join(f"{one[key][score]:>20.4f}" for score in ("recall", "f1") for key, _ in sides),
        lambda one: min(float(one["first"]["f1"]), float(one["other"]["f1"])),
    )


def _lines(
    classes: Sequence[Class], head: str, figures: Callable[[Class], str], worth: Callable[[Class], float]
) -> Iterator[str]:
    if not classes:
        return
    few, enough = split_by_support(classes)
    enough.sort(key=worth)
    shown = [*few, *enough]
    if len(classes) > MOST_SHOWN:
        shown = enough[:WORST]
        if few:
            named = ", ".join(f"{one['class']} ({one['support']:,})" for one in few[:MOST_NAMED])
            more = f" and {len(few) - MOST_NAMED:,} more" if len(few) > MOST_NAMED else ""
            yield f"{len(few):,} classes have {TOO_FEW}: {named}{more}"
        yield f"the {len(shown)} classes with the lowest F1, of {len(enough):,} with {LEAST_SUPPORT} rows or more:"
    yield f"{'class':>{WIDTH}}{head}{'rows':>8}"
    for one in shown:
        doubt = f"  {TOO_FEW}" if one["support"] < LEAST_SUPPORT else ""
        name = str(one["class"])
        name = name if len(name) <= WIDTH else f"{name[: WIDTH - 3]}..."
        yield f"{name:>{WIDTH}}{figures(one)}{one['support']:>8,}{doubt}"
