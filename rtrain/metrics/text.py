"""Summaries against references: ROUGE, BLEU, and the two yardsticks of extractive systems, lead and oracle.

ROUGE (Lin 2004) is Google's `rouge-score`, with Porter stemming; its words are a-z and 0-9, so that it is for
English. BLEU (Papineni et al. 2002) is `sacrebleu`'s, over the corpus, with its tokenisation 13a. An extractive
summary is a choice of a text's sentences, joined in their order; how a text is cut into sentences is the caller's
business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rtrain.errors import UserError
from rtrain.metrics.additive import Additive, Floats, means

_ORDERS = 4


@dataclass(frozen=True)
class Budget:
    """How long an extractive summary may be. The first sentence may exceed `words`: a summary is never empty."""

    sentences: int | None = None
    words: int | None = None

    def __post_init__(self) -> None:
        if (self.sentences is None) == (self.words is None) or (self.sentences or self.words or 0) < 1:
            raise UserError(
                f"a summary's budget of sentences={self.sentences} and words={self.words}: "
                "give one of the two, at least 1"
            )

    def allows(self, chosen: Sequence[str], more: str) -> bool:
        """Whether `more` may be added to the chosen sentences."""
        if self.sentences is not None:
            return len(chosen) < self.sentences
        return not chosen or len(" ".join([*chosen, more]).split()) <= (self.words or 0)


def additive_rouge(predicted: Sequence[str], references: Sequence[str]) -> Additive:
    """rouge1, rouge2, rougeL: the mean over rows of ROUGE's F1, 0 to 1. rougeL takes the text as one sequence."""
    scorer = _scorer("rouge1", "rouge2", "rougeL")
    pairs = zip(references, predicted, strict=True)
    rows = [scorer.score(reference, text) for reference, text in pairs]
    return means({name: [row[name].fmeasure for row in rows] for name in ("rouge1", "rouge2", "rougeL")})


def additive_bleu(predicted: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Additive:
    """bleu: 0 to 100, exponential smoothing; of the corpus: a function of summed counts, no mean over rows."""
    from sacrebleu.metrics.bleu import BLEU

    # effective_order False, as for a corpus; per row only the counts are taken, not the score.
    metric = BLEU(lowercase=lowercase)
    rows = np.zeros((len(predicted), 2 * _ORDERS + 2))
    for row, (text, reference) in enumerate(zip(predicted, references, strict=True)):
        counts = metric.corpus_score([text], [[reference]])
        rows[row] = [*counts.counts, *counts.totals, counts.sys_len, counts.ref_len]

    def one(sums: Floats) -> float:
        numbers = [int(value) for value in np.rint(sums)]
        counts, totals = numbers[:_ORDERS], numbers[_ORDERS : 2 * _ORDERS]
        found = BLEU.compute_bleu(counts, totals, sys_len=numbers[-2], ref_len=numbers[-1], smooth_method="exp")
        return float(found.score)

    def score(sums: Floats) -> dict[str, Floats]:
        flat = sums.reshape(-1, sums.shape[-1])
        return {"bleu": np.array([one(row) for row in flat]).reshape(sums.shape[:-1])}

    return Additive(rows, score)


def scores(predicted: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """rouge1, rouge2, rougeL (0 to 1) and bleu (0 to 100) of all rows."""
    return additive_rouge(predicted, references).scores() | additive_bleu(predicted, references).scores()


def lead(sentences: Sequence[str], budget: Budget) -> list[int]:
    """The first sentences that the budget allows: the baseline that an extractive system must beat."""
    return pick(range(len(sentences)), sentences, budget)


def pick(order: Sequence[int], sentences: Sequence[str], budget: Budget) -> list[int]:
    """Positions taken in `order` (the best first) until one does not fit, in the text's order."""
    chosen: list[int] = []
    for position in order:
        if not budget.allows([sentences[index] for index in chosen], sentences[position]):
            break
        chosen.append(position)
    return sorted(chosen)


def oracle(sentences: Sequence[str], reference: str, budget: Budget) -> list[int]:
    """Positions that a greedy search by the reference itself chooses: labels to train on, and a ceiling to report.

    As in Nallapati, Zhai and Zhou 2017: add the sentence that raises the mean of the F1 of ROUGE-1 and ROUGE-2 most
    (of equals the first), while one does and the budget allows it. Greedy, so not always the best choice of all.
    """
    scorer = _scorer("rouge1", "rouge2")

    def value(positions: Sequence[int]) -> float:
        found = scorer.score(reference, " ".join(sentences[position] for position in sorted(positions)))
        return float(found["rouge1"].fmeasure + found["rouge2"].fmeasure)

    chosen: list[int] = []
    best = 0.0
    while True:
        texts = [sentences[position] for position in chosen]
        open_ = [p for p in range(len(sentences)) if p not in chosen and budget.allows(texts, sentences[p])]
        if not open_:
            break
        values = [value([*chosen, position]) for position in open_]
        top = int(np.argmax(values))
        if values[top] <= best:
            break
        best = values[top]
        chosen.append(open_[top])
    return sorted(chosen)


def _scorer(*names: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(names), use_stemmer=True)
