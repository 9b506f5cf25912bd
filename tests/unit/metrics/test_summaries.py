"""Summary scores against the libraries' own numbers; the choice of sentences under a budget."""

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings, strategies as st
from rouge_score.rouge_scorer import RougeScorer

from rtrain.core.errors import UserError
from rtrain.metrics import summaries
from rtrain.metrics.summaries import SummaryBudget

WORDS = st.lists(st.sampled_from(["a", "b", "running", "runs", "d"]), max_size=8).map(" ".join)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6))
def test_scores_are_those_of_the_libraries(rows: list[tuple[str, str]]) -> None:
    counts = [summaries.count_bleu(*map(summaries.tokenize_for_bleu, row)) for row in rows]
    expected = sacrebleu.corpus_bleu([row[0] for row in rows], [[row[1] for row in rows]]).score
    assert float(summaries.compute_bleu(np.sum(counts, axis=0))) == pytest.approx(expected, abs=1e-9)
    scorer = RougeScorer(list(summaries.ROUGE_NAMES), use_stemmer=True)
    for predicted, reference in rows:
        scores = scorer.score(reference, predicted)
        result = summaries.compute_rouge(
            summaries.tokenize_for_rouge(predicted), summaries.tokenize_for_rouge(reference)
        )
        assert result == tuple(scores[name].fmeasure for name in summaries.ROUGE_NAMES)


SENTENCES = ["You may use it.", "We keep your data for years.", "Pay us.", "We sell your data to others."]


def lead(sentences: list[str], budget: SummaryBudget) -> list[int]:
    return summaries.pick_sentences(range(len(sentences)), summaries.count_words(sentences), budget)


def test_lead_takes_the_first_sentences_that_the_budget_allows() -> None:
    assert lead(SENTENCES, SummaryBudget(sentences=2)) == [0, 1]
    assert lead(SENTENCES, SummaryBudget(words=10)) == [0, 1]  # 4 + 6 words
    assert lead(SENTENCES, SummaryBudget(words=9)) == [0]
    assert lead(SENTENCES, SummaryBudget(words=1)) == [0]  # never empty
    assert lead([], SummaryBudget(words=5)) == []


def test_pick_takes_the_best_first_and_keeps_the_texts_order() -> None:
    assert summaries.pick_sentences([3, 1, 0], summaries.count_words(SENTENCES), SummaryBudget(sentences=2)) == [1, 3]


@pytest.mark.parametrize("settings", [{}, {"sentences": 2, "words": 10}, {"words": 0}, {"sentences": -1}])
def test_a_budget_that_says_nothing_or_twice_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UserError) as caught:
        SummaryBudget(**settings)
    assert caught.value.code == "out_of_range"
