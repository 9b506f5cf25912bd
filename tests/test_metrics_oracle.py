"""The oracle's choice of sentences, against the same search by whole texts."""

import numpy as np
from hypothesis import given, settings, strategies as st

from rtrain.metrics import rouge
from rtrain.metrics.rouge import Budget
from rtrain.metrics.summary_oracle import oracle

SENTENCES = ["You may use it.", "We keep your data for years.", "Pay us.", "We sell your data to others."]


def whole(sentences: list[str], reference: str, budget: Budget) -> list[int]:
    """The search by its definition: the score of each choice is that of its text."""
    words, sizes = [rouge.rouge_words(sentence) for sentence in sentences], rouge.lengths(sentences)

    def value(positions: list[int]) -> float:
        joined = [word for position in sorted(positions) for word in words[position]]
        return sum(rouge.rouge(joined, rouge.rouge_words(reference), rouge.ROUGES[:2]))

    chosen: list[int] = []
    best = 0.0
    while True:
        used = [sizes[position] for position in chosen]
        open_ = [p for p in range(len(sentences)) if p not in chosen and budget.allows(used, sizes[p])]
        values = [value([*chosen, position]) for position in open_]
        if not values or max(values) <= best:
            return sorted(chosen)
        best = max(values)
        chosen.append(open_[int(np.argmax(values))])


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "running", "Runs", "...", "9"]), max_size=7).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(WORDS, max_size=9),
    WORDS,
    st.one_of(st.integers(1, 9).map(lambda n: Budget(sentences=n)), st.integers(1, 20).map(lambda n: Budget(words=n))),
)
def test_it_takes_what_the_search_by_whole_texts_takes(sentences: list[str], reference: str, budget: Budget) -> None:
    """Sentences without a word, words more than once, pairs across sentences, ties."""
    assert oracle(sentences, reference, budget) == whole(sentences, reference, budget)


def test_so_it_does_of_a_longer_text() -> None:
    draw = np.random.default_rng(3)
    vocabulary = [f"w{number}" for number in range(60)]
    sentences = [" ".join(draw.choice(vocabulary, size=draw.integers(0, 15))) for _ in range(30)]
    reference = " ".join([*sentences[4].split(), *draw.choice(vocabulary, size=40), *sentences[20].split()])
    found = oracle(sentences, reference, Budget(sentences=30))
    assert len(found) == 5
    assert found == whole(sentences, reference, Budget(sentences=30))


def test_oracle_chooses_what_the_reference_says() -> None:
    assert oracle(SENTENCES, "Pay us. You may use it.", Budget(sentences=3)) == [0, 2]
    assert oracle(SENTENCES, "pay us", Budget(sentences=3)) == [2]  # a second sentence would only cost precision
    assert oracle(SENTENCES, "nothing shared", Budget(sentences=3)) == []
