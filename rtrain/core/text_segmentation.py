"""The words and the sentences of running text, as spans of characters, in any script. No model is needed.

The module `re` knows neither marks nor pictographs: its \\w ends a word at each vowel sign of Hindi or Thai, at the
harakat of Arabic and at an accent behind its letter, and it cuts an emoji of several code points into pieces.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import regex

LETTER: Final = r"(?:[\p{L}\p{N}_][\p{M}\u200c\u200d]*)"
"""Part of a pattern: a letter or digit with its marks, and with the joiners that shape it (Persian, Malayalam)."""
PIECE: Final = r"(?:\p{Cf}|(?![\s\x1c-\x1f])\X)"
"""Part of a pattern: anything else but a blank, such as a punctuation mark, a whole emoji, a mark without its letter or
an invisible control character."""

_WORD = regex.compile(rf"{LETTER}(?:\S*{LETTER})?|{PIECE}")


Span = tuple[int, int]
"""Characters [start, end)."""


def word_spans(text: str, cut_before: str = "", cut_after: str = "") -> list[Span]:
    """The characters [start, end) of each word, cut as annotators cut words.

    Punctuation inside a word stays in it, except at the signs of `find_word_cuts`; punctuation before or behind a word
    is a word of its own. Scripts without blanks between words
    (Thai, Chinese) are cut only at punctuation, since finding their words takes a dictionary.
    """
    found: list[Span] = []
    for match in _WORD.finditer(text):
        first, end = match.span()
        for place in range(first + 1, end):
            if text[place] in cut_before or text[place - 1] in cut_after:
                found.append((first, place))
                first = place
        found.append((first, end))
    return found


_SIGN = regex.compile(r"[^\p{L}\p{N}\p{M}\p{Cf}_\s]")
_LETTER = regex.compile(LETTER)


def find_word_cuts(words: Iterable[str]) -> dict[str, str]:
    """The signs inside of running words at which a data set cuts: `cut_before` those that begin words and never follow
    a letter of one, `cut_after` those that end words and never precede a letter. So "AG's" is cut as the data set cuts
    it: not at all, before the apostrophe, or on both sides of it."""
    begin, end, follow, precede = set[str](), set[str](), set[str](), set[str]()
    for word in words:
        for match in _SIGN.finditer(word):
            sign, place = match[0], match.start()
            (begin if place == 0 else follow if _LETTER.fullmatch(word[place - 1]) else set[str]()).add(sign)
            last = place == len(word) - 1
            (end if last else precede if _LETTER.match(word, place + 1) else set[str]()).add(sign)
    found = {"cut_before": begin - follow, "cut_after": end - precede}
    return {name: "".join(sorted(signs)) for name, signs in found.items() if signs}


_NONE_BEFORE, _NONE_BEHIND = frozenset(".,;:!?)]}%\u2026\u00bb\u201d"), frozenset("([{\u00ab\u201e\u00bf\u00a1")
_BETWEEN_WORDS, _BETWEEN_DIGITS = frozenset("'\u2019-/&@_"), frozenset(".,:")
_CONTRACTED = re.compile(r"['\u2019]\w+|n['\u2019]t")


def join_words(words: Sequence[str]) -> tuple[str, list[Span]]:
    """(a text that the words may be of, where each word stands in it): blanks are left out where most texts have none,
    as before a comma or around an apostrophe."""
    text, spans = "", list[Span]()
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        two_before, behind = words[place - 2] if place > 1 else "", words[place + 1] if place + 1 < len(words) else ""
        glued = (
            not before
            or word[:1] in _NONE_BEFORE
            or before in _NONE_BEHIND
            or _CONTRACTED.fullmatch(word) is not None
            or _joins(before, word, behind)
            or _joins(two_before, before, word)
        )
        text += "" if glued else " "
        spans.append((len(text), len(text) + len(word)))
        text += word
    return text, spans


def _joins(before: str, sign: str, behind: str) -> bool:
    """Whether a word of one sign is written without blanks between these two words."""
    if sign in _BETWEEN_DIGITS:
        return before[-1:].isdigit() and behind[:1].isdigit()
    return sign in _BETWEEN_WORDS and before[-1:].isalnum() and behind[:1].isalnum()


def read_cuts(facts: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of `word_spans` that a model's facts hold."""
    return {name: facts[name] for name in ("cut_before", "cut_after") if name in facts}


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
