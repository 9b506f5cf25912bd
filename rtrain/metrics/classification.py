"""Classification scores of a whole split: one label per row, several labels per row, out-of-scope rows, calibration.

Precision = TP / predicted, recall = TP / true, F1 = 2 TP / (true + predicted), each 0 if the denominator is 0.
Macro is the mean over the classes that occur or are predicted, micro the same ratio of the sums over classes. So macro
recall is not balanced accuracy, which averages only the classes that occur: a class that is predicted and never true
adds a 0. These are scikit-learn's `precision_recall_fscore_support(zero_division=0)`.

`rtrain.metrics.classes` selects the scores that are reported (`MACRO_SCORES`).
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.metrics.bootstrap import Bools, Floats, Ints, SumMetric, ratio


class ClassScores(NamedTuple):
    """One class: its scores, its true rows (`support`), and the rows predicted as it (`predicted`)."""

    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


# ------------------------------------------------------------------------------------------------------- single label

NO_CLASS = -3
"""No class; never equal to a target."""


def predict_classes(logits: Floats) -> Ints:
    """The class of each row of [rows, classes]; `NO_CLASS` if one of its logits is NaN."""
    return np.where(np.isnan(logits).any(axis=1), NO_CLASS, logits.argmax(axis=1))


def count_confusion(true: Ints, predicted: Ints, classes: int) -> Ints:
    """Counts [true, predicted], (classes + 1, classes). The last row has the rows whose label is no class (-1)."""
    counts = np.zeros((classes + 1, classes), dtype=np.int64)
    np.add.at(counts, (true, predicted), 1)
    return counts


def list_class_scores(true_positives: Any, support: Any, predicted: Any) -> list[ClassScores]:
    """The scores of each class, from its counts."""
    precision, recall = ratio(true_positives, predicted), ratio(true_positives, support)
    f1 = ratio(2 * true_positives, support + predicted)
    counts = np.asarray(support, dtype=np.int64), np.asarray(predicted, dtype=np.int64)
    columns = (column.tolist() for column in (precision, recall, f1, *counts))
    return list(itertools.starmap(ClassScores, zip(*columns, strict=True)))


def make_sum_metric(true: Ints, predicted: Ints, classes: int) -> SumMetric:
    """accuracy and macro and micro precision, recall and F1.

    A row whose label is no class (-1) is wrong: in accuracy, and in the precision of its predicted class.
    """
    is_correct = np.asarray(true == predicted, dtype=np.float64)
    return _make_sum_metric(_encode_one_hot(true, classes), _encode_one_hot(predicted, classes), is_correct, "accuracy")


def compute_auc(true: Ints, class_scores: Floats) -> tuple[float | None, list[float | None]]:
    """One-vs-rest area under the ROC curve: the mean over classes, and each class.

    `class_scores` (rows, classes) may be logits or probabilities; only their order within a column matters. A class
    that no row has, or that every row has, has no curve: None, and excluded from the mean. The area is the share of
    ordered pairs (row of the class, other row), ties as half (Mann and Whitney 1947). Ranks of all classes are computed
    at once: scikit-learn's curve for each of a hundred classes would take seconds over all slices of a split.
    """
    rows, classes = class_scores.shape
    is_class = true[:, None] == np.arange(classes)
    count = is_class.sum(axis=0)
    ranks = np.where(is_class, _compute_mean_ranks(class_scores), 0.0).sum(axis=0) if rows else np.zeros(classes)
    areas = ratio(ranks - count * (count + 1) / 2, count * (rows - count))
    each = [float(area) if 0 < num_rows < rows else None for area, num_rows in zip(areas, count.tolist(), strict=True)]
    defined = [value for value in each if value is not None]
    return (float(np.mean(defined)) if defined else None), each


def _compute_mean_ranks(values: Floats) -> Floats:
    """The rank of each value in its column, from 1; ties have their mean rank, and a column with NaN has only NaN.
    scipy's ranks need scipy.stats, whose import takes longer than this computation."""
    ranks = np.empty(values.shape)
    for column_index, column in enumerate(values.T):
        ordered = np.sort(column)
        below, up_to = (np.searchsorted(ordered, column, side) for side in ("left", "right"))
        ranks[:, column_index] = np.nan if np.isnan(ordered[-1:]).any() else (below + up_to + 1) / 2
    return ranks


# ----------------------------------------------------------------------------------------------------- several labels


def make_multilabel_metric(true: Bools, predicted: Bools) -> SumMetric:
    """subset_accuracy (all labels of a row right) and macro and micro precision, recall and F1; (rows, labels) each."""
    from scipy.sparse import csr_array

    exact = np.all(true == predicted, axis=1).astype(np.float64)
    sparse_true, sparse_predicted = csr_array(true, dtype=np.float64), csr_array(predicted, dtype=np.float64)
    return _make_sum_metric(sparse_true, sparse_predicted, exact, "subset_accuracy")


def mean_average_precision(true: Bools, label_scores: Floats) -> float | None:
    """Mean over labels of the area under precision and recall (average precision, without interpolation; scikit-learn).

    A label that no row has is excluded; None if no label has a row.
    """
    from sklearn.metrics import average_precision_score

    columns = np.flatnonzero(true.any(axis=0))
    each = [average_precision_score(true[:, column], label_scores[:, column]) for column in columns]
    return float(np.mean(each)) if each else None


# ------------------------------------------------------------------------------------------------------- out of scope


def choose_threshold(confidence: Floats, is_out_of_scope: Bools) -> float:
    """The threshold of confidence (rows,) below which a row is out of scope; choose it on validation rows.

    It has the highest F1 of detecting out-of-scope rows; on ties, the lowest threshold. It is half-way between two
    confidences. Raises `UserError` unless there are rows of both kinds.
    """
    if is_out_of_scope.all() or not is_out_of_scope.any():
        raise UserError(
            "an out-of-scope threshold needs validation rows of both kinds, in scope and out of scope; "
            "add rows of the other kind, or remove the out-of-scope label",
            code="too_few_rows",
        )
    values, inverse = np.unique(confidence, return_inverse=True)
    # num_below[i]: rows below values[i]; the last entry counts all.
    num_below = np.concatenate([[0], np.cumsum(np.bincount(inverse))])
    true_positives = np.concatenate([[0], np.cumsum(np.bincount(inverse, weights=is_out_of_scope))])
    edges = np.concatenate([[values[0]], (values[:-1] + values[1:]) / 2, [np.nextafter(values[-1], np.inf)]])
    # Adjacent floats have no midpoint: then the upper one is the edge, which rejects the lower.
    edges[1:-1] = np.where(edges[1:-1] > values[:-1], edges[1:-1], values[1:])
    return float(edges[np.argmax(ratio(2 * true_positives, num_below + is_out_of_scope.sum()))])


# ----------------------------------------------------------------------------------- thresholds of several labels

SHRINKAGE_ROWS = 10
"""Rows of a label that weigh as much as all labels together in its threshold. On simulated labels with 0.2 to 10 % of
300 to 3,000 validation rows and miscalibrated logits, 10 gives the best micro F1 on other rows (2 to 3 points above one
threshold for all labels, 1 to 8 above no shrinkage); of calibrated logits it costs 1 point of micro F1."""


def choose_label_thresholds(logits: Floats, true: Bools) -> Floats | None:
    """Choose the minimum logit of each label on validation rows: [labels]; None if no row has a label.

    A label's threshold maximizes its F1, and is shrunk towards the threshold of the best micro F1 of all labels: a
    label with few rows gives a noisy estimate. A label without rows has the shared threshold.
    """
    shared = _find_best_f1_threshold(logits.ravel(), true.ravel())
    if shared is None:
        return None
    thresholds = np.full(logits.shape[1], shared)
    for label_index, (column, has_label) in enumerate(zip(logits.T, true.T, strict=True)):
        best = _find_best_f1_threshold(column, has_label)
        if best is not None:
            num_rows = has_label.sum()
            thresholds[label_index] = (num_rows * best + SHRINKAGE_ROWS * shared) / (num_rows + SHRINKAGE_ROWS)
    return thresholds


def _find_best_f1_threshold(logits: Floats, true: Bools) -> float | None:
    """The threshold of the highest F1, half-way to the next lower logit; None if no target is true. A NaN is above no
    threshold: its true label is always missed."""
    is_number, support = ~np.isnan(logits), true.sum()
    logits, true = logits[is_number], true[is_number]
    if not true.any():
        return None
    order = np.argsort(-logits, kind="stable")
    true_positives = np.cumsum(true[order])
    # F1 = 2 TP / (given + true) if the first n labels are given; cuts are possible only where the logit falls.
    f1 = 2 * true_positives / (np.arange(1, len(order) + 1) + support)
    falls = np.append(np.diff(logits[order]) < 0, True)
    last = int(np.argmax(np.where(falls, f1, -1.0)))
    lower = logits[order[last + 1]] if last + 1 < len(order) else logits[order[last]] - 1.0
    return float(logits[order[last]] + lower) / 2


# ------------------------------------------------------------------------------------------------------------- shared


def _encode_one_hot(labels: Ints, classes: int) -> Any:
    """(rows, classes), sparse; an empty row for a label that is no class."""
    from scipy.sparse import csr_array

    labeled_rows = np.flatnonzero(labels >= 0)
    return csr_array((np.ones(len(labeled_rows)), (labeled_rows, labels[labeled_rows])), shape=(len(labels), classes))


def _make_sum_metric(true: Any, predicted: Any, is_correct: Floats, name: str) -> SumMetric:
    """Each row adds TP, true and predicted per class, whether it is all right, and one; both sides are sparse."""
    from scipy.sparse import hstack

    columns = np.stack([is_correct, np.ones_like(is_correct)], axis=1)
    rows = hstack([true.multiply(predicted), true, predicted, columns], format="csr")
    classes = true.shape[1]

    def score(sums: Floats) -> dict[str, Floats]:
        true_positive_sums, support_sums, predicted_sums = (
            sums[..., part * classes : (part + 1) * classes] for part in range(3)
        )
        present = ((support_sums + predicted_sums) > 0).sum(axis=-1)
        scores = {name: ratio(sums[..., -2], sums[..., -1])}
        for kind, top, bottom in (
            ("precision", true_positive_sums, predicted_sums),
            ("recall", true_positive_sums, support_sums),
            ("f1", 2 * true_positive_sums, support_sums + predicted_sums),
        ):
            scores[f"macro_{kind}"] = ratio(ratio(top, bottom).sum(axis=-1), present)
            scores[f"micro_{kind}"] = ratio(top.sum(axis=-1), bottom.sum(axis=-1))
        return scores

    return SumMetric(rows, score)


BINS = 15


class ReliabilityBin(NamedTuple):
    """Rows with low < confidence <= high (the first bin has 0 too); the means are 0 in an empty bin."""

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


def softmax(logits: Any) -> Any:
    """Probabilities over the last axis, float64."""
    shifted = np.exp(logits - np.max(logits, axis=-1, keepdims=True), dtype=np.float64)
    return shifted / shifted.sum(axis=-1, keepdims=True)


def compute_reliability_bins(confidence: Floats, is_correct: Bools, bins: int = BINS) -> list[ReliabilityBin]:
    """Equal-width bins of confidence: the points of the reliability diagram (Niculescu-Mizil and Caruana 2005)."""
    count, confidence_sums, num_correct = _bin_rows(confidence, is_correct, bins)
    edges = np.linspace(0, 1, bins + 1)
    columns = zip(edges[:-1], edges[1:], count, ratio(confidence_sums, count), ratio(num_correct, count), strict=True)
    return [ReliabilityBin(float(a), float(b), int(n), float(c), float(d)) for a, b, n, c, d in columns]


def expected_calibration_error(confidence: Floats, is_correct: Bools, bins: int = BINS) -> float:
    """Sum over bins of the share of rows x |accuracy - mean confidence| (Guo et al. 2017)."""
    count, confidence_sums, num_correct = _bin_rows(confidence, is_correct, bins)
    return float(ratio(np.abs(num_correct - confidence_sums).sum(), count.sum()))


def _bin_rows(confidence: Floats, is_correct: Bools, bins: int) -> tuple[Floats, Floats, Floats]:
    """For each bin: rows, the sum of their confidence, and the number of correct rows. A table of rows and bins would
    not fit into memory if each label of each row, or each word of a text, has a confidence."""
    is_number = ~np.isnan(confidence)
    confidence, is_correct = confidence[is_number], is_correct[is_number]
    # A bin holds its upper edge: 1.0 falls into the last, not past it.
    bin_index = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    sums = (np.bincount(bin_index, weights, bins) for weights in (None, confidence, is_correct))
    count, confidence_sums, num_correct = (values.astype(np.float64) for values in sums)
    return count, confidence_sums, num_correct


# ------------------------------------------------------------------------------------------------------------- tables

MAX_CLASSES = 500
MAX_CONFUSION_CLASSES = 200
"""Most classes of a complete confusion matrix: 200 x 200 numbers."""
MAX_CONFUSED_PAIRS = 50


def build_class_table(
    probabilities: Floats, true: Ints, names: Sequence[str], predicted: Ints | None = None
) -> dict[str, Any]:
    """Scores of each class, confusion and calibration. `predicted`: the predicted class of each row, by default the
    most probable. A row with NaN probabilities has no prediction: it counts in the support of its class, and in no
    column of the confusion matrix."""
    predicted = predict_classes(probabilities) if predicted is None else predicted
    has_prediction = predicted >= 0
    counts = count_confusion(true[has_prediction], predicted[has_prediction], len(names))
    support = np.bincount(true[true >= 0], minlength=len(names))
    _, areas = compute_auc(true, probabilities)
    class_scores = list_class_scores(np.diag(counts[:-1]), support, counts.sum(axis=0))
    rows = [
        {"class": name, **scores._asdict(), "auc": None if area is None or np.isnan(area) else area}
        for name, scores, area in zip(names, class_scores, areas, strict=True)
    ]
    return {
        **sort_classes(rows),
        **build_confusion_table(counts, names),
        "calibration": build_calibration_table(probabilities.max(axis=1), probabilities.argmax(axis=1) == true),
    }


def sort_classes(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst F1 first; on ties, the more frequent class first. Classes that neither occur nor are predicted come
    last."""
    ordered = sorted(rows, key=lambda row: (not row["support"] + row["predicted"], row["f1"], -row["support"]))
    return {"classes": len(rows), "per_class": ordered[:MAX_CLASSES]}


def build_confusion_table(counts: Ints, names: Sequence[str]) -> dict[str, Any]:
    wrong = counts[:-1] - np.diag(np.diag(counts[:-1]))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSED_PAIRS]
    pairs = [divmod(int(index), len(names)) for index in order]
    table: dict[str, Any] = {
        "confused": [
            {"true": names[row], "predicted": names[column], "rows": int(wrong[row, column])}
            for row, column in pairs
            if wrong[row, column]
        ]
    }
    if len(names) <= MAX_CONFUSION_CLASSES:
        matrix = {"labels": list(names), "counts": counts[:-1].tolist(), "without_class": counts[-1].tolist()}
        table["confusion"] = matrix
    return table


def build_calibration_table(confidence: Floats, is_correct: Bools) -> dict[str, Any]:
    bins = compute_reliability_bins(confidence, is_correct)
    return {"ece": expected_calibration_error(confidence, is_correct), "bins": [part._asdict() for part in bins]}
