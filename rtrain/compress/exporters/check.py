"""A float graph beside the PyTorch model that it was traced from, on real rows of every length.

Tracing keeps what Python did with one sample: a branch that another length takes, or a shape that was a number then, is
lost without a word. All that is made of the graph would answer otherwise on such rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Int32s, Ints
from rtrain.data.store.store import Store
from rtrain.evaluation.latency import BUCKETS, bucket
from rtrain.inference.predictor import Predictor

TOLERANCE = 1e-4
"""Most that a logit may differ. Both compute in fp32, and add in other orders: of MiniLM, logits differ by 1e-5."""
ROWS = 8
"""Rows of each bucket of lengths: one alone, the others in one batch."""
SPLIT = "train"


@dataclass(frozen=True)
class Checked:
    largest: float
    """The largest difference of a logit."""
    bucket: str
    """Where it is."""
    rows: int
    buckets: int


def check(graph: Predictor, network: Predictor, store: Store) -> Checked:
    """Raises `UserError` where a logit differs by more than `TOLERANCE`, or is no number."""
    differences, rows = {}, 0
    for name, positions in of_every_length(store.column(SPLIT, "length")):
        rows += len(positions)
        differences[name] = max(
            _difference(graph, network, store, part) for part in (positions[:1], positions[1:]) if len(part)
        )
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] > TOLERANCE:
        raise UserError(
            f"the exported graph does not answer as the PyTorch model does: logits of training rows of {worst} differ "
            f"by {differences[worst]:.3g} (at most {TOLERANCE:g}), so nothing was quantized. Another version of "
            "transformers, openvino or onnx may trace the model as it is",
            code="other_answers",
        )
    return Checked(differences[worst], worst, rows, len(differences))


def of_every_length(lengths: Int32s, most: int = ROWS) -> Iterator[tuple[str, Ints]]:
    """(name of a bucket of lengths, positions of at most `most` of its rows, from its shortest to its longest)"""
    places = np.searchsorted(BUCKETS, lengths)
    for place in np.unique(places):
        rows = np.flatnonzero(places == place)
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        yield bucket(int(lengths[rows[0]])), rows[evenly(len(rows), most)]


def evenly(of: int, most: int) -> Ints:
    """At most so many places of a list of `of` rows, evenly spread over it."""
    return np.unique(np.linspace(0, of - 1, min(most, of)).astype(np.int64))


def _difference(graph: Predictor, network: Predictor, store: Store, rows: Ints) -> float:
    """The largest difference of these rows' logits, asked in one batch; endless where one is no number."""
    tokens = network.task.prepare(store.read(SPLIT, rows), network.head, 0, 0)
    found = float(np.abs(graph.run_tokens(tokens) - network.run_tokens(tokens)).max(initial=0.0))
    return found if np.isfinite(found) else float("inf")
