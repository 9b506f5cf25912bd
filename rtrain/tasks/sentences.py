"""Where the sentences of a text are; no model needed. For explanations by sentence, and for summaries."""

import re

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
