"""The sentences of a text that a greedy search by the reference takes: labels to train on, and a ceiling to report.

The scores are ROUGE-1 and ROUGE-2 of `rtrain.metrics.text`, bit for bit, by counts that are kept between the steps. Of
a sentence only the words and pairs that the reference has are looked at, all sentences at once: a step costs what these
are in number, not the length of the summary so far times the number of sentences.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rtrain.metrics.additive import Floats, Ints
from rtrain.metrics.text import Budget, lengths, rouge_words

NONE = -1
"""The number of a word or pair that the reference has not."""


class _Grams(NamedTuple):
    """Which n-grams of the reference occur in which sentence, one entry for each occurrence."""

    sentence: Ints
    gram: Ints


def oracle(sentences: Sequence[str], reference: str, budget: Budget) -> list[int]:
    """Positions of the chosen sentences, ascending.

    As in Nallapati, Zhai and Zhou 2017: add the sentence that raises the mean of the F1 of ROUGE-1 and ROUGE-2 most
    (of equals the first), while one does and the budget allows it. Greedy, so not always the best choice of all.
    """
    wanted, sizes = rouge_words(reference), lengths(sentences)
    numbers = {word: number for number, word in enumerate(dict.fromkeys(wanted))}
    words = [np.array([numbers.get(word, NONE) for word in rouge_words(one)], dtype=np.int64) for one in sentences]
    search = _Search(words, np.array([numbers[word] for word in wanted], dtype=np.int64))
    chosen: list[int] = []
    best = 0.0
    while True:
        used = [sizes[position] for position in chosen]
        taken = set(chosen)
        open_ = [p for p in range(len(sentences)) if p not in taken and budget.allows(used, sizes[p])]
        if not open_:
            break
        values = search.values()[open_]
        top = int(np.argmax(values))
        if values[top] <= best:
            break
        best = float(values[top])
        chosen.append(open_[top])
        search.take(open_[top])
    return sorted(chosen)


class _Search:
    """The counts of what is chosen so far, and what each sentence would add to them."""

    def __init__(self, words: Sequence[Ints], reference: Ints):
        """`words`: for each sentence the numbers of its words, `NONE` for one that the reference has not."""
        self._lengths = np.array([len(one) for one in words], dtype=np.int64)
        # The words at the edges, which make pairs with those of the sentences beside.
        self._first = np.array([one[0] if len(one) else NONE for one in words], dtype=np.int64)
        self._last = np.array([one[-1] if len(one) else NONE for one in words], dtype=np.int64)
        self._size = int(reference.max(initial=0)) + 1
        pairs, self._pair_counts = np.unique(self._pairs(reference[:-1], reference[1:]), return_counts=True)
        self._known = pairs
        self._word_counts = np.bincount(reference, minlength=self._size)
        numbers = np.arange(len(words))
        inside = [self._pair_numbers(one[:-1], one[1:]) for one in words]
        self._words = _kept(np.repeat(numbers, self._lengths), _joined(words))
        self._inside = _kept(np.repeat(numbers, [len(one) for one in inside]), _joined(inside))
        self._has_words = np.zeros(self._size, dtype=np.int64)
        self._has_pairs = np.zeros(len(pairs), dtype=np.int64)
        self._total = 0
        self._taken = np.zeros(len(words), dtype=np.bool_)

    def values(self) -> Floats:
        """[sentences]: the sum of both F1, were that sentence added."""
        lengths = self._total + self._lengths
        words = _hits(self._has_words, self._word_counts, [(self._words, 1)], len(lengths))
        pairs = _hits(self._has_pairs, self._pair_counts, self._new_pairs(), len(lengths))
        wanted = int(self._word_counts.sum())
        found: Floats = _f1(words, lengths, wanted) + _f1(pairs, np.maximum(lengths - 1, 0), wanted - 1)
        return found

    def take(self, sentence: int) -> None:
        """Add a sentence to the chosen ones."""
        for grams, sign in self._new_pairs():
            np.add.at(self._has_pairs, grams.gram[grams.sentence == sentence], sign)
        np.add.at(self._has_words, self._words.gram[self._words.sentence == sentence], 1)
        self._total += int(self._lengths[sentence])
        self._taken[sentence] = True

    def _new_pairs(self) -> list[tuple[_Grams, int]]:
        """The pairs that come with each sentence, and with -1 those that it parts: of the last word before it with the
        first one behind it."""
        numbers, full = np.arange(len(self._lengths)), self._lengths > 0
        places = np.flatnonzero(self._taken & full)
        behind = np.searchsorted(places, numbers)  # of the chosen sentences the first one behind each
        edges = np.concatenate([[NONE], self._last[places]]), np.concatenate([self._first[places], [NONE]])
        left, right = edges[0][behind], edges[1][behind]
        beside = (
            (self._pair_numbers(left, self._first), 1),
            (self._pair_numbers(self._last, right), 1),
            (self._pair_numbers(left, right), -1),
        )
        return [(self._inside, 1), *((_kept(numbers[full], pairs[full]), sign) for pairs, sign in beside)]

    def _pairs(self, left: Ints, right: Ints) -> Ints:
        return left * self._size + right

    def _pair_numbers(self, left: Ints, right: Ints) -> Ints:
        """The number of each pair among the reference's; `NONE` where it is none of them."""
        if not len(self._known):
            return np.full(len(left), NONE, dtype=np.int64)
        pairs = self._pairs(left, right)
        places = np.minimum(np.searchsorted(self._known, pairs), len(self._known) - 1)
        known = (left >= 0) & (right >= 0) & (self._known[places] == pairs)
        return np.where(known, places, NONE)


def _kept(sentence: Ints, gram: Ints) -> _Grams:
    return _Grams(sentence[gram >= 0], gram[gram >= 0])


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _hits(has: Ints, wanted: Ints, changes: Sequence[tuple[_Grams, int]], sentences: int) -> Ints:
    """[sentences]: n-grams that are in the reference too, each at most as often as there, with each sentence's changes
    added to what there is."""
    gram = np.concatenate([one.gram for one, _ in changes])
    keys = np.concatenate([one.sentence for one, _ in changes]) * (len(wanted) + 1) + gram
    signs = np.concatenate([np.full(len(one.gram), sign) for one, sign in changes])
    found, place = np.unique(keys, return_inverse=True)
    more = np.bincount(place, weights=signs, minlength=len(found)).astype(np.int64)
    sentence, gram = np.divmod(found, len(wanted) + 1)
    gains = np.minimum(has[gram] + more, wanted[gram]) - np.minimum(has[gram], wanted[gram])
    base = int(np.minimum(has, wanted).sum())
    return base + np.bincount(sentence, weights=gains, minlength=sentences).astype(np.int64)


def _f1(hits: Ints, lengths: Ints, wanted: int) -> Floats:
    """As `rouge_score` computes it, in its order."""
    precision, recall = hits / np.maximum(lengths, 1), hits / max(wanted, 1)
    total = precision + recall
    return np.divide(2 * precision * recall, total, out=np.zeros(len(hits)), where=total > 0)
