"""Drift: distance of the last requests from the validation rows, as the population stability index of each histogram.

An index up to 0.1 is small by convention, and 0.25 or more is large. Its expectation by chance is (bins - 1) x (1 /
window + 1 / validation rows), so both sides need enough rows. Labels raise no alarm: a new mix of questions is not
unknown input. Their distance is reported.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.inference import drift_baseline
from rtrain.inference.drift_baseline import DriftFeatures

ALARM_FEATURES = ("tokens", "unknown", "score")
"""Histograms that can raise the alarm."""
ALARM_DISTANCE = 0.25
MIN_ROWS = 200
"""Rows of the window, and validation rows, below which there is no alarm."""
WINDOW_ROWS = 1000
"""Rows over which distances are measured."""
MIN_BIN_ROWS = 0.5
"""Rows of a bin, where there are fewer: an empty one would be endlessly far."""


class DriftDetector:
    """Compares the last rows with an artifact's reference."""

    def __init__(self, document: Mapping[str, Any]):
        """`document`: what `rtrain.inference.drift_baseline.build_split_baseline` has made."""
        self._counts = {name: np.array(document[name]["counts"]) for name in ALARM_FEATURES if name in document}
        self._edges = {name: document[name]["edges"] for name in self._counts}
        self._labels: Mapping[str, int] = document.get("labels", {})
        self._bins: dict[str, deque[int]] = {name: deque(maxlen=WINDOW_ROWS) for name in self._counts}
        self._recent_labels: deque[list[str]] = deque(maxlen=WINDOW_ROWS)
        self.rows = 0

    def observe(self, features: DriftFeatures) -> None:
        """Rows of requests, in their order."""
        for name, values in features.numeric_features().items():
            if name in self._counts:
                self._bins[name].extend(
                    drift_baseline.assign_bins(values[~np.isnan(values)], self._edges[name]).tolist()
                )
        if features.labels is not None and self._labels:
            self._recent_labels.extend(features.labels)
        self.rows += len(features.tokens)

    def distances(self) -> dict[str, float]:
        """The index of each histogram over the last `WINDOW_ROWS` rows."""
        distances = {
            name: stability_index(counts, np.bincount(self._bins[name], minlength=len(counts)))
            for name, counts in self._counts.items()
            if self._bins[name]
        }
        if self._recent_labels:
            recent_counts = Counter(label for row in self._recent_labels for label in row)
            names = sorted({*self._labels, *recent_counts})
            label_counts = [np.array([side.get(name, 0) for name in names]) for side in (self._labels, recent_counts)]
            distances["labels"] = stability_index(*label_counts)
        return distances

    def has_alarm(self, distances: Mapping[str, float]) -> bool:
        """Whether one of these distances, but that of labels, is large and rests on enough rows."""
        return any(
            distances.get(name, 0.0) >= ALARM_DISTANCE and min(len(self._bins[name]), int(counts.sum())) >= MIN_ROWS
            for name, counts in self._counts.items()
        )


def stability_index(reference_counts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> float:
    """Sum over bins of (q - p) ln(q / p)."""
    sides = (np.maximum(side, MIN_BIN_ROWS) for side in (reference_counts, counts))
    p, q = (side / side.sum() for side in sides)
    return float(((q - p) * np.log(q / p)).sum())
