"""Operating points: the threshold of one label's score, chosen on validation rows for a recall or a precision.

A head keeps them as the fact `classes.OPERATING_POINTS`, a list in the order of the settings: {"label", "recall" or
"precision": the requested value, "threshold", "is_reached"}. `classes.decide_classes` applies them; the thresholds of
several labels per row are in the fact `thresholds` too.

The requested recall holds for new rows, not only for the validation rows: with n validation rows of the label, its k-th
highest score, k = ceil(recall (n + 1)), is at most the score of a new row of the label with at least this probability,
if the rows are exchangeable (Papadopoulos et al. 2002, "Inductive confidence machines for regression"). A precision
counts one more wrong row above the threshold likewise.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rtrain.core.errors import Problem
from rtrain.core.ragged import IGNORE_INDEX, Head, RaggedArray
from rtrain.metrics import bootstrap, classes
from rtrain.metrics.bootstrap import Bools, Floats, SumMetric, ratio
from rtrain.metrics.classification import softmax

LABEL_OUTPUTS = ("classes", "labels", "heads")
"""Kinds of output whose labels have scores of their own."""
ALPHA = 0.05
"""1 minus the confidence of an interval."""


class LabelRows(NamedTuple):
    """One label in the rows that have a target for it, [rows] each."""

    scores: Floats
    """Probability of the label; -infinity for NaN."""
    is_true: Bools
    is_predicted: Bools

    def score(self, name: str) -> float:
        """The recall or the precision of the predictions."""
        total = self.is_true if name == "recall" else self.is_predicted
        return float(ratio((self.is_true & self.is_predicted).sum(), total.sum()))

    def score_at(self, name: str, fixed_value: float) -> float:
        """The highest recall over all thresholds with a precision of `fixed_value` or more, or the reverse."""
        order = np.argsort(-self.scores, kind="stable")
        true_positives, ordered = np.cumsum(self.is_true[order]), self.scores[order]
        is_cut = np.append(ordered[1:] < ordered[:-1], True)
        sides = {
            "precision": ratio(true_positives, np.arange(1, len(order) + 1)),
            "recall": ratio(true_positives, self.is_true.sum()),
        }
        fixed = sides["precision" if name == "recall" else "recall"]
        return float(sides[name][is_cut & (fixed >= fixed_value)].max(initial=0.0)) if len(order) else 0.0


def list_labels(output: str, head: Head) -> list[str]:
    """The labels as settings name them: `HEAD/LABEL` with several heads; empty for outputs without labels of rows."""
    if output == "heads":
        return [f"{name}/{label}" for name, labels, _ in classes.iter_heads(head) for label in labels]
    return list(head.labels) if output in LABEL_OUTPUTS else []


def find_label_problem(field: str, label: str, labels: Sequence[str]) -> Problem | None:
    """The problem of a setting that names none of `labels`, with the labels that it may name."""
    if label in labels:
        return None
    if not labels:
        return Problem(field, label, "the rows of this task have no labels", "leave it out", code="unsupported")
    matches = difflib.get_close_matches(label, labels, n=1, cutoff=0.5)
    more_text = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
    fix = f"did you mean {matches[0]}?" if matches else f"write one of: {', '.join(labels[:20])}{more_text}"
    return Problem(field, label, "no training row has this label", fix, code="unknown_label")


def select_label(output: str, row_results: RaggedArray, targets: RaggedArray, head: Head, label: str) -> LabelRows:
    """The scores of a label of `list_labels`, its true and its predicted rows."""
    column = list_labels(output, head).index(label)
    logits = row_results.to_matrix(len(head.labels))
    if output == "labels":
        has_label, gets_label = classes.predict_labels(row_results, targets, head)
        scores, is_true, is_predicted = classes.sigmoid(logits[:, column]), has_label[:, column], gets_label[:, column]
    else:
        name, labels, columns, indices = "", list(head.labels), slice(None), targets.values.astype(np.int64)
        if output == "heads":
            heads = list(classes.iter_heads(head))
            position = next(place for place, (_, _, part) in enumerate(heads) if part.start <= column < part.stop)
            name, labels, columns = heads[position]
            column, indices = column - columns.start, targets.to_matrix(len(heads))[:, position].astype(np.int64)
        rows = np.flatnonzero(indices != IGNORE_INDEX)
        logits, indices = logits[rows, columns], indices[rows]
        predicted = classes.decide_classes(logits, labels, head, name)
        scores, is_true, is_predicted = softmax(logits)[:, column], indices == column, predicted == column
    return LabelRows(np.where(np.isnan(scores), -np.inf, scores), is_true, is_predicted)


def choose_threshold(rows: LabelRows, name: str, value: float) -> tuple[float, bool]:
    """The threshold of the score for a recall or a precision (`name`) of `value`, and whether the rows reach it.

    Of the thresholds for a recall the highest, of those for a precision the lowest. It is half-way to the next lower
    score. Where none reaches the value: the lowest score of the label's rows, or the highest precision.
    """
    order = np.argsort(-rows.scores, kind="stable")
    order = order[np.isfinite(rows.scores[order])]
    ordered, num_true = rows.scores[order], int(rows.is_true.sum())
    true_positives, counts = np.cumsum(rows.is_true[order]), np.arange(1, len(order) + 1)
    if not len(order) or not true_positives[-1]:
        return 1.0, False
    if name == "recall":
        needed = math.ceil(value * (num_true + 1) - 1e-9)
        is_reached = needed <= true_positives[-1]
        cut = int(np.searchsorted(true_positives, min(needed, true_positives[-1])))
    else:
        is_cut = np.append(ordered[1:] < ordered[:-1], True)
        estimates = np.where(is_cut, ratio(true_positives, counts + 1), -1.0)
        reaching = np.flatnonzero(estimates >= value - 1e-9)
        is_reached = len(reaching) > 0
        cut = int(reaching[-1]) if is_reached else int(estimates.argmax())
    upper, below = float(ordered[cut]), ordered[ordered < ordered[cut]]
    middle = (upper + (float(below[0]) if len(below) else 0.0)) / 2
    return (middle if len(below) == 0 or middle > below[0] else upper), bool(is_reached)


def choose_operating_points(
    output: str, row_results: RaggedArray, targets: RaggedArray, head: Head, points: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The facts of a head with `points` chosen on validation rows. A point has `label` and `recall` or `precision`,
    and may have the values of an earlier choice."""
    point_facts, decided_rows, thresholds = list[dict[str, Any]](), dict[str, Bools](), dict[str, float]()
    for point in points:
        label, name = point["label"], "recall" if point.get("recall") is not None else "precision"
        rows = select_label(output, row_results, targets, head, label)
        # An earlier point of the same head decides first; labels of a multi-label row exclude none.
        group = label.partition("/")[0] if output == "heads" else ""
        is_decided = decided_rows.get(group, np.zeros(len(rows.scores), dtype=np.bool_))
        if output != "labels":
            rows = rows._replace(scores=np.where(is_decided, -np.inf, rows.scores))
        thresholds[label], is_reached = choose_threshold(rows, name, point[name])
        decided_rows[group] = is_decided | (rows.scores >= thresholds[label])
        point_facts.append(
            {"label": label, name: point[name], "threshold": thresholds[label], "is_reached": is_reached}
        )
    facts: dict[str, Any] = {classes.OPERATING_POINTS: point_facts}
    if output == "labels":
        facts["thresholds"] = {**head.facts.get("thresholds", {}), **thresholds}
    return facts


def measure_operating_points(
    output: str, row_results: RaggedArray, targets: RaggedArray, head: Head
) -> list[dict[str, Any]]:
    """The points of the head on the rows of a split, as JSON: the fact's keys, the `rows` of the label, the rows
    `predicted` as it, `recall`, `precision`, their bootstrap `intervals`, and the `exact_interval` of the requested one
    (`requested`, `requested_value`)."""
    measured = []
    for point in head.facts.get(classes.OPERATING_POINTS, ()):
        rows = select_label(output, row_results, targets, head, point["label"])
        name = "recall" if "recall" in point else "precision"
        columns = np.stack([rows.is_true & rows.is_predicted, rows.is_true, rows.is_predicted], axis=1)
        sums = SumMetric(
            columns.astype(np.float64),
            lambda sums: {"recall": ratio(sums[..., 0], sums[..., 1]), "precision": ratio(sums[..., 0], sums[..., 2])},
        )
        intervals = bootstrap.compute_intervals(sums) if len(columns) else {}
        num_right, num_true, num_predicted = columns.sum(axis=0).tolist()
        measured.append(
            {
                "label": point["label"],
                "requested": name,
                "requested_value": point[name],
                "threshold": point["threshold"],
                "is_reached": point["is_reached"],
                "rows": num_true,
                "predicted": num_predicted,
                "recall": rows.score("recall"),
                "precision": rows.score("precision"),
                "intervals": {key: [interval.low, interval.high] for key, interval in intervals.items()},
                "exact_interval": exact_interval(num_right, num_true if name == "recall" else num_predicted),
            }
        )
    return measured


def exact_interval(successes: int, trials: int) -> list[float]:
    """The exact 95 % interval of a share (Clopper and Pearson 1934)."""
    from scipy.special import betaincinv

    low = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, ALPHA / 2))
    high = 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, 1 - ALPHA / 2))
    return [low, high]


def format_operating_point(point: Mapping[str, Any], split: str) -> str:
    """Format an entry of `measure_operating_points`; on validation rows, with a statement whether they are enough."""
    name, value, (low, high) = point["requested"], point["requested_value"], point["exact_interval"]
    text = (
        f"{point['label']} from a score of {point['threshold']:.4g}: recall {point['recall']:.3f}, precision "
        f"{point['precision']:.3f} on {point['rows']:,} {split} rows of it"
    )
    text += f" ({name} {value:g} requested; exact 95 % interval {low:.3f} to {high:.3f})"
    if not point["is_reached"]:
        reason = f"no threshold gives this {name}, with room for new rows, on the validation rows"
        if name == "recall" and value < 1:
            reason += f"; that takes {math.ceil(value / (1 - value) - 1e-9):,} or more of them with the label"
        return f"{text}: NOT REACHED, {reason}"
    return f"{text}: too few rows to promise it" if low < value else text
