"""Greedy oracle: the sentences of a text that best match a reference. They are training targets and an upper bound of
scores.

The scores are ROUGE-1 and ROUGE-2 of `rtrain.metrics.rouge`, bit for bit. Only words and pairs of the reference are
counted, so the cost of a step does not grow with the summary.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

from rtrain.metrics.rouge import SummaryBudget, count_words, tokenize_for_rouge


def select_oracle_sentences(sentences: Sequence[str], reference: str, budget: SummaryBudget) -> list[int]:
    """Positions of the chosen sentences, ascending.

    As in Nallapati, Zhai and Zhou 2017: add the sentence that raises the mean of the F1 of ROUGE-1 and ROUGE-2 most
    (the first of ties), while a sentence raises it and the budget allows it. Greedy, so not always optimal.
    """
    target, sizes = tokenize_for_rouge(reference), count_words(sentences)
    words = [tokenize_for_rouge(sentence) for sentence in sentences]
    word_hits, pair_hits = _NgramMatches(target), _NgramMatches(pairwise(target))
    inside = [word_hits.count_shared(row) for row in words], [pair_hits.count_shared(pairwise(row)) for row in words]
    selected_positions: list[int] = []
    full: list[
        int
    ] = []  # selected sentences that have words, ascending: their edges make pairs with adjacent sentences
    total, best = 0, 0.0

    def count_pair_changes(position: int) -> Mapping[Hashable, int]:
        """Pairs that a sentence adds, minus the pair that it separates."""
        if not (row := words[position]):
            return {}
        index = bisect(full, position)
        previous_word = words[full[index - 1]][-1] if index else None
        next_word = words[full[index]][0] if index < len(full) else None
        added_pairs, removed_pairs = (
            pair_hits.count_shared([(previous_word, row[0]), (row[-1], next_word)]),
            pair_hits.count_shared([(previous_word, next_word)]),
        )
        if not added_pairs and not removed_pairs:
            return inside[1][position]
        changed_pairs = inside[1][position] + added_pairs
        changed_pairs.subtract(removed_pairs)
        return changed_pairs

    def score_with(position: int) -> float:
        size = total + len(words[position])
        first = _compute_f1(word_hits.count_after(inside[0][position]), size, len(target))
        return first + _compute_f1(
            pair_hits.count_after(count_pair_changes(position)), max(size - 1, 0), len(target) - 1
        )

    while True:
        used = [sizes[position] for position in selected_positions]
        selected_set = set(selected_positions)
        values = {
            p: score_with(p) for p in range(len(words)) if p not in selected_set and budget.allows(used, sizes[p])
        }
        top = max(values, key=lambda p: values[p], default=None)
        if top is None or values[top] <= best:
            return sorted(selected_positions)
        best = values[top]
        word_hits.add(inside[0][top])
        pair_hits.add(count_pair_changes(top))
        selected_positions.append(top)
        total += len(words[top])
        if words[top]:
            full.insert(bisect(full, top), top)


class _NgramMatches:
    """Matches of n-grams with the reference, clipped to their counts there."""

    def __init__(self, reference: Iterable[Hashable]):
        self._target = Counter(reference)
        self._match_counts = Counter[Hashable]()
        self._count = 0

    def count_shared(self, grams: Iterable[Hashable]) -> Counter[Hashable]:
        return Counter(gram for gram in grams if gram in self._target)

    def count_after(self, changes: Mapping[Hashable, int]) -> int:
        """Number of matches after adding these."""
        count = self._count
        for gram, more in changes.items():
            current_count, max_count = self._match_counts.get(gram, 0), self._target[gram]
            if current_count < max_count or more < 0:
                count += min(current_count + more, max_count) - min(current_count, max_count)
        return count

    def add(self, changes: Mapping[Hashable, int]) -> None:
        self._count = self.count_after(changes)
        self._match_counts.update(changes)


def _compute_f1(hits: int, length: int, target: int) -> float:
    """As `rouge_score` computes it, in its order."""
    precision, recall = hits / max(length, 1), hits / max(target, 1)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
