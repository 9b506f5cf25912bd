"""Targets of a summary row: sentences and encoded words of a document and its reference, as integers without text.

    sentences, then for each: first token, token after the last, in oracle, words
    for ROUGE, then for BLEU: words of the reference, their numbers; for each sentence: numbers in its code, the code

Words are tokenized as the score requires; equal words have equal numbers. In a sentence's code, a word of the reference
is its number, and -n stands for n consecutive words that the reference lacks: these match nothing, so the scores are
exact, and most of a document is not stored twice. The codes give ROUGE and BLEU of any selection of sentences without
the texts.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rtrain.metrics import rouge
from rtrain.metrics.sums import Bools, Floats, Ints

SENTENCE_COLUMNS = 4
NUM_FIGURES = 2 * (len(rouge.ROUGE_NAMES) + rouge.BLEU_COUNTS) + len(rouge.ROUGE_NAMES) + 1
"""Numbers of a row result before its sentences: ROUGE-1, 2 and L of the summary and the counts of its BLEU; the same
for the lead sentences; ROUGE-1, 2 and L of the oracle's sentences; the mean loss of a sentence."""
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


def encode_summary_row(
    sentences: Sequence[str], token_ranges: Sequence[tuple[int, int]], oracle_positions: Sequence[int], reference: str
) -> list[int]:
    """`token_ranges`: first token of each sentence and the token after its last; `oracle_positions`: positions of the
    target sentences."""
    numbers = [len(sentences)]
    for position, (token_range, words) in enumerate(zip(token_ranges, rouge.count_words(sentences), strict=True)):
        numbers += [*token_range, int(position in oracle_positions), words]
    for tokenize in (rouge.tokenize_for_rouge, rouge.tokenize_for_bleu):
        numbers += _encode_words(tokenize, sentences, reference)
    return numbers


def decode_sentences(values: Any) -> DocumentSentences:
    """The sentences that a row's targets describe."""
    count = int(values[0])
    table = np.asarray(values[1 : 1 + SENTENCE_COLUMNS * count], dtype=np.int64).reshape(count, SENTENCE_COLUMNS)
    return DocumentSentences(table[:, 0], table[:, 1], table[:, 2] > 0, table[:, 3])


def decode_result(row_result: Floats) -> tuple[Floats, Bools]:
    """From a row result, the probability of each sentence (-1 if not read), and whether it is in the summary."""
    probabilities, is_picked = row_result[NUM_FIGURES:].reshape(-1, 2).T
    return probabilities, is_picked > 0


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
