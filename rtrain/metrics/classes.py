"""Outputs `classes`, `labels` and `heads`: scores, tables and right answers of rows with labels.

A row result has the row's logits, one for each label of the head. A row's target is the number of its class (-1 for an
unknown class, `OUT_OF_SCOPE`), a 0 or 1 for each label, or the number of its class in each head (`IGNORE_INDEX` if the
row lacks that head's label).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import IGNORE_INDEX, OUT_OF_SCOPE, Head, RaggedArray
from rtrain.metrics import classification
from rtrain.metrics.bootstrap import Bools, Floats, Ints, SumMetric, combine_metrics, ratio
from rtrain.metrics.classification import build_calibration_table, build_class_table, predict_classes, softmax

MACRO_SCORES = ("macro_precision", "macro_recall", "macro_f1")
ACCURACY_WITH_ABSTENTIONS = "accuracy_with_abstentions"
"""Accuracy over all rows, out-of-scope rows included; the model may abstain."""


OPERATING_POINTS = "operating_points"
"""Fact of a head: thresholds of single labels (`rtrain.metrics.operating_points`)."""

# ------------------------------------------------------------------------------------------------------------- classes


def abstain_threshold(head: Head) -> float:
    """The confidence below which a text is out of scope; 0 (never) without an `out_of_scope_label`."""
    return float(head.facts.get("threshold", 0.0)) if "out_of_scope_label" in head.facts else 0.0


def class_probabilities(row_results: RaggedArray, head: Head) -> Floats:
    """Probabilities [rows, classes] of rows with a single label."""
    probabilities: Floats = softmax(row_results.to_matrix(len(head.labels)))
    return probabilities


def decide_classes(logits: Any, labels: Sequence[str], head: Head, head_name: str = "") -> Ints:
    """The class of each row by its logits [rows, labels], of the head `head_name` where there are several: the first
    operating point whose label has a score of at least its threshold; else the label with the highest score among those
    without a point. `NO_CLASS` for a row with a NaN."""
    best = predict_classes(logits)
    prefix = f"{head_name}/" if head_name else ""
    names = {f"{prefix}{label}": column for column, label in enumerate(labels)}
    points = [point for point in head.facts.get(OPERATING_POINTS, ()) if point["label"] in names]
    if not points:
        return best
    probabilities, columns = softmax(logits), [names[point["label"]] for point in points]
    other_columns = np.setdiff1d(np.arange(len(labels)), columns)
    decided = other_columns[probabilities[:, other_columns].argmax(axis=1)] if len(other_columns) else best
    for point, column in reversed(list(zip(points, columns, strict=True))):
        decided = np.where(probabilities[:, column] >= point["threshold"], column, decided)
    return np.where(np.isnan(probabilities).any(axis=1), best, decided)


def make_classes_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Accuracy and macro precision, recall and F1. A target of -1 (a label without a class) is wrong for every class.

    With an out-of-scope label, these are scores of the in-scope rows without abstentions. With a threshold, scores of
    detecting out-of-scope rows and the accuracy with abstentions are added.
    """
    true = targets.values.astype(np.int64)
    logits = row_results.to_matrix(len(head.labels))
    predicted = decide_classes(logits, head.labels, head)
    class_metric = classification.make_sum_metric(true, predicted, len(head.labels))
    class_metric = _select_scores(class_metric, ("accuracy", *MACRO_SCORES))
    if "out_of_scope_label" not in head.facts:
        return class_metric
    is_out_of_scope = true == OUT_OF_SCOPE
    in_scope_metric = _zero_rows(class_metric, is_out_of_scope)
    if "threshold" not in head.facts:
        return in_scope_metric
    is_abstained = class_probabilities(row_results, head).max(axis=1) < head.facts["threshold"]
    is_correct = np.where(is_out_of_scope, is_abstained, (predicted == true) & ~is_abstained)
    columns = (
        *(is_abstained & is_out_of_scope, is_abstained, is_out_of_scope),
        *(~is_abstained & ~is_out_of_scope, ~is_out_of_scope, is_correct, np.ones_like(is_correct)),
    )
    detection = np.stack(columns, axis=1).astype(np.float64)
    return combine_metrics(in_scope_metric, SumMetric(detection, _compute_out_of_scope_scores))


def _compute_out_of_scope_scores(sums: Floats) -> dict[str, Floats]:
    true_positives, num_abstained, out_of_scope, kept_in_scope, in_scope, num_correct, rows = np.moveaxis(sums, -1, 0)
    return {
        "out_of_scope_precision": ratio(true_positives, num_abstained),
        "out_of_scope_recall": ratio(true_positives, out_of_scope),
        "out_of_scope_f1": ratio(2 * true_positives, num_abstained + out_of_scope),
        "in_scope_recall": ratio(kept_in_scope, in_scope),
        ACCURACY_WITH_ABSTENTIONS: ratio(num_correct, rows),
    }


def compute_extra_class_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, float]:
    """One-vs-rest AUC, where a class has rows and others have too, and the expected calibration error; the AUC of
    detecting out-of-scope rows by the probability of the best class."""
    probabilities, true = class_probabilities(row_results, head), targets.values.astype(np.int64)
    is_out_of_scope = true == OUT_OF_SCOPE
    in_scope, in_scope_true = probabilities[~is_out_of_scope], true[~is_out_of_scope]
    ece = classification.expected_calibration_error(in_scope.max(axis=1), in_scope.argmax(axis=1) == in_scope_true)
    area, _ = classification.compute_auc(in_scope_true, in_scope)
    confidence = probabilities.max(axis=1)[:, None] * np.array([1.0, -1.0])
    out_of_scope_auc, _ = classification.compute_auc(is_out_of_scope.astype(np.int64), confidence)
    scores = {"auc": area, "ece": ece, "out_of_scope_auc": out_of_scope_auc}
    return {name: score for name, score in scores.items() if score is not None}


def build_class_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    probabilities, true = class_probabilities(row_results, head), targets.values.astype(np.int64)
    if "out_of_scope_label" not in head.facts:
        predicted = decide_classes(row_results.to_matrix(len(head.labels)), head.labels, head)
        return build_class_table(probabilities, true, head.labels, predicted)
    # Out of scope is one more class; its probability is 1 minus the best class's.
    confidence, out_of_scope_index = probabilities.max(axis=1), len(head.labels)
    is_abstained = confidence < head.facts.get("threshold", 0.0)
    is_out_of_scope = true == OUT_OF_SCOPE
    is_correct = probabilities.argmax(axis=1) == true
    return {
        **build_class_table(
            np.concatenate([probabilities, 1 - confidence[:, None]], axis=1),
            np.where(is_out_of_scope, out_of_scope_index, true),
            (*head.labels, head.facts["out_of_scope_label"]),
            np.where(is_abstained, out_of_scope_index, predict_classes(probabilities)),
        ),
        "threshold": head.facts.get("threshold"),
        "calibration": build_calibration_table(confidence[~is_out_of_scope], is_correct[~is_out_of_scope]),
    }


def mark_correct_classes(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """The class, or that the row is out of scope."""
    probabilities = class_probabilities(row_results, head)
    is_abstained = probabilities.max(axis=1, initial=0.0) < abstain_threshold(head)
    decided = decide_classes(row_results.to_matrix(len(head.labels)), head.labels, head)
    predicted = np.where(is_abstained, OUT_OF_SCOPE, decided)
    is_correct: Bools = predicted == targets.values.astype(np.int64)
    return is_correct


# -------------------------------------------------------------------------------------------------------------- labels


def sigmoid(logits: Any) -> Any:
    """Probabilities, float64."""
    return 1 / (1 + np.exp(-np.clip(np.asarray(logits, dtype=np.float64), -700, 700)))


def label_thresholds(head: Head) -> Floats:
    """Minimum probability of each label, [labels]; 0.5 by default."""
    thresholds = head.facts.get("thresholds", {})
    return np.array([thresholds.get(label, 0.5) for label in head.labels], dtype=np.float64)


def predict_labels(row_results: RaggedArray, targets: RaggedArray, head: Head) -> tuple[Bools, Bools]:
    """True and predicted labels, [rows, labels] each. A NaN logit is always a wrong answer."""
    size, thresholds = len(head.labels), label_thresholds(head)
    true, logits = targets.to_matrix(size) > 0, row_results.to_matrix(size)
    with np.errstate(divide="ignore"):  # thresholds of 0 and 1
        logit_thresholds = np.log(thresholds) - np.log1p(-thresholds)
    return true, np.where(np.isnan(logits), ~true, logits >= logit_thresholds)


def make_labels_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Micro and macro precision, recall and F1 of labels given or not, and the share of rows with all labels right.

    A label is predicted if its probability is at least its threshold (default 0.5).
    """
    label_metric = classification.make_multilabel_metric(*predict_labels(row_results, targets, head))
    names = ("micro_f1", "micro_precision", "micro_recall", "macro_f1", "macro_precision", "macro_recall")
    return _select_scores(label_metric, (*names, "subset_accuracy"))


def compute_extra_label_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, float]:
    """Mean average precision, if a label has rows; it needs no threshold. It is undefined for NaN logits."""
    size = len(head.labels)
    if np.isnan(row_results.values).any():
        return {}
    average_precision = classification.mean_average_precision(targets.to_matrix(size) > 0, row_results.to_matrix(size))
    return {} if average_precision is None else {"mean_average_precision": average_precision}


def build_label_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    true, predicted = predict_labels(row_results, targets, head)
    probabilities = sigmoid(row_results.to_matrix(len(head.labels)))
    class_scores = classification.list_class_scores(
        (true & predicted).sum(axis=0), true.sum(axis=0), predicted.sum(axis=0)
    )
    rows = [
        {"class": name, **scores._asdict(), "threshold": threshold}
        for name, scores, threshold in zip(head.labels, class_scores, label_thresholds(head).tolist(), strict=True)
    ]
    confidence = np.maximum(probabilities, 1 - probabilities)
    return {
        **classification.sort_classes(rows),
        "calibration": build_calibration_table(confidence.ravel(), ((probabilities >= 0.5) == true).ravel()),
    }


def mark_correct_labels(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """Exactly the true labels are given."""
    true, predicted = predict_labels(row_results, targets, head)
    is_correct: Bools = (true == predicted).all(axis=1)
    return is_correct


# --------------------------------------------------------------------------------------------------------------- heads


def iter_heads(head: Head) -> Iterator[tuple[str, list[str], slice]]:
    """(name, labels, columns among the outputs) of each head."""
    start = 0
    for name, size in head.facts["heads"]:
        head_labels = [label.removeprefix(f"{name}=") for label in head.labels[start : start + size]]
        yield name, head_labels, slice(start, start + size)
        start += size


def _iter_head_results(
    row_results: RaggedArray, targets: RaggedArray, head: Head
) -> Iterator[tuple[str, list[str], Floats, Ints]]:
    """(name, labels, logits [rows, labels], targets) of each head."""
    logits, true = row_results.to_matrix(len(head.labels)), targets.to_matrix(len(head.facts["heads"])).astype(np.int64)
    for (name, head_labels, columns), head_targets in zip(iter_heads(head), true.T, strict=True):
        yield name, head_labels, logits[:, columns], head_targets


def make_heads_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Accuracy and macro F1 of each head, over the rows that have its label, and the mean accuracy of the heads that
    have a labeled row."""
    parts, names, presence = [], [], []
    for name, head_labels, logits, true in _iter_head_results(row_results, targets, head):
        predicted = decide_classes(logits, head_labels, head, name)
        part = classification.make_sum_metric(np.maximum(true, -1), predicted, len(head_labels))
        part = _zero_rows(part, true == IGNORE_INDEX)
        parts.append(_select_scores(part, ("accuracy", "macro_f1"), f"{name}_"))
        names.append(f"{name}_accuracy")
        presence.append(true != IGNORE_INDEX)
    return add_mean_score(combine_metrics(*parts), "mean_accuracy", names, np.stack(presence, axis=1))


def build_head_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    tables_by_head = {}
    for name, head_labels, logits, true in _iter_head_results(row_results, targets, head):
        rows = np.flatnonzero(true != IGNORE_INDEX)
        predicted = decide_classes(logits[rows], head_labels, head, name)
        class_table = build_class_table(softmax(logits[rows]), true[rows], head_labels, predicted)
        tables_by_head[name] = {"rows": len(rows), **class_table}
    return {"heads": tables_by_head}


def mark_correct_heads(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """All heads for which the row has a label are right."""
    is_correct = np.ones(len(row_results), dtype=np.bool_)
    for name, head_labels, logits, true in _iter_head_results(row_results, targets, head):
        is_correct &= (true == IGNORE_INDEX) | (decide_classes(logits, head_labels, head, name) == true)
    return is_correct


# -------------------------------------------------------------------------------------------------------------- shared


def add_mean_score(metric: SumMetric, mean_name: str, names: Sequence[str], present: npt.ArrayLike) -> SumMetric:
    """`metric`, and before its scores the mean of those in `names` that have rows; `present` says, [rows, names], which
    rows count for which."""
    counts = SumMetric(np.asarray(present, dtype=np.float64), lambda sums: {})
    num_scores = len(names)

    def score(sums: Floats) -> dict[str, Floats]:
        scores, has_rows = metric.score(sums[..., :-num_scores]), sums[..., -num_scores:] > 0
        values = np.stack([scores[name] for name in names], axis=-1)
        return {mean_name: ratio((values * has_rows).sum(axis=-1), has_rows.sum(axis=-1)), **scores}

    return SumMetric(combine_metrics(metric, counts).rows, score)


def _select_scores(sum_metric: SumMetric, names: tuple[str, ...], prefix: str = "") -> SumMetric:
    """Only the scores in `names`, each with `prefix` before its name."""

    def score(sums: Floats) -> dict[str, Floats]:
        scores = sum_metric.score(sums)
        return {prefix + name: scores[name] for name in names}

    return SumMetric(sum_metric.rows, score)


def _zero_rows(sum_metric: SumMetric, excluded: Bools) -> SumMetric:
    """The metric with summands of 0 for the excluded rows."""
    return SumMetric(sum_metric.rows.multiply((~excluded).astype(np.float64)[:, None]).tocsr(), sum_metric.score)
