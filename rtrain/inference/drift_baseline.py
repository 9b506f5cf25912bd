"""What a model's input and answers looked like on the validation rows; `serve.observability.drift` compares.

Four things are known of a row, the same of a validation row and of a request: its length in tokens, the share of its
tokens that are unknown pieces, how sure the model is of its answer, and the labels that it got. An artefact has a
histogram of each, as JSON, and the score below which its answers are no answers (`abstain_below`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import OUTSIDE, Encoded, Head, Int32s, Ints, Outputs, Ragged, Tokens, pack
from rtrain.metrics.calibration import softmax
from rtrain.tasks.base import Task

if TYPE_CHECKING:
    import tokenizers

    from rtrain.data.store.store import Store

EDGES: dict[str, tuple[float, ...]] = {
    "tokens": (
        *(4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512),
        *(768, 1024, 1536, 2048, 3072, 4096, 6144, 8191),
    ),
    "unknown": (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    "score": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
}
"""Upper edges of the bins, which hold them; a last bin has all above."""
SCORED = ("classes", "labels", "heads")
"""Kinds of output of which one number says how sure the model is of a row, with or without a label at hand."""
NAMED = ("classes", "labels")
"""Kinds of output whose answers are labels of the whole row."""
NONE = "none"
"""In place of a label where there is none."""
VERSION = 2
"""Counts up when the histograms come to mean something else."""
MOST_ROWS = 20_000
"""More validation rows would not make the histograms better."""
ABSTAIN = "abstain"
"""Name of the fact in an artefact."""
KEPT_ANSWERS = 0.95
"""Share of the right answers to validation rows whose score is at least `abstain_below`."""


class Features(NamedTuple):
    """What is looked at of rows, one entry each. None where the model has no such thing."""

    tokens: npt.NDArray[np.float64]
    unknown: npt.NDArray[np.float64] | None
    """The share of unknown pieces; None where the vocabulary has a piece for every byte."""
    score: npt.NDArray[np.float64] | None
    """How sure the model is of its answer, 0 to 1; NaN of a row without an answer. Classes have the chance of the
    best one, refused or not: unknown input is what no class is sure of."""
    labels: list[list[str]] | None

    def numbers(self) -> dict[str, npt.NDArray[np.float64]]:
        """All but the labels, by name."""
        found = {"tokens": self.tokens, "unknown": self.unknown, "score": self.score}
        return {name: values for name, values in found.items() if values is not None}


def of_answers(
    task: Task, head: Head, outputs: Outputs, encoded: Sequence[Encoded], unknown_id: int | None
) -> Features:
    """Features of requests, from their tokens and the model's outputs."""
    tokens = pack(encoded)
    outcomes = task.outcomes(outputs, tokens, head) if task.output in SCORED else None
    return _features(task, head, outcomes, tokens, unknown_id)


def _features(task: Task, head: Head, outcomes: Ragged | None, tokens: Tokens, unknown_id: int | None) -> Features:
    lengths, score, labels = tokens.lengths_of_rows, None, None
    if outcomes is not None and task.output in SCORED:
        # What is read of the description does not depend on the labels, which nobody knows of a request.
        known = task.targets([task.stand_in("", head)] * len(tokens), Ragged.of([], np.int32), head).values
        described = task.describe(outcomes, known, head)
        best = softmax(outcomes.matrix(len(head.labels))).max(axis=1) if task.output == "classes" else described.score
        score = best.astype(np.float64)
        if task.output in NAMED:
            labels = [[one] if isinstance(one, str) else list(one) or [NONE] for one in described.prediction]
    return Features(lengths.astype(np.float64), _shares(tokens.ids, lengths, unknown_id), score, labels)


def measure(
    task: Task, head: Head, store: "Store", outcomes: Ragged, unknown_id: int | None, split: str = "valid"
) -> dict[str, Any]:
    """`of_rows` for a split; `outcomes` are those of its rows in index order."""
    rows = np.arange(min(len(outcomes), MOST_ROWS))
    if task.packs or not len(rows):
        return {}
    tokens, targets = store.read(split, rows), store.targets(split, rows)
    return of_rows(task, head, outcomes.take(rows), tokens, targets, unknown_id)


def of_rows(
    task: Task, head: Head, outcomes: Ragged, tokens: Tokens, targets: Ragged, unknown_id: int | None
) -> dict[str, Any]:
    """The histograms of rows, for an artefact.

    Rows that are labelled as outside of all classes are left out. Empty where too few rows are left to say anything, or
    where they are not what requests are: blocks of text.
    """
    rows = np.arange(len(outcomes))
    if task.output == "classes" and len(rows):
        rows = rows[targets.values != OUTSIDE]
    if task.packs or not len(rows):
        return {}
    found = _features(task, head, outcomes.take(rows), tokens.pick(rows), unknown_id)
    document: dict[str, Any] = {"version": VERSION, "rows": len(rows)}
    for name, values in found.numbers().items():
        counts = np.bincount(place(values[~np.isnan(values)], EDGES[name]), minlength=len(EDGES[name]) + 1)
        document[name] = {"edges": list(EDGES[name]), "counts": counts.tolist()}
    if found.labels is not None:
        document["labels"] = dict(sorted(Counter(label for row in found.labels for label in row).items()))
    return document


def place(values: npt.NDArray[np.float64], edges: Sequence[float]) -> Ints:
    """The bin of each value."""
    return np.searchsorted(np.asarray(edges, dtype=np.float64), values, side="left").astype(np.int64)


def abstain_below(task: Task, head: Head, outcomes: Ragged, targets: Ragged) -> dict[str, float]:
    """The fact `ABSTAIN` of a classifier: the score below which its answer is better not given.

    `KEPT_ANSWERS` of the right answers to the validation rows are at least as sure. Empty for other tasks, and where
    rows outside of all classes have shown a better one: those thresholds are chosen when the model is trained.
    """
    if task.output != "classes" or "threshold" in head.facts or not len(outcomes):
        return {}
    described = task.describe(outcomes, targets, head)
    right = np.array([one == other for one, other in zip(described.prediction, described.target, strict=True)])
    if not right.any():
        return {}
    least = float(np.quantile(described.score[right], 1 - KEPT_ANSWERS, method="lower"))
    # Never up: a model that is sure of every row would abstain from all below 1.
    return {ABSTAIN: math.floor(least * 1e4) / 1e4}


def unknown_id(tokenizer: "tokenizers.Tokenizer") -> int | None:
    """The number of the piece that stands for what the vocabulary lacks; None where there is no such piece."""
    named = (getattr(tokenizer.model, "unk_token", None), "<unk>", "[UNK]")  # Unigram does not say which it is
    found = (tokenizer.token_to_id(piece) for piece in named if piece is not None)
    return next((number for number in found if number is not None), None)


def _shares(ids: Int32s, lengths: Int32s, unknown_id: int | None) -> npt.NDArray[np.float64] | None:
    if unknown_id is None:
        return None
    ends = np.cumsum(lengths, dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(ids == unknown_id, dtype=np.int64)])
    found: npt.NDArray[np.float64] = (before[ends] - before[ends - lengths]) / np.maximum(1, lengths)
    return found
