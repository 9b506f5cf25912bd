"""Metrics as sums that add up over batches and workers; chosen by the kind of output, not by the task."""

from typing import Protocol

import numpy as np

from rtrain.tasks.base import Floats, Ints


class Metric(Protocol):
    state: Ints
    """Sums; those of several workers are added element by element."""
    headline: str
    """Name of the score by which models are compared; larger is better."""

    def add(self, logits: Floats, targets: Ints) -> None: ...

    def scores(self) -> dict[str, float]: ...


class Confusion:
    """Counts [true, predicted]. A target of -1 (a label without a class) is counted as wrong for every class."""

    headline = "accuracy"

    def __init__(self, classes: int):
        self.state: Ints = np.zeros((classes + 1, classes), dtype=np.int64)

    def add(self, logits: Floats, targets: Ints) -> None:
        np.add.at(self.state, (targets, logits.argmax(axis=1)), 1)

    def scores(self) -> dict[str, float]:
        counts = self.state[:-1]
        right, rows = np.diag(counts), int(self.state.sum())
        # F1 = 2 TP / (true + predicted); a class that neither occurs nor is predicted is left out of the mean.
        support, predicted = counts.sum(axis=1), self.state.sum(axis=0)
        present = (support + predicted) > 0
        f1 = 2 * right[present] / (support + predicted)[present]
        return {
            "accuracy": float(right.sum() / rows) if rows else 0.0,
            "macro_f1": float(f1.mean()) if present.any() else 0.0,
            "rows": rows,
        }


def metric_for(output: str, classes: int) -> Metric:
    return {"classes": Confusion}[output](classes)
