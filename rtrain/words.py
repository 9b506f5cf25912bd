"""The words and the sentences of running text, as spans of characters, in any script. No model is needed.

The module `re` knows neither marks nor pictographs: its \\w ends a word at each vowel sign of Hindi or Thai, at the
harakat of Arabic and at an accent behind its letter, and it cuts an emoji of several code points into pieces.
"""

import re
from typing import Final

import regex

LETTER: Final = r"(?:[\p{L}\p{N}_][\p{M}\u200c\u200d]*)"
"""Part of a pattern: a letter or digit with its marks, and with the joiners that shape it (Persian, Malayalam)."""
PIECE: Final = r"(?:\p{Cf}|(?![\s\x1c-\x1f])\X)"
"""Part of a pattern: anything else but a blank, such as a punctuation mark, a whole emoji, a mark without its letter or
an invisible control character."""

_WORD = regex.compile(rf"{LETTER}(?:\S*{LETTER})?|{PIECE}")


def word_spans(text: str) -> list[tuple[int, int]]:
    """The characters [start, end) of each word, cut as annotators cut words.

    Punctuation inside a word stays in it; punctuation before or behind a word is a word of its own. Scripts without
    blanks between words (Thai, Chinese) are cut only at punctuation, since finding their words takes a dictionary.
    """
    return [match.span() for match in _WORD.finditer(text)]


Span = tuple[int, int]
"""Characters [start, end)."""

# The ends of sentences in Latin script, Hindi (dandas), Arabic and Urdu, and then the marks that close a quotation. The
# full-width marks of Chinese and Japanese need no blank behind them.
_END = re.compile(
    r"""[.!?\u2026\u0964\u0965\u061f\u06d4]+["'\u2019\u201d\xbb)\]]*(?=\s)|[\u3002\uff01\uff1f]+[\u300d\u300f\u2019\u201d\uff09]*|\n\s*"""
)
_NEXT = re.compile(r"\s*(\S)")
_TITLES = frozenset({"mr", "mrs", "ms", "dr", "prof", "st", "vs"})


def sentence_spans(text: str) -> list[Span]:
    """The characters [start, end) of each sentence, without the blanks around it.

    A full stop after a title or an initial ends no sentence. Before a small letter it ends one only in texts without
    any capitals.
    """
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
    following = _NEXT.match(text, match.end())
    goes_on = capitals and following is not None and following[1].islower()
    return not (goes_on or word.lower() in _TITLES or initial)


def _trimmed(text: str, start: int, end: int) -> list[Span]:
    inner = text[start:end]
    first, last = start + len(inner) - len(inner.lstrip()), start + len(inner.rstrip())
    return [(first, last)] if first < last else []
