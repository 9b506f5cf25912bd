"""The drift baseline: distributions of inputs and answers on the validation rows, for `serve.observability.metrics`.

A row, of the validation split or of a request, has four features: its length in tokens, its share of unknown tokens,
the confidence of its answer, and its predicted labels. An artifact has a histogram of each, as JSON, and the score
below which the model should abstain (`choose_abstain_threshold`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import OUT_OF_SCOPE, EncodedRow, Head, Int32s, Ints, Outputs, RaggedArray, TokenBatch, collate
from rtrain.metrics.classification import softmax
from rtrain.tasks.base import Task

if TYPE_CHECKING:
    import tokenizers

    from rtrain.data.store.store import Store

BIN_EDGES: dict[str, tuple[float, ...]] = {
    "tokens": (
        *(4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512),
        *(768, 1024, 1536, 2048, 3072, 4096, 6144, 8191),
    ),
    "unknown": (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    "score": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
}
"""Upper edges of the bins, inclusive; a last bin has all larger values."""
SCORED_OUTPUTS = ("classes", "labels", "heads")
"""Kinds of output with one confidence per row, independent of a label."""
LABELED_OUTPUTS = ("classes", "labels")
"""Kinds of output whose answers are labels of the whole row."""
NO_LABEL = "none"
"""Placeholder for an answer without labels."""
BASELINE_VERSION = 2
"""Version of the histograms' meaning."""
MAX_ROWS = 20_000
"""Most validation rows; more would not improve the histograms."""
ABSTAIN_FACT = "abstain"
"""Name of the fact in an artifact."""
MIN_ANSWERED_SHARE = 0.95
"""Share of the right answers to validation rows whose score is at least `choose_abstain_threshold`."""


class DriftFeatures(NamedTuple):
    """Features of rows, one entry each. None where the model lacks the feature."""

    tokens: npt.NDArray[np.float64]
    unknown_share: npt.NDArray[np.float64] | None
    """The share of unknown pieces; None where the vocabulary has a piece for every byte."""
    score: npt.NDArray[np.float64] | None
    """Confidence of the answer, 0 to 1; NaN for a row without an answer. For classes the probability of the best one,
    rejected or not: out-of-scope input has low confidence for every class."""
    labels: list[list[str]] | None

    def numeric_features(self) -> dict[str, npt.NDArray[np.float64]]:
        """All but the labels, by name."""
        features = {"tokens": self.tokens, "unknown": self.unknown_share, "score": self.score}
        return {name: values for name, values in features.items() if values is not None}


def compute_request_features(
    task: Task, head: Head, outputs: Outputs, encoded: Sequence[EncodedRow], unknown_id: int | None
) -> DriftFeatures:
    """Compute the features of requests from their tokens and the model's outputs."""
    tokens = collate(encoded)
    row_results = task.row_results(outputs, tokens, head) if task.output in SCORED_OUTPUTS else None
    return _compute_features(task, head, row_results, tokens, unknown_id)


def _compute_features(
    task: Task, head: Head, row_results: RaggedArray | None, tokens: TokenBatch, unknown_id: int | None
) -> DriftFeatures:
    lengths, score, labels = tokens.row_lengths, None, None
    if row_results is not None and task.output in SCORED_OUTPUTS:
        # The values read from the report are independent of the labels, which are unknown for a request.
        placeholder_targets = task.build_targets(
            [task.placeholder_label("", head)] * len(tokens), RaggedArray.from_rows([], np.int32), head
        ).values
        row_reports = task.explain_rows(row_results, placeholder_targets, head)
        top_scores = (
            softmax(row_results.to_matrix(len(head.labels))).max(axis=1)
            if task.output == "classes"
            else row_reports.score
        )
        score = top_scores.astype(np.float64)
        if task.output in LABELED_OUTPUTS:
            labels = [
                [prediction] if isinstance(prediction, str) else list(prediction) or [NO_LABEL]
                for prediction in row_reports.prediction
            ]
    return DriftFeatures(lengths.astype(np.float64), _unknown_shares(tokens.ids, lengths, unknown_id), score, labels)


def build_split_baseline(
    task: Task, head: Head, store: "Store", row_results: RaggedArray, unknown_id: int | None, split: str = "valid"
) -> dict[str, Any]:
    """`build_baseline` for a split; `row_results` are those of its rows in index order."""
    rows = np.arange(min(len(row_results), MAX_ROWS))
    if task.packs_text or not len(rows):
        return {}
    tokens, targets = store.read_tokens(split, rows), store.targets(split, rows)
    return build_baseline(task, head, row_results.take(rows), tokens, targets, unknown_id)


def build_baseline(
    task: Task, head: Head, row_results: RaggedArray, tokens: TokenBatch, targets: RaggedArray, unknown_id: int | None
) -> dict[str, Any]:
    """Build the histograms of rows, for an artifact.

    Rows labeled as out of scope are excluded. Empty without remaining rows, or for blocks of text, which differ from
    requests.
    """
    rows = np.arange(len(row_results))
    if task.output == "classes" and len(rows):
        rows = rows[targets.values != OUT_OF_SCOPE]
    if task.packs_text or not len(rows):
        return {}
    features = _compute_features(task, head, row_results.take(rows), tokens.take(rows), unknown_id)
    document: dict[str, Any] = {"version": BASELINE_VERSION, "rows": len(rows)}
    for name, values in features.numeric_features().items():
        counts = np.bincount(
            assign_bins(values[~np.isnan(values)], BIN_EDGES[name]), minlength=len(BIN_EDGES[name]) + 1
        )
        document[name] = {"edges": list(BIN_EDGES[name]), "counts": counts.tolist()}
    if features.labels is not None:
        document["labels"] = dict(sorted(Counter(label for row in features.labels for label in row).items()))
    return document


def assign_bins(values: npt.NDArray[np.float64], edges: Sequence[float]) -> Ints:
    return np.searchsorted(np.asarray(edges, dtype=np.float64), values, side="left").astype(np.int64)


def choose_abstain_threshold(
    task: Task, head: Head, row_results: RaggedArray, targets: RaggedArray
) -> dict[str, float]:
    """Choose the fact `ABSTAIN_FACT` of a classifier: the score below which it should abstain.

    `MIN_ANSWERED_SHARE` of the right answers to the validation rows have at least this score. Empty for other tasks,
    and where out-of-scope rows have set a better threshold during training.
    """
    if task.output != "classes" or "threshold" in head.facts or not len(row_results):
        return {}
    row_reports = task.explain_rows(row_results, targets, head)
    is_correct = np.array(
        [prediction == target for prediction, target in zip(row_reports.prediction, row_reports.target, strict=True)]
    )
    if not is_correct.any():
        return {}
    threshold = float(np.quantile(row_reports.score[is_correct], 1 - MIN_ANSWERED_SHARE, method="lower"))
    # Rounded down: otherwise a model with score 1 for every row would abstain from all scores below 1.
    return {ABSTAIN_FACT: math.floor(threshold * 1e4) / 1e4}


def find_unknown_id(tokenizer: "tokenizers.Tokenizer") -> int | None:
    """Return the id of the unknown token; None without one."""
    unknown_tokens = (getattr(tokenizer.model, "unk_token", None), "<unk>", "[UNK]")  # Unigram does not say which it is
    token_ids = (tokenizer.token_to_id(piece) for piece in unknown_tokens if piece is not None)
    return next((number for number in token_ids if number is not None), None)


def _unknown_shares(ids: Int32s, lengths: Int32s, unknown_id: int | None) -> npt.NDArray[np.float64] | None:
    if unknown_id is None:
        return None
    ends = np.cumsum(lengths, dtype=np.int64)
    unknown_counts = np.concatenate([[0], np.cumsum(ids == unknown_id, dtype=np.int64)])
    shares: npt.NDArray[np.float64] = (unknown_counts[ends] - unknown_counts[ends - lengths]) / np.maximum(1, lengths)
    return shares
