"""Check of a float graph against the PyTorch model that it was traced from, on real rows of every length.

Tracing records what Python did with one sample. Branches for other lengths and dynamic shapes are lost without a
warning, so the graph may answer wrongly on such rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Int32s, Ints
from rtrain.data.store.store import Store
from rtrain.evaluation.latency import BUCKETS, bucket_name
from rtrain.inference.predictor import Predictor

TOLERANCE = 1e-4
"""Largest allowed logit difference. Both compute in fp32 with different orders of summation: 1e-5 with MiniLM."""
ROWS_PER_BUCKET = 8
"""Rows per length bucket: one alone, the others in one batch."""
SPLIT = "train"


@dataclass(frozen=True)
class ExportCheck:
    max_difference: float
    """Largest logit difference."""
    bucket: str
    """Length bucket of the largest difference."""
    rows: int
    buckets: int


def check_export(graph: Predictor, network: Predictor, store: Store) -> ExportCheck:
    """Compare the logits of both. Raises `UserError` if a logit differs by more than `TOLERANCE` or is not finite."""
    differences, rows = {}, 0
    for name, positions in group_by_length(store.column(SPLIT, "length")):
        rows += len(positions)
        differences[name] = max(
            _max_difference(graph, network, store, part) for part in (positions[:1], positions[1:]) if len(part)
        )
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] > TOLERANCE:
        raise UserError(
            f"the exported graph differs from the PyTorch model: logits of training rows of {worst} differ "
            f"by {differences[worst]:.3g}, more than {TOLERANCE:g}, so the model was not quantized. Try another "
            "version of "
            "transformers, openvino or onnx",
            code="export_mismatch",
        )
    return ExportCheck(differences[worst], worst, rows, len(differences))


def group_by_length(lengths: Int32s, max_rows: int = ROWS_PER_BUCKET) -> Iterator[tuple[str, Ints]]:
    """Yield (bucket name, positions of at most `max_rows` rows, the shortest first) for each length bucket."""
    bucket_indices = np.searchsorted(BUCKETS, lengths)
    for bucket_index in np.unique(bucket_indices):
        rows = np.flatnonzero(bucket_indices == bucket_index)
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        yield bucket_name(int(lengths[rows[0]])), rows[spread_evenly(len(rows), max_rows)]


def spread_evenly(count: int, max_count: int) -> Ints:
    """At most `max_count` positions in [0, count), evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(max_count, count)).astype(np.int64))


def _max_difference(graph: Predictor, network: Predictor, store: Store, rows: Ints) -> float:
    """Largest logit difference of these rows in one batch; infinity if a logit is not finite."""
    tokens = network.task.prepare(store.read_tokens(SPLIT, rows), network.head, 0, 0)
    difference = float(np.abs(graph.run_tokens(tokens) - network.run_tokens(tokens)).max(initial=0.0))
    return difference if np.isfinite(difference) else float("inf")
