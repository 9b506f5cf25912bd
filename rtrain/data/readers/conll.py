"""CoNLL columns -> sentences of tokens and BIO tags. A sentence that cannot be used keeps its line and the reason.

One token per line, columns separated by a tab or by blanks, an empty line after each sentence, `-DOCSTART-` lines
between documents (Tjong Kim Sang and De Meulder 2003). Tags may be BIO (IOB2), IOB1 or IO: they become BIO.
"""

import re
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from rtrain.data.readers.values import replace_surrogates

_TAG = re.compile(r"O|[BI]-.+")
# Only blanks separate: a token may hold a no-break space, at which str.split() would cut it.
_SEPARATOR = re.compile(" +")


class Sentence(NamedTuple):
    """One sentence. `line` is the line of its first token, from 1; `reason` says why it cannot be used, or is None.

    A sentence with a reason has no tokens, since one bad line makes the tags of the others doubtful.
    """

    line: int
    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    reason: str | None


class _InvalidLine(Exception):
    """Why a line cannot be used, and what to do."""


def read_sentences(file: IO[bytes], labeled: bool = True) -> Iterator[Sentence]:
    """The sentences of a file, in order: a line's first column is the token, its last the tag.

    Without `labeled`, tags are optional and are kept verbatim. The file's first line with both columns sets the number
    of columns of every line.
    """
    columns, min_columns = 0, 2 if labeled else 1
    start, tokens, tags, reason = 0, list[str](), list[str](), ""
    for number, content in _iter_lines(file):
        if not content.strip(" \t") or content.startswith("-DOCSTART-"):
            if start:
                yield _make_sentence(start, tokens, tags, reason or _check_numbered_tokens(tokens, columns), labeled)
            start, tokens, tags, reason = 0, [], [], ""
            continue
        start = start or number
        try:
            values = content.split("\t") if "\t" in content else _SEPARATOR.split(content.strip(" "))
            if len(values) < min_columns or len(values) != (columns or len(values)):
                has = f"has {len(values)} column{'s' * (len(values) != 1)} instead of {columns or min_columns}"
                raise _InvalidLine(f"{has}; separate columns by one tab, or by blanks")
            columns = len(values)
            tokens.append(_validate_token(values[0]))
            if labeled:
                tags.append(_validate_tag(values[-1].strip(" ")))
            elif columns > 1:
                tags.append(replace_surrogates(values[-1].strip(" ")))
        except _InvalidLine as bad:
            reason = reason or f"line {number} {bad}"
    if start:
        yield _make_sentence(start, tokens, tags, reason or _check_numbered_tokens(tokens, columns), labeled)


def _check_numbered_tokens(tokens: Sequence[str], columns: int) -> str:
    """Why the first column cannot hold words, or an empty text: some files number the words in it."""
    if columns < 3 or len(tokens) < 3 or tokens != [str(number) for number in range(1, len(tokens) + 1)]:
        return ""
    return "its first column counts the words; write the words in the first column and BIO tags in the last"


def to_bio(tags: Sequence[str]) -> tuple[str, ...]:
    """BIO tags for tags that are BIO, IOB1 or IO: an entity begins at each B-, and at each I- that follows no tag of
    its type.

    Two IO entities of one type that touch become one, since IO tags do not show the border.
    """
    bio_tags: list[str] = []
    previous_type = ""
    for tag in tags:
        prefix, _, type = tag.partition("-")
        begins = prefix == "B" or type != previous_type
        bio_tags.append(f"{'B' if begins else 'I'}-{type}" if type else "O")
        previous_type = type
    return tuple(bio_tags)


def _make_sentence(start: int, tokens: list[str], tags: list[str], reason: str, labeled: bool) -> Sentence:
    if reason:
        return Sentence(start, (), (), reason)
    are_tags = labeled or all(_TAG.fullmatch(tag) for tag in tags)
    return Sentence(start, tuple(tokens), to_bio(tags) if are_tags else tuple(tags), None)


def _iter_lines(file: IO[bytes]) -> Iterator[tuple[int, str]]:
    """(number, text) of each line, without its end. Bytes that are not UTF-8 become lone surrogates, so only their
    sentence is bad."""
    for number, line in enumerate(file, start=1):
        text = line.decode("utf-8", errors="surrogateescape").rstrip("\r\n")
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _validate_token(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _InvalidLine("is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8, or from utf-16") from None
    if "\r" in value:
        raise _InvalidLine("holds a carriage return; end lines by a newline")
    if not value.strip(" "):
        raise _InvalidLine("has an empty token; write one or remove the line")
    return value


def _validate_tag(value: str) -> str:
    if _TAG.fullmatch(value) is None:
        raise _InvalidLine(f"has the tag {value[:40]!a}, not O, B-TYPE or I-TYPE; write BIO tags in the last column")
    return value
