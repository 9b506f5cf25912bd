"""The sentences of a text that a greedy search by the reference takes: labels to train on, and a ceiling to report.

The scores are ROUGE-1 and ROUGE-2 of `rtrain.metrics.rouge`, bit for bit. Of a sentence only the words and pairs that
the reference has are looked at, so a step costs what these are in number, not the length of the summary so far.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

from rtrain.metrics.rouge import Budget, lengths, rouge_words


def oracle(sentences: Sequence[str], reference: str, budget: Budget) -> list[int]:
    """Positions of the chosen sentences, ascending.

    As in Nallapati, Zhai and Zhou 2017: add the sentence that raises the mean of the F1 of ROUGE-1 and ROUGE-2 most
    (of equals the first), while one does and the budget allows it. Greedy, so not always the best choice of all.
    """
    target, sizes = rouge_words(reference), lengths(sentences)
    words = [rouge_words(sentence) for sentence in sentences]
    word_hits, pair_hits = _Hits(target), _Hits(pairwise(target))
    inside = [word_hits.shared(row) for row in words], [pair_hits.shared(pairwise(row)) for row in words]
    chosen: list[int] = []
    full: list[int] = []  # the chosen ones with words, ascending: their edges make pairs with what stands beside
    total, best = 0, 0.0

    def changes(position: int) -> Mapping[Hashable, int]:
        """Pairs that come with a sentence, less the one that it parts."""
        if not (row := words[position]):
            return {}
        place = bisect(full, position)
        before = words[full[place - 1]][-1] if place else None
        after = words[full[place]][0] if place < len(full) else None
        come, gone = pair_hits.shared([(before, row[0]), (row[-1], after)]), pair_hits.shared([(before, after)])
        if not come and not gone:
            return inside[1][position]
        found = inside[1][position] + come
        found.subtract(gone)
        return found

    def value(position: int) -> float:
        size = total + len(words[position])
        first = _f1(word_hits.after(inside[0][position]), size, len(target))
        return first + _f1(pair_hits.after(changes(position)), max(size - 1, 0), len(target) - 1)

    while True:
        used = [sizes[position] for position in chosen]
        taken = set(chosen)
        values = {p: value(p) for p in range(len(words)) if p not in taken and budget.allows(used, sizes[p])}
        top = max(values, key=lambda p: values[p], default=None)
        if top is None or values[top] <= best:
            return sorted(chosen)
        best = values[top]
        word_hits.add(inside[0][top])
        pair_hits.add(changes(top))
        chosen.append(top)
        total += len(words[top])
        if words[top]:
            full.insert(bisect(full, top), top)


class _Hits:
    """N-grams that are in the reference too, each at most as often as there."""

    def __init__(self, reference: Iterable[Hashable]):
        self._target = Counter(reference)
        self._has = Counter[Hashable]()
        self._count = 0

    def shared(self, grams: Iterable[Hashable]) -> Counter[Hashable]:
        return Counter(gram for gram in grams if gram in self._target)

    def after(self, changes: Mapping[Hashable, int]) -> int:
        """How many there are with these added."""
        count = self._count
        for gram, more in changes.items():
            has, most = self._has.get(gram, 0), self._target[gram]
            if has < most or more < 0:
                count += min(has + more, most) - min(has, most)
        return count

    def add(self, changes: Mapping[Hashable, int]) -> None:
        self._count = self.after(changes)
        self._has.update(changes)


def _f1(hits: int, length: int, target: int) -> float:
    """As `rouge_score` computes it, in its order."""
    precision, recall = hits / max(length, 1), hits / max(target, 1)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
