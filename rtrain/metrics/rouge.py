"""Summaries against references: ROUGE, BLEU, and the choice of sentences under a budget.

ROUGE (Lin 2004) is Google's `rouge-score`, with Porter stemming; its words are a-z and 0-9, so it is for
English. BLEU (Papineni et al. 2002) is `sacrebleu`'s, over the corpus, with its tokenization 13a. An extractive
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

ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")
_MAX_NGRAM = 4
BLEU_COUNTS = 2 * _MAX_NGRAM + 2
"""N-grams that match, and all, of 1 to 4 words; words of the predicted texts and of the references."""


@dataclass(frozen=True)
class SummaryBudget:
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

    def allows(self, picked_words: Sequence[int], num_words: int) -> bool:
        """Whether a sentence of `num_words` words may be added to selected sentences of `picked_words` words each."""
        if self.sentences is not None:
            return len(picked_words) < self.sentences
        return not picked_words or sum(picked_words) + num_words <= (self.words or 0)


def pick_sentences(order: Sequence[int], words: Sequence[int], budget: SummaryBudget) -> list[int]:
    """Positions of the selected sentences, in the text's order. Sentences are selected in `order` (the best first)
    until one exceeds the budget; `words` are the word counts of the sentences."""
    picked_positions: list[int] = []
    for position in order:
        if not budget.allows([words[index] for index in picked_positions], words[position]):
            break
        picked_positions.append(position)
    return sorted(picked_positions)


def count_words(texts: Sequence[str]) -> list[int]:
    """Number of blank-separated words of each text, the unit of a budget."""
    return [len(text.split()) for text in texts]


# -------------------------------------------------------------------------------- by words, one text at a time
# Words may be any equal symbols for equal words, e.g. numbers, so texts need not be stored.


def tokenize_for_rouge(text: str) -> list[str]:
    words: list[str] = _load_rouge_tokenizer().tokenize(text)
    return words


def compute_rouge(
    predicted: Sequence[str], reference: Sequence[str], names: Sequence[str] = ROUGE_NAMES
) -> tuple[float, ...]:
    """F1 by each of `names`; words without blanks inside."""
    from rouge_score.rouge_scorer import RougeScorer

    rouge_scores = RougeScorer(list(names), tokenizer=_WhitespaceTokenizer()).score(
        " ".join(reference), " ".join(predicted)
    )
    return tuple(float(rouge_scores[name].fmeasure) for name in names)


def tokenize_for_bleu(text: str) -> list[str]:
    return str(_load_bleu_tokenizer()(text.rstrip())).split()


def count_bleu(predicted: Sequence[str], reference: Sequence[str]) -> list[float]:
    """`BLEU_COUNTS` numbers that are added up over rows; words without blanks inside."""
    from sacrebleu.metrics.bleu import BLEU

    # effective_order False, as for a corpus; per row only the counts are taken, not the score.
    bleu_score = BLEU(tokenize="none", force=True).corpus_score([" ".join(predicted)], [[" ".join(reference)]])
    return [*bleu_score.counts, *bleu_score.totals, bleu_score.sys_len, bleu_score.ref_len]


def compute_bleu(sums: Floats) -> Floats:
    """BLEU (...) of summed counts (..., BLEU_COUNTS) as `count_bleu` gives them."""
    from sacrebleu.metrics.bleu import BLEU

    def score_row(row: Floats) -> float:
        numbers = [int(value) for value in np.rint(row)]
        counts, totals = numbers[:_MAX_NGRAM], numbers[_MAX_NGRAM : 2 * _MAX_NGRAM]
        bleu_score = BLEU.compute_bleu(counts, totals, sys_len=numbers[-2], ref_len=numbers[-1], smooth_method="exp")
        return float(bleu_score.score)

    flat = sums.reshape(-1, sums.shape[-1])
    return np.array([score_row(row) for row in flat], dtype=np.float64).reshape(sums.shape[:-1])


class _WhitespaceTokenizer:
    def tokenize(self, text: str) -> list[str]:
        return text.split()


@functools.cache
def _load_rouge_tokenizer() -> Any:
    from rouge_score.tokenizers import DefaultTokenizer

    return DefaultTokenizer(use_stemmer=True)


@functools.cache
def _load_bleu_tokenizer() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU().tokenizer  # sacrebleu's own default, 13a
