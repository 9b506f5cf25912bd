"""Classification of a whole split: one label per row, several labels per row, and rows outside every label.

Precision = TP / predicted, recall = TP / true, F1 = 2 TP / (true + predicted), each 0 where nothing is to be divided
by. Macro is the mean over the classes that occur or are predicted, micro the same ratio of the sums over classes. So
macro recall is not balanced accuracy, which averages the classes that occur alone: a class that is predicted and never
true adds a 0. These are scikit-learn's `precision_recall_fscore_support(zero_division=0)`.
"""

from typing import Any, NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.metrics.sums import Additive, Bools, Floats, Ints, ratio


class ClassScores(NamedTuple):
    """One class: its scores, how many rows have it (`support`), how many were given it (`predicted`)."""

    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


# ------------------------------------------------------------------------------------------------------- single label

NONE = -3
"""No class, and no target either."""


def best(logits: Floats) -> Ints:
    """The class of each row of [rows, classes]; `NONE` where one of its logits is no number, which orders nothing."""
    return np.where(np.isnan(logits).any(axis=1), NONE, logits.argmax(axis=1))


def confusion(true: Ints, predicted: Ints, classes: int) -> Ints:
    """Counts [true, predicted], (classes + 1, classes). The last row has the rows whose label is no class (-1)."""
    counts = np.zeros((classes + 1, classes), dtype=np.int64)
    np.add.at(counts, (true, predicted), 1)
    return counts


def per_class(counts: Ints, unanswered: Ints | int = 0) -> list[ClassScores]:
    """The scores of each class, from `confusion`'s counts; `unanswered`: how many further rows of each class were given
    none."""
    right, support, predicted = np.diag(counts[:-1]), counts[:-1].sum(axis=1) + unanswered, counts.sum(axis=0)
    columns = (ratio(right, predicted), ratio(right, support), ratio(2 * right, support + predicted))
    return [
        ClassScores(float(precision), float(recall), float(f1), int(true), int(given))
        for precision, recall, f1, true, given in zip(*columns, support, predicted, strict=True)
    ]


def additive(true: Ints, predicted: Ints, classes: int) -> Additive:
    """accuracy and macro and micro precision, recall and F1.

    A row whose label is no class (-1) is wrong: in accuracy, and in the precision of the class that it was given.
    """
    return _additive(
        _one_hot(true, classes),
        _one_hot(predicted, classes),
        np.asarray(true == predicted, dtype=np.float64),
        "accuracy",
    )


def auc(true: Ints, class_scores: Floats) -> tuple[float | None, list[float | None]]:
    """One-vs-rest area under the ROC curve: the mean over classes, and each class.

    `class_scores` (rows, classes) may be logits or probabilities; only their order within a column matters. A class
    that no row has, or that every row has, has no curve: None, and left out of the mean. The area is the share of pairs
    (row of the class, other row) in order, ties as half (Mann and Whitney 1947). By ranks for all classes at once:
    scikit-learn's curve for each of a hundred classes would take seconds over all slices of a split.
    """
    rows, classes = class_scores.shape
    own = true[:, None] == np.arange(classes)
    count = own.sum(axis=0)
    ranks = np.where(own, _mean_ranks(class_scores), 0.0).sum(axis=0) if rows else np.zeros(classes)
    areas = ratio(ranks - count * (count + 1) / 2, count * (rows - count))
    each = [float(area) if 0 < own < rows else None for area, own in zip(areas, count.tolist(), strict=True)]
    defined = [value for value in each if value is not None]
    return (float(np.mean(defined)) if defined else None), each


def _mean_ranks(values: Floats) -> Floats:
    """The rank of each value in its column, from 1; ties have the mean of theirs, and a column with a value that is no
    number has none. scipy's come with all of scipy.stats, whose import takes longer than they do."""
    ranks = np.empty(values.shape)
    for place, column in enumerate(values.T):
        ordered = np.sort(column)
        below, up_to = (np.searchsorted(ordered, column, side) for side in ("left", "right"))
        ranks[:, place] = np.nan if np.isnan(ordered[-1:]).any() else (below + up_to + 1) / 2
    return ranks


# ----------------------------------------------------------------------------------------------------- several labels


def additive_multilabel(true: Bools, predicted: Bools) -> Additive:
    """subset_accuracy (all labels of a row right) and macro and micro precision, recall and F1; (rows, labels) each."""
    from scipy.sparse import csr_array

    exact = np.all(true == predicted, axis=1).astype(np.float64)
    return _additive(
        csr_array(true, dtype=np.float64), csr_array(predicted, dtype=np.float64), exact, "subset_accuracy"
    )


def mean_average_precision(true: Bools, label_scores: Floats) -> float | None:
    """Mean over labels of the area under precision and recall (average precision, without interpolation; scikit-learn).

    A label that no row has is left out; None where no label has a row.
    """
    from sklearn.metrics import average_precision_score

    columns = np.flatnonzero(true.any(axis=0))
    each = [average_precision_score(true[:, column], label_scores[:, column]) for column in columns]
    return float(np.mean(each)) if each else None


# ------------------------------------------------------------------------------------------------------- out of scope


def choose_threshold(confidence: Floats, outside: Bools) -> float:
    """The threshold of confidence (rows,) below which a row is called out of scope; choose it on validation rows.

    It is the threshold at which finding the out-of-scope rows has the highest F1; of equal ones the lowest. It lies
    half-way between two confidences. Raises `UserError` unless there are rows of both kinds.
    """
    if outside.all() or not outside.any():
        raise UserError(
            "an out-of-scope threshold needs validation rows of both kinds, in scope and out of scope; "
            "add rows of the other kind, or leave the threshold out",
            code="too_few_rows",
        )
    values, inverse = np.unique(confidence, return_inverse=True)
    # refused[i]: rows below values[i]; the last entry refuses all.
    refused = np.concatenate([[0], np.cumsum(np.bincount(inverse))])
    found = np.concatenate([[0], np.cumsum(np.bincount(inverse, weights=outside))])
    edges = np.concatenate([[values[0]], (values[:-1] + values[1:]) / 2, [np.nextafter(values[-1], np.inf)]])
    # Two neighbouring floats have no number between them: then the upper one is the edge, which refuses the lower.
    edges[1:-1] = np.where(edges[1:-1] > values[:-1], edges[1:-1], values[1:])
    return float(edges[np.argmax(ratio(2 * found, refused + outside.sum()))])


# ----------------------------------------------------------------------------------- thresholds of several labels

SHRINKAGE_ROWS = 10
"""Rows of a label that weigh as much as all labels together in its threshold. On simulated labels with 0.2 to 10 % of
300 to 3,000 validation rows and miscalibrated logits, 10 gives the best micro F1 on other rows (2 to 3 points above one
threshold for all labels, 1 to 8 above no shrinkage); of calibrated logits it costs 1 point of micro F1."""


def choose_label_thresholds(logits: Floats, true: Bools) -> Floats | None:
    """Choose the logit from which each label is given, on validation rows: [labels]; None where no row has a label.

    A label's threshold is that of its best F1, shrunk towards the threshold of the best micro F1 of all labels: few
    rows of a label say little of where it begins. A label without rows has the threshold of all.
    """
    shared = _best_f1_threshold(logits.ravel(), true.ravel())
    if shared is None:
        return None
    found = np.full(logits.shape[1], shared)
    for place, (column, own) in enumerate(zip(logits.T, true.T, strict=True)):
        best = _best_f1_threshold(column, own)
        if best is not None:
            found[place] = (own.sum() * best + SHRINKAGE_ROWS * shared) / (own.sum() + SHRINKAGE_ROWS)
    return found


def _best_f1_threshold(logits: Floats, true: Bools) -> float | None:
    """The threshold of the highest F1, half-way to the next lower logit; None where nothing is true. A NaN is above no
    threshold: what is true of it is missed by all of them."""
    known, support = ~np.isnan(logits), true.sum()
    logits, true = logits[known], true[known]
    if not true.any():
        return None
    order = np.argsort(-logits, kind="stable")
    right = np.cumsum(true[order])
    # F1 = 2 TP / (given + true) if the first n labels are given; only where the logit falls can the cut be.
    f1 = 2 * right / (np.arange(1, len(order) + 1) + support)
    falls = np.append(np.diff(logits[order]) < 0, True)
    last = int(np.argmax(np.where(falls, f1, -1.0)))
    lower = logits[order[last + 1]] if last + 1 < len(order) else logits[order[last]] - 1.0
    return float(logits[order[last]] + lower) / 2


# ------------------------------------------------------------------------------------------------------------- shared


def _one_hot(labels: Ints, classes: int) -> Any:
    """(rows, classes), sparse; nothing in the row of a label that is no class."""
    from scipy.sparse import csr_array

    known = np.flatnonzero(labels >= 0)
    return csr_array((np.ones(len(known)), (known, labels[known])), shape=(len(labels), classes))


def _additive(true: Any, predicted: Any, right: Floats, name: str) -> Additive:
    """Each row adds TP, true and predicted per class, whether it is all right, and one; both sides are sparse."""
    from scipy.sparse import hstack

    columns = np.stack([right, np.ones_like(right)], axis=1)
    rows = hstack([true.multiply(predicted), true, predicted, columns], format="csr")
    classes = true.shape[1]

    def score(sums: Floats) -> dict[str, Floats]:
        positive, support, given = (sums[..., part * classes : (part + 1) * classes] for part in range(3))
        present = ((support + given) > 0).sum(axis=-1)
        found = {name: ratio(sums[..., -2], sums[..., -1])}
        for kind, top, bottom in (
            ("precision", positive, given),
            ("recall", positive, support),
            ("f1", 2 * positive, support + given),
        ):
            found[f"macro_{kind}"] = ratio(ratio(top, bottom).sum(axis=-1), present)
            found[f"micro_{kind}"] = ratio(top.sum(axis=-1), bottom.sum(axis=-1))
        return found

    return Additive(rows, score)
