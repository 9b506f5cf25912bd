"""The oracle's choice of sentences, against the same search by whole texts."""

import numpy as np
from hypothesis import given, settings, strategies as st

from rtrain.metrics import summaries
from rtrain.metrics.summaries import SummaryBudget, select_oracle_sentences

SENTENCES = ["You may use it.", "We keep your data for years.", "Pay us.", "We sell your data to others."]


def select_by_definition(sentences: list[str], reference: str, budget: SummaryBudget) -> list[int]:
    """The search by its definition: the score of each choice is that of its text."""
    words, sizes = [summaries.tokenize_for_rouge(sentence) for sentence in sentences], summaries.count_words(sentences)

    def value(positions: list[int]) -> float:
        outputs = [word for position in sorted(positions) for word in words[position]]
        return sum(summaries.compute_rouge(outputs, summaries.tokenize_for_rouge(reference), summaries.ROUGE_NAMES[:2]))

    results: list[int] = []
    best = 0.0
    while True:
        used = [sizes[position] for position in results]
        open_ = [p for p in range(len(sentences)) if p not in results and budget.allows(used, sizes[p])]
        values = [value([*results, position]) for position in open_]
        if not values or max(values) <= best:
            return sorted(results)
        best = max(values)
        results.append(open_[int(np.argmax(values))])


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "running", "Runs", "...", "9"]), max_size=7).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(WORDS, max_size=9),
    WORDS,
    st.one_of(
        st.integers(1, 9).map(lambda n: SummaryBudget(sentences=n)),
        st.integers(1, 20).map(lambda n: SummaryBudget(words=n)),
    ),
)
def test_it_takes_what_the_search_by_whole_texts_takes(
    sentences: list[str], reference: str, budget: SummaryBudget
) -> None:
    """Sentences without a word, words more than once, pairs across sentences, ties."""
    assert select_oracle_sentences(sentences, reference, budget) == select_by_definition(sentences, reference, budget)


def test_so_it_does_of_a_longer_text() -> None:
    draw = np.random.default_rng(3)
    vocabulary = [f"w{number}" for number in range(60)]
    sentences = [" ".join(draw.choice(vocabulary, size=draw.integers(0, 15))) for _ in range(30)]
    reference = " ".join([*sentences[4].split(), *draw.choice(vocabulary, size=40), *sentences[20].split()])
    result = select_oracle_sentences(sentences, reference, SummaryBudget(sentences=30))
    assert len(result) == 5
    assert result == select_by_definition(sentences, reference, SummaryBudget(sentences=30))


def test_oracle_chooses_what_the_reference_says() -> None:
    assert select_oracle_sentences(SENTENCES, "Pay us. You may use it.", SummaryBudget(sentences=3)) == [0, 2]
    assert select_oracle_sentences(SENTENCES, "pay us", SummaryBudget(sentences=3)) == [
        2
    ]  # a second sentence would only cost precision
    assert select_oracle_sentences(SENTENCES, "nothing shared", SummaryBudget(sentences=3)) == []
