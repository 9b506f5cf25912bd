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

import numpy as np

from rtrain.metrics.sums import Floats, SumMetric, ratio

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
