"""SQuAD's exact match and F1: 1.1 (Rajpurkar et al. 2016) and 2.0, with no-answer questions (Rajpurkar et al. 2018).

Both compare normalized texts: lower case, without ASCII punctuation and the words a, an and the, white space collapsed.
Each is the best over the gold answers of a question; F1 is of the two bags of words. The rules are English: in a
language written without blanks an answer is one word, so F1 is close to exact match.

Scores are percentages, as in publications.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rtrain.core.ragged import Head, RaggedArray
from rtrain.metrics.bootstrap import Bools, Floats, SumMetric, make_mean_metric, ratio

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Normalize an answer for comparison."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def compute_exact_match(predicted: str, gold: Sequence[str]) -> float:
    """1 or 0. Without gold answers the question is unanswerable: only an empty prediction is right."""
    return float(normalize_answer(predicted) in _normalize_gold(gold))


def compute_f1(predicted: str, gold: Sequence[str]) -> float:
    """0 to 1: 2 shared / (predicted + gold words). If either has no words: 1 if both have none, else 0."""
    words = normalize_answer(predicted).split()
    return max(_compute_word_f1(words, form.split()) for form in _normalize_gold(gold))


def _normalize_gold(gold: Sequence[str]) -> list[str]:
    """Normalized gold answers; empty ones are dropped if others remain (as in the script of 2.0)."""
    return [form for form in map(normalize_answer, gold) if form] or [""]


def _compute_word_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    return 2 * (Counter(predicted) & Counter(gold)).total() / (len(predicted) + len(gold))


def make_sum_metric(predicted: Sequence[str | None], gold: Sequence[Sequence[str]]) -> SumMetric:
    """exact_match and f1 over all questions; where only some have an answer, both also by `has_answer` and `no_answer`.

    None stands for a question that was not predicted at all: it counts 0. (SQuAD 1.1's script does so too; 2.0's leaves
    such questions out, which would flatter a system that skips the hard ones.)

    One departure from SQuAD 1.1's script, which has no notion of an empty answer: there a prediction and a gold
    answer of nothing but articles and punctuation match exactly with an F1 of 0, here and in 2.0's script with one of
    1.
    """
    rows = np.zeros((len(gold), 6))
    for row, (answer, answers) in enumerate(zip(predicted, gold, strict=True)):
        half = 0 if answers else 3
        rows[row, half] = 1
        if answer is not None:
            rows[row, half + 1], rows[row, half + 2] = (
                100 * compute_exact_match(answer, answers),
                100 * compute_f1(answer, answers),
            )
    has_both_kinds = 0 < rows[:, 3].sum() < len(gold)

    def score(sums: Floats) -> dict[str, Floats]:
        count, exact, words, count_none, exact_none, words_none = np.moveaxis(sums, -1, 0)
        scores = {
            "exact_match": ratio(exact + exact_none, count + count_none),
            "f1": ratio(words + words_none, count + count_none),
        }
        if has_both_kinds:
            scores |= {
                "has_answer_exact_match": ratio(exact, count),
                "has_answer_f1": ratio(words, count),
                "no_answer_exact_match": ratio(exact_none, count_none),
                "no_answer_f1": ratio(words_none, count_none),
            }
        return scores

    return SumMetric(rows, score)


# ----------------------------------------------------------------------------------------------- the output `spans`

MAX_CURVE_POINTS = 100
ANSWER_LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 10, 15, 25)
"""Lower bounds of the groups of answer lengths."""


class SpanResults(NamedTuple):
    """Results of questions, [rows] each: the columns of their row results. F1 and exact match are of the best span's
    tokens, 0 to 1, and 0 without a gold answer."""

    f1: Any
    exact_match: Any
    margin: Any
    """Score of the best span minus the score of no answer; NaN if a logit is NaN: such an answer is always wrong."""
    has_answer: Any
    """1 if the question has a gold answer, else 0."""
    loss: Any
    first: Any
    """Position of the span's first token in the row."""
    last: Any
    """Position of its last token, included."""

    @classmethod
    def from_rows(cls, row_results: RaggedArray) -> "SpanResults":
        return cls(*row_results.to_matrix(len(cls._fields)).T)


def no_answer_threshold(head: Head) -> float:
    """Margin above which an answer is given; -inf if every question has an answer."""
    return float(head.facts.get("threshold", 0.0)) if head.facts.get("no_answer") else -np.inf


def _score_spans(row_results: RaggedArray, head: Head) -> tuple[Floats, Floats, Bools, Bools]:
    """For each question: F1, exact match, whether an answer is given, whether it has a gold answer. No answer to an
    unanswerable question scores 1."""
    rows = SpanResults.from_rows(row_results)
    is_answered, has_answer = ~(rows.margin <= no_answer_threshold(head)), rows.has_answer > 0  # NaN counts as answered
    f1, exact = (
        np.where(is_answered & has_answer, part, ~is_answered & ~has_answer) for part in (rows.f1, rows.exact_match)
    )
    return f1.astype(np.float64), exact.astype(np.float64), is_answered, has_answer


def make_spans_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Exact match and F1 of the answers' tokens, 0 to 1: an answer is given if its margin over no answer is above the
    head's threshold. (`rtrain evaluate` gives SQuAD's own scores, which are of the texts.)"""
    f1, exact, is_answered, _ = _score_spans(row_results, head)
    return make_mean_metric({"f1": f1, "exact_match": exact, "answered": is_answered})


def mark_correct_spans(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """The tokens equal the first gold answer, or no answer is given to an unanswerable question."""
    _, exact, _, _ = _score_spans(row_results, head)
    return exact > 0


def build_span_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    f1, exact, is_answered, has_answer = _score_spans(row_results, head)
    # The answer's tokens in the first window that holds it; 0 if no window holds all of it.
    lengths = np.zeros(len(row_results), dtype=np.int64)
    for row, windows in enumerate(targets):
        positions = windows.reshape(-1, 2).astype(np.int64)
        lengths[row] = next((last - first + 1 for first, last in positions.tolist() if last > 0), 0)
    tables: dict[str, Any] = {"by_length": []}
    group = np.searchsorted(ANSWER_LENGTH_EDGES, lengths, side="right")
    for number in np.unique(group[has_answer & (lengths > 0)]).tolist():
        inside = has_answer & (group == number)
        bounds = {"low": int(lengths[inside].min()), "high": int(lengths[inside].max()), "rows": int(inside.sum())}
        means = {"f1": float(f1[inside].mean()), "exact_match": float(exact[inside].mean())}
        tables["by_length"].append({**bounds, **means})
    rows = SpanResults.from_rows(row_results)
    if head.facts.get("no_answer") and not np.isnan(rows.margin).all():
        tables["no_answer"] = {
            "rows": int((~has_answer).sum()),
            "unanswered_share": float(np.mean(~is_answered[~has_answer])) if (~has_answer).any() else None,
            "threshold": no_answer_threshold(head),
            "curve": _build_no_answer_curve(rows),
        }
    return tables


def _build_no_answer_curve(rows: SpanResults) -> list[dict[str, float]]:
    """Scores at falling thresholds: from no answer at all to an answer for every question."""
    # A NaN margin counts as an answer at each threshold, and is wrong.
    num_rows = len(rows.margin)
    rows = SpanResults(*(column[~np.isnan(rows.margin)] for column in rows))
    has_answer, order = rows.has_answer > 0, np.argsort(-rows.margin, kind="stable")
    f1_sums, exact_sums = (
        np.concatenate([[0.0], np.cumsum((np.where(has_answer, part, 0.0) - ~has_answer)[order])]) + (~has_answer).sum()
        for part in (rows.f1, rows.exact_match)
    )
    falling = rows.margin[order]
    # Rows of one margin are answered together: a threshold lies only where the margin falls.
    ends = np.concatenate([[0], np.flatnonzero(np.diff(falling) < 0) + 1, [len(falling)]])
    if len(ends) > MAX_CURVE_POINTS:
        ends = ends[np.unique(np.linspace(0, len(ends) - 1, MAX_CURVE_POINTS).round().astype(np.int64))]
    edges = np.concatenate([[falling[0] + 1], falling, [falling[-1] - 1]])
    return [
        {
            "threshold": float(edges[end] + edges[end + 1]) / 2,
            "f1": float(f1_sums[end]) / num_rows,
            "exact_match": float(exact_sums[end]) / num_rows,
            "answered": float(end + num_rows - len(falling)) / num_rows,
        }
        for end in ends.tolist()
    ]
