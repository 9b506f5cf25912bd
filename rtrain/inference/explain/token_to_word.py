"""Sum the attributions of tokens by word and sentence, by the characters of each token."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import regex

from rtrain.core.ragged import EncodedRow
from rtrain.core.text_segmentation import LETTER_PATTERN, SYMBOL_PATTERN, Span, find_sentence_spans

# Ideographs have no spaces between words.
_LETTER = rf"(?:(?![\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]){LETTER_PATTERN})"
_WORD = regex.compile(rf"{_LETTER}(?:{_LETTER}|['\u2019-](?={_LETTER})|(?<=\d)[.,:](?=\d))*|{SYMBOL_PATTERN}")


class AttributedSpan(NamedTuple):
    """A word or a sentence: characters [start, end) of its text, and its attribution."""

    start: int
    end: int
    attribution: float


def word_spans(text: str) -> list[Span]:
    """Return words, numbers, punctuation marks, ideographs and emoji; each non-space character is in exactly one.

    Words keep inner apostrophes and hyphens, numbers inner points; every other character is a word.

    """
    return [match.span() for match in _WORD.finditer(text)]


def text_indices(encoded: EncodedRow, special: Sequence[bool], paired: bool) -> list[int]:
    """Return the text of each token: first (0), second (1), or none (-1) for special tokens."""
    indices: list[int] = []
    for window in encoded.windows:
        begin = len(indices)
        # Without token types, the second text begins after the first special token that follows a token.
        has_token_types, has_seen_token, is_second_text = window.pair_start < window.num_tokens, False, False
        for token_index in range(window.num_tokens):
            if special[begin + token_index]:
                is_second_text = is_second_text or has_seen_token
                indices.append(-1)
                continue
            has_seen_token = True
            indices.append(int(paired and (token_index >= window.pair_start if has_token_types else is_second_text)))
    return indices


def attribute_words(text: str, token_spans: Sequence[Span], attributions: Sequence[float]) -> list[AttributedSpan]:
    """Return the words in order with their attributions. A token that covers several words joins them into one.

    The sum over the words is the sum over the tokens.

    """
    text_end = max((end for _, end in token_spans), default=0)
    spans = [span for span in word_spans(text) if span[0] < text_end] or ([(0, text_end)] if token_spans else [])
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    joins_previous = [False] * len(spans)  # to the word before
    word_of_token = []
    for start, end in token_spans:
        # A token of spaces only belongs to the next word, or to the last word of the text.
        first = min(bisect.bisect_right(ends, start), len(spans) - 1)
        last = max(first, bisect.bisect_left(starts, end) - 1)
        joins_previous[first + 1 : last + 1] = [True] * (last - first)
        word_of_token.append(first)
    totals = [0.0] * len(spans)
    for word_index, attribution in zip(word_of_token, attributions, strict=True):
        totals[word_index] += attribution
    attributed_words: list[AttributedSpan] = []
    for (start, end), total, join in zip(spans, totals, joins_previous, strict=True):
        previous = attributed_words.pop() if join else AttributedSpan(start, end, 0.0)
        attributed_words.append(AttributedSpan(previous.start, end, previous.attribution + total))
    return attributed_words


def attribute_sentences(text: str, words: Sequence[AttributedSpan]) -> list[AttributedSpan]:
    """Return the sentences in order, each with the sum of its words."""
    spans = find_sentence_spans(text)
    starts = [start for start, _ in spans]
    totals: dict[int, float] = {}
    for word in words:
        sentence_index = max(0, bisect.bisect_right(starts, word.start) - 1)
        totals[sentence_index] = totals.get(sentence_index, 0.0) + word.attribution
    return [AttributedSpan(*spans[place], total) for place, total in totals.items()] if spans else []
