"""Metrics over the whole of a split, in float64; chosen by the kind of output, not by the task.

Pure functions of every row's outcome and targets, in the same order on every worker: what is not a sum over rows (an
area under a curve, a correlation) needs no other care than what is.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rtrain.metrics import entities
from rtrain.metrics.additive import ratio
from rtrain.tasks.base import Head
from rtrain.tasks.batch import IGNORED, Ragged

Scores = dict[str, float]


class Metric(NamedTuple):
    headline: str
    """Name of the score by which models are compared; larger is better."""
    scores: Callable[[Ragged, Ragged, Head], Scores]
    """(outcomes, targets, head) -> scores, `rows` among them."""


def metric_for(output: str) -> Metric:
    return METRICS[output]


def classes(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Accuracy and macro F1. A target of -1 (a label without a class) is counted as wrong for every class."""
    counts = confusion(outcomes.matrix(len(head.labels)), targets.values.astype(np.int64))
    right, rows = np.diag(counts[:-1]), int(counts.sum())
    # F1 = 2 TP / (true + predicted); a class that neither occurs nor is predicted is left out of the mean.
    support, predicted = counts[:-1].sum(axis=1), counts.sum(axis=0)
    present = (support + predicted) > 0
    f1 = 2 * right[present] / (support + predicted)[present]
    return {
        "accuracy": float(right.sum() / rows) if rows else 0.0,
        "macro_f1": float(f1.mean()) if present.any() else 0.0,
        "rows": rows,
    }


def labels(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Micro and macro precision, recall and F1 of labels given or not, and the share of rows with all labels right.

    A chance of the head's threshold or more gives a label (0.5 where none was chosen).
    """
    size, rows = len(head.labels), len(outcomes)
    true = targets.matrix(size) > 0
    chance = float(head.facts.get("threshold", 0.5))
    given = outcomes.matrix(size) >= np.log(chance / (1 - chance))
    right, support, found = ((part.sum(axis=0)) for part in (true & given, true, given))
    present = (support + found) > 0
    each = ratio(2 * right, support + found)
    return {
        "micro_f1": float(ratio(2 * right.sum(), (support + found).sum())),
        "macro_f1": float(each[present].mean()) if present.any() else 0.0,
        "precision": float(ratio(right.sum(), found.sum())),
        "recall": float(ratio(right.sum(), support.sum())),
        "subset_accuracy": float((true == given).all(axis=1).mean()) if rows else 0.0,
        "rows": rows,
    }


def heads(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Accuracy and macro F1 of each head, over the rows that have its label, and the mean of the accuracies."""
    logits, true = outcomes.matrix(len(head.labels)), targets.matrix(len(head.facts["heads"])).astype(np.int64)
    scores: Scores = {}
    start = 0
    for place, (name, size) in enumerate(head.facts["heads"]):
        rows = true[:, place] != IGNORED
        own = Head(head.labels[start : start + size])
        found = classes(Ragged.even(logits[rows, start : start + size]), Ragged.even(true[rows, place]), own)
        scores |= {f"{name}_accuracy": found["accuracy"], f"{name}_macro_f1": found["macro_f1"]}
        start += size
    mean = float(np.mean([scores[f"{name}_accuracy"] for name, _ in head.facts["heads"]]))
    return {"mean_accuracy": mean, **scores, "rows": len(outcomes)}


def confusion(logits: Any, targets: Any) -> Any:
    """Counts [true, predicted]; the last line is of rows without a class (-1)."""
    counts = np.zeros((logits.shape[1] + 1, logits.shape[1]), dtype=np.int64)
    if len(logits):
        np.add.at(counts, (targets, logits.argmax(axis=1)), 1)
    return counts


def number(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Errors in the targets' own unit; Pearson's r; and, where the training scores are steps of a scale, quadratic
    weighted kappa of predictions rounded to that scale.

    The headline is the negative RMSE: it is defined for any targets and predictions, also for the constant ones of a
    model that has learned nothing yet, and sees a wrong scale or offset, to which a correlation is blind.
    """
    found, true = outcomes.values.astype(np.float64), targets.values.astype(np.float64)
    if not len(found):
        return {"neg_rmse": 0.0, "rmse": 0.0, "mae": 0.0, "r2": 0.0, "pearson": 0.0, "rows": 0}
    error, spread = found - true, true - true.mean()
    rmse = float(np.sqrt((error**2).mean()))
    scores = {"neg_rmse": -rmse, "rmse": rmse, "mae": float(np.abs(error).mean())}
    variance = float((spread**2).sum())
    scores["r2"] = 1 - float((error**2).sum()) / variance if variance else 0.0
    moved = found - found.mean()
    scale = float(np.sqrt((moved**2).sum() * variance))
    scores["pearson"] = float((moved * spread).sum()) / scale if scale else 0.0
    if step := head.facts.get("step"):
        low, high = head.facts["lowest"], head.facts["highest"]
        right, answered = (np.rint((np.clip(part, low, high) - low) / step).astype(np.int64) for part in (true, found))
        scores["qwk"] = kappa(right, answered, round((high - low) / step) + 1)
    return {**scores, "rows": len(found)}


def kappa(true: Any, found: Any, size: int) -> float:
    """Cohen's kappa with quadratic weights, of places on a scale of `size` steps; 0 where nothing can disagree."""
    counts = np.zeros((size, size))
    np.add.at(counts, (true, found), 1)
    weights = np.subtract.outer(np.arange(size), np.arange(size)) ** 2
    chance = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    expected = float((weights * chance).sum())
    return 1 - float((weights * counts).sum()) / expected if expected else 0.0


def tags(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Precision, recall and F1 of whole entities (type, start and end right), and the share of words that are."""
    true = [row[row != IGNORED] for row in targets]
    found = [row.reshape(-1, 3)[:, 0] for row in outcomes]
    named = [
        [[head.labels[int(place)] if place >= 0 else "O" for place in row] for row in side] for side in (true, found)
    ]
    right = sum(int((one == other).sum()) for one, other in zip(true, found, strict=True))
    words = sum(map(len, true))
    return {**entities.scores(*named), "word_accuracy": right / words if words else 0.0, "rows": len(true)}


def spans(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Exact match and F1 of the answers' tokens, 0 to 1: an answer is given where its margin over none is above the
    head's threshold. (`rtrain evaluate` gives SQuAD's own scores, which are of the texts.)"""
    rows = outcomes.matrix(7)
    if not len(rows):
        return {"f1": 0.0, "exact_match": 0.0, "answered": 0.0, "rows": 0}
    least = float(head.facts.get("threshold", 0.0 if head.facts.get("no_answer") else -np.inf))
    given, there = rows[:, 2] > least, rows[:, 3] > 0
    silent = ~given & ~there
    scores = {
        "f1": float(np.where(given & there, rows[:, 0], silent).mean()),
        "exact_match": float(np.where(given & there, rows[:, 1], silent).mean()),
        "answered": float(given.mean()),
    }
    return {**scores, "rows": len(rows)}


def tokens(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Perplexity and accuracy of masked tokens, over all of them: rows weigh by their tokens."""
    guessed, right, losses = outcomes.matrix(3).sum(axis=0)
    mean = float(ratio(losses, guessed))
    scores = {"neg_loss": -mean, "perplexity": float(np.exp(mean)), "masked_accuracy": float(ratio(right, guessed))}
    return {**scores, "rows": len(outcomes)}


METRICS: Mapping[str, Metric] = {
    "classes": Metric("accuracy", classes),
    "labels": Metric("micro_f1", labels),
    "heads": Metric("mean_accuracy", heads),
    "number": Metric("neg_rmse", number),
    "tags": Metric("f1", tags),
    "spans": Metric("f1", spans),
    "tokens": Metric("neg_loss", tokens),
}
