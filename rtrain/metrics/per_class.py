"""Scores of each class for the terminal, of one model or of two side by side.

A class is a dictionary of `rtrain.metrics.scores`: class, precision, recall, f1, support (rows or entities of that
class), predicted. The dictionary of two models has class, support, and `first` and `other` with the remaining figures.
Classes with fewer than `MIN_SUPPORT` come first, since a mean over all rows hides them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.metrics import classification, entities

MIN_SUPPORT = 5
"""Classes with fewer rows than this have no meaningful scores."""
MAX_SHOWN = 20
"""Most classes that are all shown; of more, the `NUM_WORST` with the lowest F1 are shown."""
NUM_WORST = 10
MAX_NAMED = 10
"""Most classes with too few rows that are named if not all are shown."""
SCORES = ("precision", "recall", "f1")
TOO_FEW_ROWS = "too few rows to judge"
NAME_WIDTH = 24
ClassResult = Mapping[str, Any]
ObjectArray = npt.NDArray[np.object_]


def collect_classes(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The classes of a split's tables; with several heads, each label is prefixed with its head."""
    parts = tables["heads"].items() if "heads" in tables else [("", tables)]
    return [
        {**row, "class": f"{head}: {row['class']}" if head else row["class"]}
        for head, part in parts
        for row in part.get("per_class", ())
    ]


def score_answers(
    output: str, target: Sequence[Any] | ObjectArray, prediction: Sequence[Any] | ObjectArray, heads: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Scores of classes from targets and predictions: a label ("" for none), a list of labels or tags, or a label for
    each of the `heads`."""
    if output == "heads":
        class_results = []
        for head_index, name in enumerate(heads):
            pairs = [
                (row[head_index], predicted[head_index])
                for row, predicted in zip(target, prediction, strict=True)
                if row[head_index]
            ]
            head_results = score_answers("classes", *zip(*pairs, strict=True)) if pairs else []
            class_results += [{**row, "class": f"{name}: {row['class']}"} for row in head_results]
        return class_results
    if output == "tags":
        types = entities.compute_type_scores(list(target), list(prediction))
        return [{"class": name, **scores._asdict()} for name, scores in types.items()]
    if output not in ("classes", "labels"):
        return []
    sides = [
        [{labels} - {""} if isinstance(labels, str) else set(labels) for labels in side]
        for side in (target, prediction)
    ]
    true_positives, support, predicted = Counter[str](), Counter[str](), Counter[str]()
    for true_labels, predicted_labels in zip(*sides, strict=True):
        true_positives.update(true_labels & predicted_labels)
        support.update(true_labels)
        predicted.update(predicted_labels)
    names = sorted({*support, *predicted})
    counts = [np.array([counter[name] for name in names]) for counter in (true_positives, support, predicted)]
    class_scores = zip(names, classification.list_class_scores(*counts), strict=True)
    return [{"class": name, **scores._asdict()} for name, scores in class_scores]


def pair_classes(first: Sequence[ClassResult], other: Sequence[ClassResult]) -> list[dict[str, Any]]:
    """The classes of two models on the same rows."""
    nothing = dict.fromkeys((*SCORES, "predicted"), 0)
    sides = [{row["class"]: row for row in side} for side in (first, other)]
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


def split_by_support(classes: Sequence[ClassResult]) -> tuple[list[ClassResult], list[ClassResult]]:
    """(classes with too few rows to judge, the rarest first; the others, in their order)."""
    rare_classes = sorted((row for row in classes if row["support"] < MIN_SUPPORT), key=lambda row: int(row["support"]))
    return rare_classes, [row for row in classes if row["support"] >= MIN_SUPPORT]


def format_classes(classes: Sequence[ClassResult]) -> Iterator[str]:
    """A line for each class."""
    yield from _format_lines(
        classes,
        "".join(f"{name:>10}" for name in ("precision", "recall", "F1")),
        lambda row: "".join(f"{row[name]:>10.4f}" for name in SCORES),
        lambda row: float(row["f1"]),
    )


def format_pairs(classes: Sequence[ClassResult], letters: tuple[str, str]) -> Iterator[str]:
    """A line for each class with the scores of two models, named by `letters`."""
    sides = tuple(zip(("first", "other"), letters, strict=True))
    yield from _format_lines(
        classes,
        "".join(f"{f'{score} {letter}':>20}" for score in ("recall", "F1") for _, letter in sides),
        lambda row: "".join(f"{row[key][score]:>20.4f}" for score in ("recall", "f1") for key, _ in sides),
        lambda row: min(float(row["first"]["f1"]), float(row["other"]["f1"])),
    )


def _format_lines(
    classes: Sequence[ClassResult],
    header: str,
    format_figures: Callable[[ClassResult], str],
    sort_key: Callable[[ClassResult], float],
) -> Iterator[str]:
    if not classes:
        return
    rare_classes, frequent_classes = split_by_support(classes)
    frequent_classes.sort(key=sort_key)
    shown = [*rare_classes, *frequent_classes]
    if len(classes) > MAX_SHOWN:
        shown = frequent_classes[:NUM_WORST]
        if rare_classes:
            class_list = ", ".join(f"{row['class']} ({row['support']:,})" for row in rare_classes[:MAX_NAMED])
            more = f" and {len(rare_classes) - MAX_NAMED:,} more" if len(rare_classes) > MAX_NAMED else ""
            yield f"{len(rare_classes):,} classes have {TOO_FEW_ROWS}: {class_list}{more}"
        yield (
            f"the {len(shown)} classes with the lowest F1, of {len(frequent_classes):,} with {MIN_SUPPORT} rows or "
            "more:"
        )
    yield f"{'class':>{NAME_WIDTH}}{header}{'rows':>8}"
    for result in shown:
        warning = f"  {TOO_FEW_ROWS}" if result["support"] < MIN_SUPPORT else ""
        name = str(result["class"])
        name = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."
        yield f"{name:>{NAME_WIDTH}}{format_figures(result)}{result['support']:>8,}{warning}"
