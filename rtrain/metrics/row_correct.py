"""Which rows are answered rightly, by the kind of output: the whole answer of a row, not a part of it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import IGNORE_INDEX, OUT_OF_SCOPE, Head, RaggedArray
from rtrain.metrics import tables
from rtrain.metrics.classification import predict_classes

Bools = npt.NDArray[np.bool_]


def mark_correct_classes(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """The class, or that the row is outside of all classes."""
    probabilities, true = tables.class_probabilities(row_results, head), targets.values.astype(np.int64)
    threshold = float(head.facts.get("threshold", 0.0)) if "out_of_scope_label" in head.facts else 0.0
    is_correct: Bools = (
        np.where(probabilities.max(axis=1, initial=0.0) < threshold, OUT_OF_SCOPE, predict_classes(probabilities))
        == true
    )
    return is_correct


def mark_correct_labels(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """Exactly the true labels are given."""
    true, predicted = tables.predict_labels(row_results, targets, head)
    is_correct: Bools = (true == predicted).all(axis=1)
    return is_correct


def mark_correct_heads(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """All heads for which the row has a label are right."""
    is_correct = np.ones(len(row_results), dtype=np.bool_)
    for _, _, logits, true in tables.iter_heads(row_results, targets, head):
        is_correct &= (true == IGNORE_INDEX) | (predict_classes(logits) == true)
    return is_correct


def mark_correct_tags(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """The tag of every word."""
    pairs: Any = zip(*tables.collect_tags(row_results, targets), strict=True)
    return np.fromiter(
        (bool((true == predicted).all()) for true, predicted in pairs), dtype=np.bool_, count=len(row_results)
    )


def mark_correct_spans(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """The tokens equal the first gold answer, or no answer is given to an unanswerable question."""
    is_correct: Bools = tables.score_spans(row_results, head)[1] > 0
    return is_correct
