"""The words and the sentences of running text, as spans of characters, in any script. No model is needed.

The module `re` knows neither marks nor pictographs: its \\w ends a word at each vowel sign of Hindi or Thai, at the
harakat of Arabic and at an accent behind its letter, and it cuts an emoji of several code points into pieces.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import regex

LETTER_PATTERN: Final = r"(?:[\p{L}\p{N}_][\p{M}\u200c\u200d]*)"
"""Part of a pattern: a letter or digit with its marks, and with the joiners that shape it (Persian, Malayalam)."""
SYMBOL_PATTERN: Final = r"(?:\p{Cf}|(?![\s\x1c-\x1f])\X)"
"""Part of a pattern: anything else but a blank, such as a punctuation mark, a whole emoji, a mark without its letter or
an invisible control character."""

_WORD = regex.compile(rf"{LETTER_PATTERN}(?:\S*{LETTER_PATTERN})?|{SYMBOL_PATTERN}")


Span = tuple[int, int]
"""Characters [start, end)."""


def find_word_spans(text: str, cut_before: str = "", cut_after: str = "") -> list[Span]:
    """The characters [start, end) of each word, cut as annotators cut words.

    Punctuation inside a word stays in it, except at the signs of `find_word_cuts`; punctuation before or behind a word
    is a word of its own. Scripts without blanks between words
    (Thai, Chinese) are cut only at punctuation, since finding their words takes a dictionary.
    """
    spans: list[Span] = []
    for match in _WORD.finditer(text):
        start, end = match.span()
        for position in range(start + 1, end):
            if text[position] in cut_before or text[position - 1] in cut_after:
                spans.append((start, position))
                start = position
        spans.append((start, end))
    return spans


_PUNCTUATION = regex.compile(r"[^\p{L}\p{N}\p{M}\p{Cf}_\s]")
_LETTER = regex.compile(LETTER_PATTERN)


def find_word_cuts(words: Iterable[str]) -> dict[str, str]:
    """Return the signs within running words at which a data set splits: `cut_before`, signs that begin words and never
    follow a letter, and `cut_after`, signs that end words and never precede a letter. So "AG's" is split like in the
    data set: not at all, before the apostrophe, or on both sides of it."""
    opening_signs, closing_signs, following_signs, preceding_signs = set[str](), set[str](), set[str](), set[str]()
    for word in words:
        for match in _PUNCTUATION.finditer(word):
            sign, position = match[0], match.start()
            (
                opening_signs
                if position == 0
                else following_signs
                if _LETTER.fullmatch(word[position - 1])
                else set[str]()
            ).add(sign)
            is_last = position == len(word) - 1
            (closing_signs if is_last else preceding_signs if _LETTER.match(word, position + 1) else set[str]()).add(
                sign
            )
    signs_by_side = {"cut_before": opening_signs - following_signs, "cut_after": closing_signs - preceding_signs}
    return {name: "".join(sorted(signs)) for name, signs in signs_by_side.items() if signs}


_NO_SPACE_BEFORE, _NO_SPACE_AFTER = frozenset(".,;:!?)]}%\u2026\u00bb\u201d"), frozenset("([{\u00ab\u201e\u00bf\u00a1")
_WORD_JOINERS, _DIGIT_JOINERS = frozenset("'\u2019-/&@_"), frozenset(".,:")
_CONTRACTION = re.compile(r"['\u2019]\w+|n['\u2019]t")


def join_words(words: Sequence[str]) -> tuple[str, list[Span]]:
    """Return (a text of the words, the span of each word): without blanks where most texts have none, for example
    before a comma or around an apostrophe."""
    text, spans = "", list[Span]()
    for position, word in enumerate(words):
        previous_word = words[position - 1] if position else ""
        word_before_previous = words[position - 2] if position > 1 else ""
        next_word = words[position + 1] if position + 1 < len(words) else ""
        has_no_space = (
            not previous_word
            or word[:1] in _NO_SPACE_BEFORE
            or previous_word in _NO_SPACE_AFTER
            or _CONTRACTION.fullmatch(word) is not None
            or _is_joiner(previous_word, word, next_word)
            or _is_joiner(word_before_previous, previous_word, word)
        )
        text += "" if has_no_space else " "
        spans.append((len(text), len(text) + len(word)))
        text += word
    return text, spans


def _is_joiner(left: str, sign: str, right: str) -> bool:
    """Whether a word of one sign has no blanks around it between these two words."""
    if sign in _DIGIT_JOINERS:
        return left[-1:].isdigit() and right[:1].isdigit()
    return sign in _WORD_JOINERS and left[-1:].isalnum() and right[:1].isalnum()


def get_word_cuts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of `find_word_spans` in a model's facts."""
    return {name: facts[name] for name in ("cut_before", "cut_after") if name in facts}


# The ends of sentences in Latin script, Hindi (dandas), Arabic and Urdu, and then the marks that close a quotation. The
# full-width marks of Chinese and Japanese need no blank behind them.
_SENTENCE_END = re.compile(
    r"""[.!?\u2026\u0964\u0965\u061f\u06d4]+["'\u2019\u201d\xbb)\]]*(?=\s)|[\u3002\uff01\uff1f]+[\u300d\u300f\u2019\u201d\uff09]*|\n\s*"""
)
_NEXT_CHARACTER = re.compile(r"\s*(\S)")
_TITLES = frozenset({"mr", "mrs", "ms", "dr", "prof", "st", "vs"})


def find_sentence_spans(text: str) -> list[Span]:
    """The characters [start, end) of each sentence, without the blanks around it.

    A full stop after a title or an initial ends no sentence. Before a small letter it ends one only in texts without
    any capitals.
    """
    spans: list[Span] = []
    start, has_capitals = 0, any(character.isupper() for character in text)
    for match in _SENTENCE_END.finditer(text):
        if _is_sentence_end(text, match, has_capitals):
            spans += _trim_span(text, start, match.end())
            start = match.end()
    return spans + _trim_span(text, start, len(text))


def _is_sentence_end(text: str, match: re.Match[str], has_capitals: bool) -> bool:
    if not match[0].startswith("."):
        return True
    last_word_match = re.search(r"\w*$", text[max(0, match.start() - 20) : match.start()])
    word = last_word_match[0] if last_word_match else ""
    is_initial = len(word) == 1 and (word.isupper() or (word.isalpha() and not has_capitals))
    next_match = _NEXT_CHARACTER.match(text, match.end())
    is_continued = has_capitals and next_match is not None and next_match[1].islower()
    return not (is_continued or word.lower() in _TITLES or is_initial)


def _trim_span(text: str, start: int, end: int) -> list[Span]:
    segment = text[start:end]
    first, last = start + len(segment) - len(segment.lstrip()), start + len(segment.rstrip())
    return [(first, last)] if first < last else []
