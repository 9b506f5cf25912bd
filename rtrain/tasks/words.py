"""Words of running text in any script.

`re` knows neither marks nor pictographs: its \\w ends a word at each vowel sign of Hindi or Thai, at the harakat of
Arabic and at an accent that stands behind its letter, and an emoji of several code points falls into pieces.
"""

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
