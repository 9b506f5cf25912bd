"""Words and sentences of a text with the sum of their tokens' attributions, by the characters that tokens cover."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import regex

from rtrain.core.ragged import Encoded
from rtrain.core.text_segmentation import LETTER, PIECE, Span, sentence_spans

# Ideographs have no blanks between words.
_LETTER = rf"(?:(?![\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]){LETTER})"
_WORD = regex.compile(rf"{_LETTER}(?:{_LETTER}|['\u2019-](?={_LETTER})|(?<=\d)[.,:](?=\d))*|{PIECE}")


class Part(NamedTuple):
    """A word or a sentence: characters [start, end) of its text, and what it adds to the value."""

    start: int
    end: int
    attribution: float


def word_spans(text: str) -> list[Span]:
    """Words, numbers, punctuation marks, ideographs and emoji; each character that is no blank is in exactly one.

    Words keep inner apostrophes and hyphens, numbers inner points; of the others each character is a word.
    """
    return [match.span() for match in _WORD.finditer(text)]


def sides(encoded: Encoded, special: Sequence[bool], paired: bool) -> list[int]:
    """The text of each token: the first (0), the second (1), or none (-1), as for special tokens."""
    found: list[int] = []
    for window in encoded.windows:
        begin = len(found)
        # Where a model has no token types, the second text begins behind the first special token after the first.
        typed, seen, second = window.second < window.tokens, False, False
        for place in range(window.tokens):
            if special[begin + place]:
                second = second or seen
                found.append(-1)
                continue
            seen = True
            found.append(int(paired and (place >= window.second if typed else second)))
    return found


def add_up(text: str, pieces: Sequence[Span], attributions: Sequence[float]) -> list[Part]:
    """The words that were read, in order, with their sums; a piece that covers several words joins them into one.

    The sum over the parts is the sum of the attributions.
    """
    read = max((end for _, end in pieces), default=0)
    spans = [span for span in word_spans(text) if span[0] < read] or ([(0, read)] if pieces else [])
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    joined = [False] * len(spans)  # to the word before
    owners = []
    for start, end in pieces:
        # A piece that is only blanks belongs to the word behind it, or at the end of the text to the last word.
        first = min(bisect.bisect_right(ends, start), len(spans) - 1)
        last = max(first, bisect.bisect_left(starts, end) - 1)
        joined[first + 1 : last + 1] = [True] * (last - first)
        owners.append(first)
    totals = [0.0] * len(spans)
    for owner, attribution in zip(owners, attributions, strict=True):
        totals[owner] += attribution
    parts: list[Part] = []
    for (start, end), total, join in zip(spans, totals, joined, strict=True):
        before = parts.pop() if join else Part(start, end, 0.0)
        parts.append(Part(before.start, end, before.attribution + total))
    return parts


def by_sentence(text: str, words: Sequence[Part]) -> list[Part]:
    """The sentences that were read, in order, each with the sum of its words."""
    spans = sentence_spans(text)
    starts = [start for start, _ in spans]
    totals: dict[int, float] = {}
    for word in words:
        place = max(0, bisect.bisect_right(starts, word.start) - 1)
        totals[place] = totals.get(place, 0.0) + word.attribution
    return [Part(*spans[place], total) for place, total in totals.items()] if spans else []
