"""Summaries against references: ROUGE, BLEU, and the choice of sentences under a budget.

ROUGE (Lin 2004) is Google's `rouge-score`, with Porter stemming; its words are a-z and 0-9, so that it is for
English. BLEU (Papineni et al. 2002) is `sacrebleu`'s, over the corpus, with its tokenisation 13a. An extractive
summary is a choice of a text's sentences, joined in their order; how a text is cut into sentences is the caller's
business.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.metrics.sums import Floats

ROUGES = ("rouge1", "rouge2", "rougeL")
_ORDERS = 4
BLEU_COUNTS = 2 * _ORDERS + 2
"""N-grams that match, and all, of 1 to 4 words; words of the predicted texts and of the references."""


@dataclass(frozen=True)
class Budget:
    """How long an extractive summary may be. The first sentence may exceed `words`: a summary is never empty."""

    sentences: int | None = None
    words: int | None = None

    def __post_init__(self) -> None:
        if (self.sentences is None) == (self.words is None) or (self.sentences or self.words or 0) < 1:
            raise UserError(
                f"a summary's budget of sentences={self.sentences} and words={self.words}: "
                "give one of the two, at least 1",
                code="out_of_range",
            )

    def allows(self, chosen: Sequence[int], more: int) -> bool:
        """Whether a sentence of `more` words may be added to chosen ones of so many words each."""
        if self.sentences is not None:
            return len(chosen) < self.sentences
        return not chosen or sum(chosen) + more <= (self.words or 0)


def pick(order: Sequence[int], words: Sequence[int], budget: Budget) -> list[int]:
    """Positions of the chosen sentences, in the text's order. Sentences are taken in `order` (the best first) until one
    exceeds the budget; `words` counts those of each sentence."""
    chosen: list[int] = []
    for position in order:
        if not budget.allows([words[index] for index in chosen], words[position]):
            break
        chosen.append(position)
    return sorted(chosen)


def lengths(texts: Sequence[str]) -> list[int]:
    """Words of each, by blanks: what a budget counts."""
    return [len(text.split()) for text in texts]


# -------------------------------------------------------------------------------- by words, one text at a time
# Words may be anything that is equal where the texts' words are, e.g. their numbers: so no texts need be kept.


def rouge_words(text: str) -> list[str]:
    found: list[str] = _stemmed().tokenize(text)
    return found


def rouge(predicted: Sequence[str], reference: Sequence[str], names: Sequence[str] = ROUGES) -> tuple[float, ...]:
    """F1 by each of `names`; words without blanks inside."""
    from rouge_score.rouge_scorer import RougeScorer

    found = RougeScorer(list(names), tokenizer=_Blanks()).score(" ".join(reference), " ".join(predicted))
    return tuple(float(found[name].fmeasure) for name in names)


def bleu_words(text: str) -> list[str]:
    return str(_13a()(text.rstrip())).split()


def bleu_counts(predicted: Sequence[str], reference: Sequence[str]) -> list[float]:
    """`BLEU_COUNTS` numbers that are added up over rows; words without blanks inside."""
    from sacrebleu.metrics.bleu import BLEU

    # effective_order False, as for a corpus; per row only the counts are taken, not the score.
    found = BLEU(tokenize="none", force=True).corpus_score([" ".join(predicted)], [[" ".join(reference)]])
    return [*found.counts, *found.totals, found.sys_len, found.ref_len]


def bleu(sums: Floats) -> Floats:
    """BLEU (...) of summed counts (..., BLEU_COUNTS) as `bleu_counts` gives them."""
    from sacrebleu.metrics.bleu import BLEU

    def one(row: Floats) -> float:
        numbers = [int(value) for value in np.rint(row)]
        counts, totals = numbers[:_ORDERS], numbers[_ORDERS : 2 * _ORDERS]
        found = BLEU.compute_bleu(counts, totals, sys_len=numbers[-2], ref_len=numbers[-1], smooth_method="exp")
        return float(found.score)

    flat = sums.reshape(-1, sums.shape[-1])
    return np.array([one(row) for row in flat], dtype=np.float64).reshape(sums.shape[:-1])


class _Blanks:
    def tokenize(self, text: str) -> list[str]:
        return text.split()


@functools.cache
def _stemmed() -> Any:
    from rouge_score.tokenizers import DefaultTokenizer

    return DefaultTokenizer(use_stemmer=True)


@functools.cache
def _13a() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU().tokenizer  # sacrebleu's own default, 13a
