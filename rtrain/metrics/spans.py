"""SQuAD's exact match and F1: 1.1 (Rajpurkar et al. 2016) and 2.0, with no-answer questions (Rajpurkar et al. 2018).

Both compare normalised texts: lower case, ASCII punctuation removed, the words a, an and the removed, runs of white
space made one blank. Each is the best over the gold answers of a question; F1 is that of the two bags of words. The
rules are English: in a language written without blanks an answer is one word, so that F1 is hardly more than exact
match.

Scores are percentages, as the field prints them.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rtrain.metrics.sums import Additive, Floats, ratio

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """The form in which answers are compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(predicted: str, gold: Sequence[str]) -> float:
    """1 or 0. No gold answer means that the question has none: then only an empty prediction is right."""
    return float(normalise(predicted) in _forms(gold))


def f1(predicted: str, gold: Sequence[str]) -> float:
    """0 to 1: 2 shared / (predicted + gold words). Where either has no word left: 1 if both have none, else 0."""
    words = normalise(predicted).split()
    return max(_f1(words, form.split()) for form in _forms(gold))


def _forms(gold: Sequence[str]) -> list[str]:
    """Normalised answers; those of which nothing is left do not count beside others (as in 2.0's script)."""
    return [form for form in map(normalise, gold) if form] or [""]


def _f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    return 2 * (Counter(predicted) & Counter(gold)).total() / (len(predicted) + len(gold))


def additive(predicted: Sequence[str | None], gold: Sequence[Sequence[str]]) -> Additive:
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
            rows[row, half + 1], rows[row, half + 2] = 100 * exact_match(answer, answers), 100 * f1(answer, answers)
    both = 0 < rows[:, 3].sum() < len(gold)

    def score(sums: Floats) -> dict[str, Floats]:
        count, exact, words, count_none, exact_none, words_none = np.moveaxis(sums, -1, 0)
        found = {
            "exact_match": ratio(exact + exact_none, count + count_none),
            "f1": ratio(words + words_none, count + count_none),
        }
        if both:
            found |= {
                "has_answer_exact_match": ratio(exact, count),
                "has_answer_f1": ratio(words, count),
                "no_answer_exact_match": ratio(exact_none, count_none),
                "no_answer_f1": ratio(words_none, count_none),
            }
        return found

    return Additive(rows, score)
