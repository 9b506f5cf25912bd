"""What is kept of a document and its reference summary beside the document's tokens: whole numbers, no text.

    sentences, then for each: first token, token behind the last, taken, words
    for ROUGE, then for BLEU: words of the reference, their numbers; for each sentence: numbers in its code, the code

Words are as the score cuts them, equal words have equal numbers. In a sentence's code a word that the reference has is
its number, and -n stands for n words in a row that it has not: these match nothing, so the scores are exact, and most
of a document is not kept twice. With them ROUGE and BLEU of any choice of sentences are known wherever the row is.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rtrain.metrics import rouge
from rtrain.metrics.sums import Bools, Floats, Ints

COLUMNS = 4
FIGURES = 2 * (len(rouge.ROUGES) + rouge.BLEU_COUNTS) + len(rouge.ROUGES) + 1
"""Numbers of a row's outcome before its sentences: ROUGE-1, 2 and L of the summary and the counts of its BLEU; the same
of the first sentences; ROUGE-1, 2 and L of the oracle's sentences; the mean loss of a sentence."""
OTHER = "-"
"""Stands for any word that the reference lacks."""


class Sentences(NamedTuple):
    """[sentences of the document] each, in order."""

    first: Ints
    """Place of each sentence's first token in the row."""
    end: Ints
    """Place behind its last token; equal to `first` where the sentence was not read."""
    taken: Bools
    """Whether the oracle takes the sentence, which is what the model learns."""
    words: Ints
    """Words between blanks, as a budget counts them."""

    @property
    def read(self) -> Bools:
        return self.end > self.first


class Words(NamedTuple):
    """The words of a reference and of a document's sentences, as one of the scores cuts them."""

    reference: list[str]
    sentences: list[list[str]]

    def of(self, positions: Iterable[int]) -> list[str]:
        """The words of a summary of these sentences."""
        return [word for position in positions for word in self.sentences[position]]


def write(
    sentences: Sequence[str], places: Sequence[tuple[int, int]], taken: Sequence[int], reference: str
) -> list[int]:
    """`places`: first token of each sentence and the one behind its last; `taken`: positions of those to learn."""
    found = [len(sentences)]
    for position, (place, words) in enumerate(zip(places, rouge.lengths(sentences), strict=True)):
        found += [*place, int(position in taken), words]
    for cut in (rouge.rouge_words, rouge.bleu_words):
        found += _coded(cut, sentences, reference)
    return found


def sentences_of(values: Any) -> Sentences:
    """The sentences that a row's targets describe."""
    count = int(values[0])
    table = np.asarray(values[1 : 1 + COLUMNS * count], dtype=np.int64).reshape(count, COLUMNS)
    return Sentences(table[:, 0], table[:, 1], table[:, 2] > 0, table[:, 3])


def answered(outcome: Floats) -> tuple[Floats, Bools]:
    """From a row's outcome, the chance of each sentence (-1 where not read), and whether it is in the summary."""
    chances, given = outcome[FIGURES:].reshape(-1, 2).T
    return chances, given > 0


def words_of(values: Any) -> tuple[Words, Words]:
    """The words that a row's targets hold, as ROUGE cuts them and as BLEU does."""
    count = int(values[0])
    rest = iter(np.asarray(values[1 + COLUMNS * count :], dtype=np.int64).tolist())
    return _words(rest, count), _words(rest, count)


def _coded(cut: Callable[[str], list[str]], sentences: Sequence[str], reference: str) -> list[int]:
    wanted = cut(reference)
    number = {word: place for place, word in enumerate(dict.fromkeys(wanted))}
    found = [len(wanted), *(number[word] for word in wanted)]
    for sentence in sentences:
        code: list[int] = []
        for known, words in itertools.groupby(cut(sentence), number.__contains__):
            run = list(words)
            code += [number[word] for word in run] if known else [-len(run)]
        found += [len(code), *code]
    return found


def _words(values: Iterator[int], count: int) -> Words:
    reference = [str(number) for number in itertools.islice(values, next(values))]
    sentences = []
    for _ in range(count):
        code = itertools.islice(values, next(values))
        sentences.append([word for number in code for word in ([str(number)] if number >= 0 else [OTHER] * -number)])
    return Words(reference, sentences)
