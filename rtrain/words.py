"""Where the words and the sentences of running text are, in any script; no model needed.

`re` knows neither marks nor pictographs: its \\w ends a word at each vowel sign of Hindi or Thai, at the harakat of
Arabic and at an accent that stands behind its letter, and an emoji of several code points falls into pieces.
"""

import re
from typing import Final

import regex

LETTER: Final = r"(?:[\p{L}\p{N}_][\p{M}\u200c\u200d]*)"
"""Part of a pattern: a letter or digit with its marks, and with the joiners that shape it (Persian, Malayalam)."""
PIECE: Final = r"(?:\p{Cf}|(?![\s\x1c-\x1f])\X)"
"""Anything else that is no blank: a punctuation mark, a whole emoji, a mark without its letter, an unseen control."""

_WORD = regex.compile(rf"{LETTER}(?:\S*{LETTER})?|{PIECE}")


def word_spans(text: str) -> list[tuple[int, int]]:
    """As annotators cut words: punctuation inside a word stays, before and after it is a word of its own.

    Scripts without blanks between words (Thai, Chinese) are cut at punctuation alone: their words take a dictionary.
    """
    return [match.span() for match in _WORD.finditer(text)]


Span = tuple[int, int]
"""Characters [start, end)."""

# Of Latin script, Hindi (dandas), Arabic and Urdu, then what closes a quotation; the full-width marks of Chinese and
# Japanese need no blank behind them.
_END = re.compile(
    r"""[.!?\u2026\u0964\u0965\u061f\u06d4]+["'\u2019\u201d\xbb)\]]*(?=\s)|[\u3002\uff01\uff1f]+[\u300d\u300f\u2019\u201d\uff09]*|\n\s*"""
)
_TITLES = frozenset({"mr", "mrs", "ms", "dr", "prof", "st", "vs"})


def sentence_spans(text: str) -> list[Span]:
    """Sentences without the blanks around them. A full stop before a small letter, or after a title or an initial, ends
    none; in a text without capitals one before a small letter does."""
    found: list[Span] = []
    start, capitals = 0, any(character.isupper() for character in text)
    for match in _END.finditer(text):
        if _ends(text, match, capitals):
            found += _trimmed(text, start, match.end())
            start = match.end()
    return found + _trimmed(text, start, len(text))


def _ends(text: str, match: re.Match[str], capitals: bool) -> bool:
    if not match[0].startswith("."):
        return True
    before = re.search(r"\w*$", text[max(0, match.start() - 20) : match.start()])
    word = before[0] if before else ""
    initial = len(word) == 1 and (word.isupper() or (word.isalpha() and not capitals))
    goes_on = capitals and text[match.end() :].lstrip()[:1].islower()
    return not (goes_on or word.lower() in _TITLES or initial)


def _trimmed(text: str, start: int, end: int) -> list[Span]:
    inner = text[start:end]
    first, last = start + len(inner) - len(inner.lstrip()), start + len(inner.rstrip())
    return [(first, last)] if first < last else []
