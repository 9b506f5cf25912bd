"""Which rows are answered rightly, by the kind of output: the whole answer of a row, not a part of it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import IGNORED, OUTSIDE, Head, Ragged
from rtrain.metrics import tables
from rtrain.metrics.classification import best

Bools = npt.NDArray[np.bool_]


def classes(outcomes: Ragged, targets: Ragged, head: Head) -> Bools:
    """The class, or that the row is outside of all classes."""
    chances, true = tables.chances_of(outcomes, head), targets.values.astype(np.int64)
    least = float(head.facts.get("threshold", 0.0)) if "outside" in head.facts else 0.0
    right: Bools = np.where(chances.max(axis=1, initial=0.0) < least, OUTSIDE, best(chances)) == true
    return right


def labels(outcomes: Ragged, targets: Ragged, head: Head) -> Bools:
    """Every label that applies, and no other."""
    true, given = tables.labels_given(outcomes, targets, head)
    right: Bools = (true == given).all(axis=1)
    return right


def heads(outcomes: Ragged, targets: Ragged, head: Head) -> Bools:
    """The label of every head of which the row has one."""
    right = np.ones(len(outcomes), dtype=np.bool_)
    for _, _, logits, true in tables.of_heads(outcomes, targets, head):
        right &= (true == IGNORED) | (best(logits) == true)
    return right


def tags(outcomes: Ragged, targets: Ragged, head: Head) -> Bools:
    """The tag of every word."""
    pairs: Any = zip(*tables.tags_of(outcomes, targets), strict=True)
    return np.fromiter((bool((true == found).all()) for true, found in pairs), dtype=np.bool_, count=len(outcomes))


def spans(outcomes: Ragged, targets: Ragged, head: Head) -> Bools:
    """The tokens of the first right answer, or none where there is none."""
    right: Bools = tables.answers_of(outcomes, head)[1] > 0
    return right
