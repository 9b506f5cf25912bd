"""Summary scores against arithmetic by hand; the libraries' own numbers; lead."""

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings, strategies as st

from rtrain.errors import UserError
from rtrain.metrics import bootstrap, text
from rtrain.metrics.text import Budget


def test_rouge_by_hand() -> None:
    found = text.additive_rouge(["the cat sat"], ["the cat ran away"]).scores()
    # Shared: 2 of 3 and 4 words; 1 of 2 and 3 pairs; longest common subsequence 2.
    assert found == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7})


def test_rouge_stems_words() -> None:
    assert text.additive_rouge(["he is running"], ["he is runs"]).scores()["rouge1"] == pytest.approx(1.0)


def test_rouge_is_the_mean_over_rows_and_an_empty_text_counts() -> None:
    assert text.additive_rouge(["cat", ""], ["cat", "dog"]).scores()["rouge1"] == 0.5


PREDICTED = ["the cat sat on the mat", "hello there my friend", "a b", ""]
REFERENCES = ["the cat sat on a mat", "hello there my dear friend", "a b", "something"]


def test_bleu_is_sacrebleus_corpus_score() -> None:
    expected = sacrebleu.corpus_bleu(PREDICTED, [REFERENCES]).score
    assert text.additive_bleu(PREDICTED, REFERENCES).scores()["bleu"] == pytest.approx(expected, abs=1e-9)
    assert 0 < expected < 100
    # Not the mean of the sentences' scores.
    each = [sacrebleu.sentence_bleu(*pair) for pair in zip(PREDICTED, [[r] for r in REFERENCES], strict=True)]
    assert abs(expected - np.mean([one.score for one in each])) > 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join)] * 2), min_size=1, max_size=6))
def test_bleu_of_any_rows_is_sacrebleus(rows: list[tuple[str, str]]) -> None:
    predicted, references = [row[0] for row in rows], [row[1] for row in rows]
    expected = sacrebleu.corpus_bleu(predicted, [references]).score
    assert text.additive_bleu(predicted, references).scores()["bleu"] == pytest.approx(expected, abs=1e-9)


def test_bleu_has_an_interval() -> None:
    found = bootstrap.intervals(text.additive_bleu(PREDICTED, REFERENCES), replicates=30)["bleu"]
    assert found.low <= found.value <= found.high


def test_scores_has_all_four() -> None:
    assert list(text.scores(["cat"], ["cat"])) == ["rouge1", "rouge2", "rougeL", "bleu"]


SENTENCES = ["You may use it.", "We keep your data for years.", "Pay us.", "We sell your data to others."]


def lead(sentences: list[str], budget: Budget) -> list[int]:
    return text.pick(range(len(sentences)), text.lengths(sentences), budget)


def test_lead_takes_the_first_sentences_that_the_budget_allows() -> None:
    assert lead(SENTENCES, Budget(sentences=2)) == [0, 1]
    assert lead(SENTENCES, Budget(words=10)) == [0, 1]  # 4 + 6 words
    assert lead(SENTENCES, Budget(words=9)) == [0]
    assert lead(SENTENCES, Budget(words=1)) == [0]  # never empty
    assert lead([], Budget(words=5)) == []


def test_pick_takes_the_best_first_and_keeps_the_texts_order() -> None:
    assert text.pick([3, 1, 0], text.lengths(SENTENCES), Budget(sentences=2)) == [1, 3]


@pytest.mark.parametrize("settings", [{}, {"sentences": 2, "words": 10}, {"words": 0}, {"sentences": -1}])
def test_a_budget_that_says_nothing_or_twice_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UserError, match="give one of the two, at least 1"):
        Budget(**settings)
