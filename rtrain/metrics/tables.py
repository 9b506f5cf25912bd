"""Results that are not single numbers: scores of each class, the confusion matrix, calibration. Plain JSON, bounded.

classes   per_class: [{class, precision, recall, f1, auc, support, predicted}, ...], worst F1 first, at most
          `MAX_CLASSES` of `classes`; confusion: {labels, counts [true][predicted], without_class: how often each was
          predicted for a row that has no class} up to `MAX_CONFUSION_CLASSES` classes; with `data.out_of_scope_label`
          that label is a class too, and threshold the confidence below which it is predicted; confused: the
          `MAX_CONFUSED_PAIRS` most frequent mistakes [{true, predicted, rows}, ...]; calibration: {ece, bins: [{low,
          high, rows, confidence, accuracy}, ...]}
labels    per_class (with the threshold of each label, without auc), classes, calibration of each label's binary
          decision
heads     heads: {head: as for classes, over the rows with a label of that head}
number    residuals: {edges, rows}, a histogram of predicted - true in `RESIDUAL_BINS` bins; scale: confusion on the
          scale of the training scores if they are on one
tags      per_class by type of entity, classes, calibration of the words' tags; words_without_tokens, if any: each is
          answered O
summary   positions: {tenths: 10, oracle, picked}, how many sentences of each tenth of their documents the oracle and
          the model select; calibration of each sentence's binary decision; lengths: {budget: words, over_budget:
          longer summaries, document, picked, oracle: {sentences, words}, each a mean over the documents};
          compared_with_lead: {better, same, worse}: summaries by their ROUGE against the lead sentences'
spans     by_length: [{low, high, rows, f1, exact_match}, ...], over the answerable questions, by tokens of the
          answer; if some are unanswerable: no_answer: {rows, unanswered_share: the share of them left unanswered,
          threshold, curve: [{threshold, f1, exact_match, answered}, ...] of at most `MAX_CURVE_POINTS` + 1 points,
          falling thresholds}
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rtrain.core.ragged import IGNORE_INDEX, OUT_OF_SCOPE, Head, RaggedArray
from rtrain.metrics import calibration, classification, entities, regression, summary_rows
from rtrain.metrics.calibration import softmax
from rtrain.metrics.rouge import BLEU_COUNTS, ROUGE_NAMES
from rtrain.metrics.sums import Bools, Floats, Ints

MAX_CLASSES = 500
MAX_CONFUSION_CLASSES = 200
"""Most classes of a complete confusion matrix: 200 x 200 numbers."""
MAX_CONFUSED_PAIRS = 50
RESIDUAL_BINS = 30
TENTHS = 10
"""Parts of a document with equally many sentences."""
ROUGE_TOLERANCE = 1e-9
"""Differences of two summaries' ROUGE up to this are rounding errors."""
MAX_CURVE_POINTS = 100
ANSWER_LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 10, 15, 25)
"""Lower bounds of the groups of answer lengths."""


def build_class_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    probabilities, true = class_probabilities(row_results, head), targets.values.astype(np.int64)
    if "out_of_scope_label" not in head.facts:
        return _build_class_table(probabilities, true, head.labels)
    # Out of scope is one more class; its probability is 1 minus the best class's.
    confidence, out_of_scope_index = probabilities.max(axis=1), len(head.labels)
    is_abstained = confidence < head.facts.get("threshold", 0.0)
    is_out_of_scope, wide = true == OUT_OF_SCOPE, np.concatenate([probabilities, 1 - confidence[:, None]], axis=1)
    predicted = np.where(is_abstained, out_of_scope_index, classification.predict_classes(probabilities))
    return {
        **_build_class_table(
            wide,
            np.where(is_out_of_scope, out_of_scope_index, true),
            (*head.labels, head.facts["out_of_scope_label"]),
            predicted,
        ),
        "threshold": head.facts.get("threshold"),
        "calibration": _build_calibration_table(
            confidence[~is_out_of_scope], (probabilities.argmax(axis=1) == true)[~is_out_of_scope]
        ),
    }


def build_label_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    true, predicted = predict_labels(row_results, targets, head)
    probabilities = _sigmoid(row_results.to_matrix(len(head.labels)))
    rows = []
    for name, has_label, is_predicted, threshold in zip(
        head.labels, true.T, predicted.T, label_thresholds(head).tolist(), strict=True
    ):
        class_scores = classification.compute_class_scores(
            classification.count_confusion(has_label.astype(np.int64), is_predicted.astype(np.int64), 2)
        )[1]
        rows.append({"class": name, **class_scores._asdict(), "threshold": threshold})
    confidence = np.maximum(probabilities, 1 - probabilities).ravel()
    return {
        **_sort_classes(rows),
        "calibration": _build_calibration_table(confidence, ((probabilities >= 0.5) == true).ravel()),
    }


def build_head_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    tables_by_head = {}
    for name, head_labels, logits, true in iter_heads(row_results, targets, head):
        rows = np.flatnonzero(true != IGNORE_INDEX)
        tables_by_head[name] = {"rows": len(rows), **_build_class_table(softmax(logits[rows]), true[rows], head_labels)}
    return {"heads": tables_by_head}


def build_number_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    predicted, true = row_results.values.astype(np.float64), targets.values.astype(np.float64)
    if not len(predicted):
        return {}
    counts, edges = np.histogram(predicted - true, bins=RESIDUAL_BINS)
    tables: dict[str, Any] = {"residuals": {"edges": edges.tolist(), "rows": counts.tolist()}}
    if step := head.facts.get("step"):
        low, high = head.facts["lowest"], head.facts["highest"]
        true_grades, predicted_grades = (regression.to_ratings(side, low, high, step) for side in (true, predicted))
        names = [f"{low + index * step:g}" for index in range(round((high - low) / step) + 1)]
        tables["scale"] = _build_confusion_table(
            classification.count_confusion(true_grades, predicted_grades, len(names)), names
        )
    return tables


def build_tag_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    true, predicted = collect_tags(row_results, targets)
    each = entities.compute_type_scores(to_tag_names(true, head), to_tag_names(predicted, head))
    rows = [{"class": name, **scores._asdict()} for name, scores in each.items()]
    confidence = row_results.values.reshape(-1, 3)[:, 1]
    is_correct = np.concatenate(
        [tags == predicted_tags for tags, predicted_tags in zip(true, predicted, strict=True)]
        or [np.empty(0, np.bool_)]
    )
    begins = np.cumsum([0, *map(len, true)])
    missing_by_row = [begin + entities.decode_true_tags(row)[1] for begin, row in zip(begins, targets, strict=False)]
    missing_positions = np.concatenate([*missing_by_row, np.empty(0, np.int64)])
    missing = {"words_without_tokens": len(missing_positions)} if len(missing_positions) else {}
    # The model has not read these words, and has no confidence in them.
    return {
        **_sort_classes(rows),
        "calibration": _build_calibration_table(
            np.delete(confidence, missing_positions), np.delete(is_correct, missing_positions)
        ),
        **missing,
    }


def build_summary_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    in_oracle, picked, probabilities, tenths = collect_sentences(row_results, targets)
    rows = {"oracle": tenths[in_oracle], "picked": tenths[picked]}
    is_correct = (probabilities >= 0.5) == in_oracle
    is_read = probabilities >= 0
    return {
        "positions": {
            "tenths": TENTHS,
            **{name: np.bincount(tenth_numbers, minlength=TENTHS).tolist() for name, tenth_numbers in rows.items()},
        },
        "calibration": _build_calibration_table(
            np.maximum(probabilities, 1 - probabilities)[is_read], is_correct[is_read]
        ),
        **_build_summary_lengths(row_results, targets, head),
    }


def _build_summary_lengths(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    if not len(row_results):
        return {}
    budget, sums, over = int(head.facts["max_words"]), np.zeros((3, 2)), 0
    for row, row_targets in zip(row_results, targets, strict=True):
        sentences, (_, is_picked) = summary_rows.decode_sentences(row_targets), summary_rows.decode_result(row)
        selections = (np.ones_like(is_picked), is_picked, sentences.in_oracle)
        sums += [[int(mask.sum()), int(sentences.words[mask].sum())] for mask in selections]
        over += int(sentences.words[is_picked].sum()) > budget
    means = [{"sentences": float(a), "words": float(b)} for a, b in sums / len(row_results)]
    size, second = len(ROUGE_NAMES), len(ROUGE_NAMES) + BLEU_COUNTS
    gained = np.array([row[:size].mean() - row[second : second + size].mean() for row in row_results])
    sides = {
        "better": gained > ROUGE_TOLERANCE,
        "same": np.abs(gained) <= ROUGE_TOLERANCE,
        "worse": gained < -ROUGE_TOLERANCE,
    }
    return {
        "lengths": {
            "budget": budget,
            "over_budget": over,
            **dict(zip(("document", "picked", "oracle"), means, strict=True)),
        },
        "compared_with_lead": {name: int(rows.sum()) for name, rows in sides.items()},
    }


def build_span_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    rows = row_results.to_matrix(7)
    f1, exact, is_answered, has_answer = score_spans(row_results, head)
    # The answer's tokens in the first window that holds it; 0 if no window holds all of it.
    lengths = np.zeros(len(rows), dtype=np.int64)
    for row, windows in enumerate(targets):
        positions = windows.reshape(-1, 2).astype(np.int64)
        lengths[row] = next((last - first + 1 for first, last in positions.tolist() if last > 0), 0)
    tables: dict[str, Any] = {"by_length": []}
    group = np.searchsorted(ANSWER_LENGTH_EDGES, lengths, side="right")
    for number in np.unique(group[has_answer & (lengths > 0)]).tolist():
        inside = has_answer & (group == number)
        group_lengths = lengths[inside]
        means = {"f1": float(f1[inside].mean()), "exact_match": float(exact[inside].mean())}
        tables["by_length"].append(
            {"low": int(group_lengths.min()), "high": int(group_lengths.max()), "rows": int(inside.sum()), **means}
        )
    if head.facts.get("no_answer") and not np.isnan(rows[:, 2]).all():
        unanswered_share = float(np.mean(~is_answered[~has_answer])) if (~has_answer).any() else None
        curve = _build_no_answer_curve(rows[:, 0], rows[:, 1], rows[:, 2], has_answer)
        tables["no_answer"] = {
            "rows": int((~has_answer).sum()),
            "unanswered_share": unanswered_share,
            "threshold": answer_margin_threshold(head),
            **curve,
        }
    return tables


def _build_no_answer_curve(f1: Floats, exact: Floats, margin: Floats, has_answer: Bools) -> dict[str, Any]:
    """Scores at falling thresholds: from no answer at all to an answer for every question."""
    # A NaN margin counts as an answer at each threshold, and is wrong.
    is_number, num_rows = ~np.isnan(margin), len(margin)
    f1, exact, margin, has_answer = f1[is_number], exact[is_number], margin[is_number], has_answer[is_number]
    order = np.argsort(-margin, kind="stable")
    sums = [
        np.concatenate([[0.0], np.cumsum((np.where(has_answer, part, 0.0) - ~has_answer)[order])]) + (~has_answer).sum()
        for part in (f1, exact)
    ]
    falling = margin[order]
    # Rows of one margin are answered together: a threshold lies only where the margin falls.
    ends = np.concatenate([[0], np.flatnonzero(np.diff(falling) < 0) + 1, [len(margin)]])
    if len(ends) > MAX_CURVE_POINTS:
        ends = ends[np.unique(np.linspace(0, len(ends) - 1, MAX_CURVE_POINTS).round().astype(np.int64))]
    edges = np.concatenate([[falling[0] + 1], falling, [falling[-1] - 1]])
    points = [
        {
            "threshold": float(edges[end] + edges[end + 1]) / 2,
            "f1": float(sums[0][end]) / num_rows,
            "exact_match": float(sums[1][end]) / num_rows,
            "answered": float(end + num_rows - len(margin)) / num_rows,
        }
        for end in ends.tolist()
    ]
    return {"curve": points}


# -------------------------------------------------------------------------------------- reading row results and targets


def class_probabilities(row_results: RaggedArray, head: Head) -> Floats:
    """Probabilities [rows, classes] of rows with a single label."""
    probabilities: Floats = softmax(row_results.to_matrix(len(head.labels)))
    return probabilities


def compute_ece(probabilities: Floats, true: Ints) -> float:
    return calibration.expected_calibration_error(probabilities.max(axis=1), probabilities.argmax(axis=1) == true)


def label_thresholds(head: Head) -> Floats:
    """Minimum probability of each label, [labels]; 0.5 by default."""
    thresholds = head.facts.get("thresholds", {})
    return np.array([thresholds.get(label, 0.5) for label in head.labels], dtype=np.float64)


def predict_labels(row_results: RaggedArray, targets: RaggedArray, head: Head) -> tuple[Bools, Bools]:
    """True and predicted labels, [rows, labels] each. A NaN logit is always a wrong answer."""
    size, thresholds = len(head.labels), label_thresholds(head)
    true, logits = targets.to_matrix(size) > 0, row_results.to_matrix(size)
    with np.errstate(divide="ignore"):  # thresholds of 0 and 1
        logit_thresholds = np.log(thresholds) - np.log1p(-thresholds)
    return true, np.where(np.isnan(logits), ~true, logits >= logit_thresholds)


def iter_heads(
    row_results: RaggedArray, targets: RaggedArray, head: Head
) -> Iterator[tuple[str, tuple[str, ...], Floats, Ints]]:
    """(name, labels, logits [rows, labels], targets; `IGNORE_INDEX` if a row lacks the label) of each head."""
    logits, true = row_results.to_matrix(len(head.labels)), targets.to_matrix(len(head.facts["heads"])).astype(np.int64)
    start = 0
    for head_index, (name, size) in enumerate(head.facts["heads"]):
        head_labels = tuple(label.removeprefix(f"{name}=") for label in head.labels[start : start + size])
        yield name, head_labels, logits[:, start : start + size], true[:, head_index]
        start += size


def answer_margin_threshold(head: Head) -> float | None:
    """Margin over no answer above which an answer is given; None if every question has an answer."""
    return float(head.facts.get("threshold", 0.0)) if head.facts.get("no_answer") else None


def score_spans(row_results: RaggedArray, head: Head) -> tuple[Floats, Floats, Bools, Bools]:
    """For each question: F1, exact match, whether an answer is given, whether it has a gold answer. No answer to an
    unanswerable question scores 1."""
    rows, min_margin = row_results.to_matrix(7), answer_margin_threshold(head)
    is_answered = ~(rows[:, 2] <= (-np.inf if min_margin is None else min_margin))  # NaN included: it is a wrong answer
    has_answer = rows[:, 3] > 0
    f1, exact = (np.where(is_answered & has_answer, rows[:, column], ~is_answered & ~has_answer) for column in (0, 1))
    return f1.astype(np.float64), exact.astype(np.float64), is_answered, has_answer


def collect_tags(row_results: RaggedArray, targets: RaggedArray) -> tuple[list[Any], list[Any]]:
    """For each row the true and the predicted tag numbers of its words."""
    return [entities.decode_true_tags(row)[0] for row in targets], [row.reshape(-1, 3)[:, 0] for row in row_results]


def to_tag_names(rows: Sequence[Any], head: Head) -> list[list[str]]:
    """Tags by number. A tag that the head lacks (-1) is shown as O: no prediction of it can be right."""
    return [[head.labels[int(tag_id)] if tag_id >= 0 else "O" for tag_id in row] for row in rows]


def collect_sentences(row_results: RaggedArray, targets: RaggedArray) -> tuple[Bools, Bools, Floats, Ints]:
    """For each sentence of all rows: in the oracle; in the summary; its probability; its tenth of the document."""
    rows = [
        (summary_rows.decode_sentences(row_targets).in_oracle, *summary_rows.decode_result(row))
        for row, row_targets in zip(row_results, targets, strict=True)
    ]
    tenths = [np.arange(len(in_oracle)) * TENTHS // max(1, len(in_oracle)) for in_oracle, _, _ in rows]
    return (
        np.concatenate([in_oracle for in_oracle, _, _ in rows] or [np.empty(0, np.bool_)]),
        np.concatenate([is_picked for _, _, is_picked in rows] or [np.empty(0, np.bool_)]),
        np.concatenate([chances for _, chances, _ in rows] or [np.empty(0)]),
        np.concatenate(tenths or [np.empty(0, np.int64)]),
    )


# -------------------------------------------------------------------------------------------------------------- shared


def _build_class_table(
    probabilities: Floats, true: Ints, names: Sequence[str], predicted: Ints | None = None
) -> dict[str, Any]:
    """`predicted`: the predicted class of each row, by default the most probable. A row with NaN probabilities has no
    prediction: it counts in the support of its class, and in no column of the confusion matrix."""
    predicted = classification.predict_classes(probabilities) if predicted is None else predicted
    has_prediction = predicted >= 0
    counts = classification.count_confusion(true[has_prediction], predicted[has_prediction], len(names))
    num_missed = np.bincount(true[~has_prediction & (true >= 0)], minlength=len(names))
    _, class_areas = classification.compute_auc(true, probabilities)
    areas = [None if area is None or np.isnan(area) else area for area in class_areas]
    each = zip(names, classification.compute_class_scores(counts, num_missed), areas, strict=True)
    return {
        **_sort_classes([{"class": name, **scores._asdict(), "auc": area} for name, scores, area in each]),
        **_build_confusion_table(counts, names),
        "calibration": _build_calibration_table(probabilities.max(axis=1), probabilities.argmax(axis=1) == true),
    }


def _sort_classes(class_results: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst F1 first; on ties, the more frequent class first. Classes that neither occur nor are predicted come
    last."""
    class_results.sort(key=lambda row: (not row["support"] + row["predicted"], row["f1"], -row["support"]))
    return {"classes": len(class_results), "per_class": class_results[:MAX_CLASSES]}


def _build_confusion_table(counts: Ints, names: Sequence[str]) -> dict[str, Any]:
    wrong = counts[:-1] - np.diag(np.diag(counts[:-1]))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSED_PAIRS]
    pairs = [(int(index) // len(names), int(index) % len(names)) for index in order]
    table: dict[str, Any] = {
        "confused": [
            {"true": names[row], "predicted": names[column], "rows": int(wrong[row, column])}
            for row, column in pairs
            if wrong[row, column]
        ]
    }
    if len(names) <= MAX_CONFUSION_CLASSES:
        table["confusion"] = {
            "labels": list(names),
            "counts": counts[:-1].tolist(),
            "without_class": counts[-1].tolist(),
        }
    return table


def _build_calibration_table(confidence: Floats, is_correct: Bools) -> dict[str, Any]:
    return {
        "ece": calibration.expected_calibration_error(confidence, is_correct),
        "bins": [
            reliability_bin._asdict()
            for reliability_bin in calibration.compute_reliability_bins(confidence, is_correct)
        ],
    }


def _sigmoid(logits: Floats) -> Floats:
    probabilities: Floats = 1 / (1 + np.exp(-logits.clip(-700, 700)))
    return probabilities
