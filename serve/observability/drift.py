"""How far the last requests are from the validation rows: the population stability index of each histogram.

By its custom an index up to 0.1 is nothing, and from 0.25 on much. It is (bins - 1) x (1 / window + 1 / validation
rows) by chance alone, so that it needs some rows on both sides. Labels raise no alarm: that a month brings other
questions is no unknown input. Their distance is given.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.inference import drift_baseline
from rtrain.inference.drift_baseline import Features

FEATURES = ("tokens", "unknown", "score")
"""The histograms by which there is an alarm."""
ALARM_DISTANCE = 0.25
MIN_ROWS = 200
"""Rows of the window, and validation rows, below which there is no alarm."""
WINDOW = 1000
"""Rows over which distances are measured."""
MIN_BIN_ROWS = 0.5
"""Rows of a bin, where there are fewer: an empty one would be endlessly far."""


class Drift:
    """Compares the last rows with an artefact's reference."""

    def __init__(self, document: Mapping[str, Any]):
        """`document`: what `rtrain.inference.drift_baseline.measure` has made."""
        self._counts = {name: np.array(document[name]["counts"]) for name in FEATURES if name in document}
        self._edges = {name: document[name]["edges"] for name in self._counts}
        self._labels: Mapping[str, int] = document.get("labels", {})
        self._places: dict[str, deque[int]] = {name: deque(maxlen=WINDOW) for name in self._counts}
        self._named: deque[list[str]] = deque(maxlen=WINDOW)
        self.rows = 0

    def observe(self, features: Features) -> None:
        """Rows of requests, in their order."""
        for name, values in features.numbers().items():
            if name in self._counts:
                self._places[name].extend(drift_baseline.place(values[~np.isnan(values)], self._edges[name]).tolist())
        if features.labels is not None and self._labels:
            self._named.extend(features.labels)
        self.rows += len(features.tokens)

    def distances(self) -> dict[str, float]:
        """The index of each histogram over the last `WINDOW` rows."""
        distances = {
            name: stability_index(counts, np.bincount(self._places[name], minlength=len(counts)))
            for name, counts in self._counts.items()
            if self._places[name]
        }
        if self._named:
            seen = Counter(label for row in self._named for label in row)
            names = sorted({*self._labels, *seen})
            both = [np.array([side.get(name, 0) for name in names]) for side in (self._labels, seen)]
            distances["labels"] = stability_index(*both)
        return distances

    def is_alarming(self, distances: Mapping[str, float]) -> bool:
        """Whether one of these distances, but that of labels, is large and rests on enough rows."""
        return any(
            distances.get(name, 0.0) >= ALARM_DISTANCE and min(len(self._places[name]), int(counts.sum())) >= MIN_ROWS
            for name, counts in self._counts.items()
        )


def stability_index(reference_counts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> float:
    """Sum over bins of (q - p) ln(q / p)."""
    sides = (np.maximum(side, MIN_BIN_ROWS) for side in (reference_counts, counts))
    p, q = (side / side.sum() for side in sides)
    return float(((q - p) * np.log(q / p)).sum())
