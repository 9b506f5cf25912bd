"""Extractive summaries against references: ROUGE, BLEU, sentences under a budget, the oracle, and the targets of a row.

ROUGE (Lin 2004) is Google's `rouge-score`, with Porter stemming; its words are a-z and 0-9, so it is for English. BLEU
(Papineni et al. 2002) is `sacrebleu`'s, over the corpus, with its tokenization 13a. A summary is a choice of a text's
sentences, joined in their order; the caller cuts the text into sentences.

The targets of a row are the sentences and encoded words of a document and its reference, as integers without text:

    sentences, then for each: first token, token after the last, in oracle, words
    for ROUGE, then for BLEU: words of the reference, their numbers; for each sentence: numbers in its code, the code

Words are tokenized as the score requires; equal words have equal numbers. In a sentence's code, a word of the reference
is its number, and -n stands for n consecutive words that the reference lacks: these match nothing, so the scores are
exact, and most of a document is not stored twice. The codes give ROUGE and BLEU of any selection of sentences without
the texts.
"""

import functools
import itertools
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, RaggedArray
from rtrain.metrics.bootstrap import Bools, Floats, Ints, SumMetric, combine_metrics, make_mean_metric
from rtrain.metrics.classification import build_calibration_table, compute_auc

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

    scorer = RougeScorer(list(names), tokenizer=_WhitespaceTokenizer())
    rouge_scores = scorer.score(" ".join(reference), " ".join(predicted))
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


# ------------------------------------------------------------------------------------------------- the targets of a row

SENTENCE_COLUMNS = 4
TENTHS = 10
"""Parts of a document with equally many sentences."""
ROUGE_TOLERANCE = 1e-9
"""Differences of two summaries' ROUGE up to this are rounding errors."""
OTHER_WORD = "-"
"""Any word that the reference lacks."""


class DocumentSentences(NamedTuple):
    """[sentences of the document] each, in order."""

    first: Ints
    """Position of each sentence's first token in the row."""
    end: Ints
    """Position after its last token; equal to `first` if the sentence was not read."""
    in_oracle: Bools
    """Whether the oracle selects the sentence: the training target."""
    words: Ints
    """Words between blanks, as a budget counts them."""

    @property
    def is_read(self) -> Bools:
        return self.end > self.first


class DocumentWords(NamedTuple):
    """The words of a reference and of a document's sentences, as tokenized for one of the scores."""

    reference: list[str]
    sentences: list[list[str]]

    def select_words(self, positions: Iterable[int]) -> list[str]:
        """The words of a summary of these sentences."""
        return [word for position in positions for word in self.sentences[position]]

    def compute_rouge(self, positions: Iterable[int]) -> tuple[float, ...]:
        """ROUGE-1, 2 and L of the summary of these sentences."""
        return compute_rouge(self.select_words(positions), self.reference)

    def count_bleu(self, positions: Iterable[int]) -> list[float]:
        """The counts of its BLEU (`count_bleu`)."""
        return count_bleu(self.select_words(positions), self.reference)


def encode_summary_row(
    sentences: Sequence[str], token_ranges: Sequence[tuple[int, int]], oracle_positions: Sequence[int], reference: str
) -> list[int]:
    """`token_ranges`: first token of each sentence and the token after its last; `oracle_positions`: positions of the
    target sentences."""
    numbers = [len(sentences)]
    for position, (token_range, words) in enumerate(zip(token_ranges, count_words(sentences), strict=True)):
        numbers += [*token_range, int(position in oracle_positions), words]
    for tokenize in (tokenize_for_rouge, tokenize_for_bleu):
        numbers += _encode_words(tokenize, sentences, reference)
    return numbers


def decode_sentences(values: Any) -> DocumentSentences:
    """The sentences that a row's targets describe."""
    count = int(values[0])
    table = np.asarray(values[1 : 1 + SENTENCE_COLUMNS * count], dtype=np.int64).reshape(count, SENTENCE_COLUMNS)
    return DocumentSentences(table[:, 0], table[:, 1], table[:, 2] > 0, table[:, 3])


def decode_words(values: Any) -> tuple[DocumentWords, DocumentWords]:
    """The words in a row's targets, as tokenized for ROUGE and for BLEU."""
    count = int(values[0])
    rest = iter(np.asarray(values[1 + SENTENCE_COLUMNS * count :], dtype=np.int64).tolist())
    return _read_words(rest, count), _read_words(rest, count)


def _encode_words(tokenize: Callable[[str], list[str]], sentences: Sequence[str], reference: str) -> list[int]:
    reference_words = tokenize(reference)
    number = {word: index for index, word in enumerate(dict.fromkeys(reference_words))}
    numbers = [len(reference_words), *(number[word] for word in reference_words)]
    for sentence in sentences:
        code: list[int] = []
        for in_reference, words in itertools.groupby(tokenize(sentence), number.__contains__):
            run = list(words)
            code += [number[word] for word in run] if in_reference else [-len(run)]
        numbers += [len(code), *code]
    return numbers


def _read_words(values: Iterator[int], count: int) -> DocumentWords:
    reference = [str(number) for number in itertools.islice(values, next(values))]
    sentences = []
    for _ in range(count):
        code = itertools.islice(values, next(values))
        sentences.append(
            [word for number in code for word in ([str(number)] if number >= 0 else [OTHER_WORD] * -number)]
        )
    return DocumentWords(reference, sentences)


# ----------------------------------------------------------------------------------------------------------- the oracle


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
    # Selected sentences that have words, ascending: their edges make pairs with adjacent sentences.
    full: list[int] = []
    total, best = 0, 0.0

    def count_pair_changes(position: int) -> Mapping[Hashable, int]:
        """Pairs that a sentence adds, minus the pair that it separates."""
        if not (row := words[position]):
            return {}
        index = bisect(full, position)
        previous_word = words[full[index - 1]][-1] if index else None
        next_word = words[full[index]][0] if index < len(full) else None
        added_pairs = pair_hits.count_shared([(previous_word, row[0]), (row[-1], next_word)])
        removed_pairs = pair_hits.count_shared([(previous_word, next_word)])
        if not added_pairs and not removed_pairs:
            return inside[1][position]
        changed_pairs = inside[1][position] + added_pairs
        changed_pairs.subtract(removed_pairs)
        return changed_pairs

    def score_with(position: int) -> float:
        size = total + len(words[position])
        num_words = word_hits.count_after(inside[0][position])
        num_pairs = pair_hits.count_after(count_pair_changes(position))
        return _compute_f1(num_words, size, len(target)) + _compute_f1(num_pairs, max(size - 1, 0), len(target) - 1)

    while True:
        used = [sizes[position] for position in selected_positions]
        selected_set = set(selected_positions)
        free = (p for p in range(len(words)) if p not in selected_set)
        values = {p: score_with(p) for p in free if budget.allows(used, sizes[p])}
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


# ---------------------------------------------------------------------------------------------- the output `summary`


class SummaryFigures(NamedTuple):
    """Figures of summaries, [..., width] each: the beginning of a row result, in this order."""

    rouge: Any
    """ROUGE-1, 2 and L of the summary."""
    bleu: Any
    """The counts of its BLEU (`count_bleu`)."""
    lead_rouge: Any
    """The same of the document's first sentences under the same budget."""
    lead_bleu: Any
    oracle_rouge: Any
    """ROUGE of the oracle's sentences."""
    loss: Any
    """Mean loss of a sentence."""


_ROUGES = len(ROUGE_NAMES)
_FIGURE_ENDS = np.cumsum([_ROUGES, BLEU_COUNTS, _ROUGES, BLEU_COUNTS, _ROUGES, 1])
NUM_FIGURES = int(_FIGURE_ENDS[-1])
"""Numbers of a row result before its sentences."""


class SentenceResults(NamedTuple):
    """[sentences of the document] each, in order: the pairs after the figures in a row result."""

    probability: Any
    """Probability that the sentence is selected; -1 if it was not read."""
    is_picked: Any
    """Whether it is in the summary."""


def encode_result(figures: SummaryFigures, sentences: SentenceResults) -> Floats:
    """The row result of a document."""
    return np.concatenate([*figures, np.stack(sentences, axis=1).ravel()]).astype(np.float64)


def decode_figures(row_results: RaggedArray) -> SummaryFigures:
    """The figures of all rows, [rows, width] each."""
    rows = np.array([row[:NUM_FIGURES] for row in row_results]).reshape(-1, NUM_FIGURES)
    return SummaryFigures(*np.split(rows, _FIGURE_ENDS[:-1], axis=1))


def decode_result(row_result: Floats) -> SentenceResults:
    """The sentences of a row result."""
    probabilities, is_picked = row_result[NUM_FIGURES:].reshape(-1, 2).T
    return SentenceResults(probabilities, is_picked > 0)


def make_summary_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """ROUGE-1, 2 and L (mean F1, 0 to 1), their mean, and BLEU (of the corpus, 0 to 100) of the summaries under the
    head's budget; of the first sentences under the same budget, which a model must beat; and ROUGE of the oracle's
    sentences, which are learned, however long they are. The difference to the first sentences has its own interval,
    since a document is hard or easy for both."""
    rows = decode_figures(row_results)
    return combine_metrics(
        _make_rouge_metric("", rows.rouge),
        SumMetric(rows.bleu, lambda sums: {"bleu": compute_bleu(sums)}),
        _make_rouge_metric("lead_", rows.lead_rouge),
        SumMetric(rows.lead_bleu, lambda sums: {"lead_bleu": compute_bleu(sums)}),
        _make_rouge_metric("oracle_", rows.oracle_rouge),
        _make_rouge_metric("over_lead_", rows.rouge - rows.lead_rouge),
        SumMetric(np.concatenate([rows.bleu, rows.lead_bleu], axis=1), _compute_bleu_over_lead),
    )


def _make_rouge_metric(prefix: str, columns: Floats) -> SumMetric:
    """`columns` is [rows, ROUGES]. The mean of each column, and the mean of all."""
    column_by_name = {"rouge": columns.mean(axis=1), **dict(zip(ROUGE_NAMES, columns.T, strict=True))}
    return make_mean_metric({f"{prefix}{name}": column for name, column in column_by_name.items()})


def _compute_bleu_over_lead(sums: Floats) -> dict[str, Floats]:
    summary_sums, lead_sums = np.split(sums, 2, axis=-1)
    return {"over_lead_bleu": compute_bleu(summary_sums) - compute_bleu(lead_sums)}


class _AllSentences(NamedTuple):
    """[sentences of all rows] each."""

    in_oracle: Bools
    is_picked: Bools
    probability: Floats
    tenth: Ints
    """The sentence's tenth of its document."""


def _collect_sentences(row_results: RaggedArray, targets: RaggedArray) -> _AllSentences:
    rows = [(np.empty(0, np.bool_), np.empty(0, np.bool_), np.empty(0), np.empty(0, np.int64))]
    for row, row_targets in zip(row_results, targets, strict=True):
        in_oracle, result = decode_sentences(row_targets).in_oracle, decode_result(row)
        tenths = np.arange(len(in_oracle)) * TENTHS // max(1, len(in_oracle))
        rows.append((in_oracle, result.is_picked, result.probability, tenths))
    return _AllSentences(*map(np.concatenate, zip(*rows, strict=True)))


def compute_extra_summary_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, float]:
    """The AUC of telling the oracle's sentences from the others by their probability, over all that were read."""
    sentences = _collect_sentences(row_results, targets)
    is_read = sentences.probability >= 0
    in_oracle, probability = sentences.in_oracle[is_read].astype(np.int64), sentences.probability[is_read]
    area, _ = compute_auc(in_oracle, probability[:, None] * np.array([-1.0, 1.0]))
    return {} if area is None else {"auc": area}


def build_summary_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    sentences = _collect_sentences(row_results, targets)
    selected = {"oracle": sentences.in_oracle, "picked": sentences.is_picked}
    positions = {name: np.bincount(sentences.tenth[mask], minlength=TENTHS).tolist() for name, mask in selected.items()}
    is_read, probability = sentences.probability >= 0, sentences.probability
    confidence, is_correct = np.maximum(probability, 1 - probability), (probability >= 0.5) == sentences.in_oracle
    return {
        "positions": {"tenths": TENTHS, **positions},
        "calibration": build_calibration_table(confidence[is_read], is_correct[is_read]),
        **(_build_summary_lengths(row_results, targets, head) if len(row_results) else {}),
    }


def _build_summary_lengths(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    budget, sums, num_over_budget = int(head.facts["max_words"]), np.zeros((3, 2)), 0
    for row, row_targets in zip(row_results, targets, strict=True):
        sentences, is_picked = decode_sentences(row_targets), decode_result(row).is_picked
        selections = (np.ones_like(is_picked), is_picked, sentences.in_oracle)
        sums += [[int(mask.sum()), int(sentences.words[mask].sum())] for mask in selections]
        num_over_budget += int(sentences.words[is_picked].sum()) > budget
    means = [{"sentences": float(a), "words": float(b)} for a, b in sums / len(row_results)]
    figures = decode_figures(row_results)
    gain = figures.rouge.mean(axis=1) - figures.lead_rouge.mean(axis=1)
    return {
        "lengths": {
            "budget": budget,
            "over_budget": num_over_budget,
            **dict(zip(("document", "picked", "oracle"), means, strict=True)),
        },
        "compared_with_lead": {
            "better": int((gain > ROUGE_TOLERANCE).sum()),
            "same": int((np.abs(gain) <= ROUGE_TOLERANCE).sum()),
            "worse": int((gain < -ROUGE_TOLERANCE).sum()),
        },
    }
