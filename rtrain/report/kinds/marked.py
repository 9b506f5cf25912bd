"""A row's text with its words, or the sentences of a long one, marked by what they add to the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rtrain.report.drawing.blocks import Marked, Piece
from rtrain.report.drawing.svg import number, short, three

LEVELS = 4
"""Strengths of a mark; the largest share of a row gets the strongest."""
FAINT = 0.06
"""A share below this part of the largest one is not marked."""
MANY_WORDS = 60
"""Words above which a text is marked by sentences. A single sentence is marked by words whatever its length."""
MOST_ANSWERS = 3
NAMED = 3
"""Parts for the answer, and against it, that are named below the text."""
NEAR = 250
"""Characters on either side of an entity that are drawn."""
LONGEST = 6000
"""Characters that are drawn."""


def legend(numbers: bool) -> list[Piece]:
    """What the marks mean; `numbers`: the answer is one."""
    ups, downs = ("raises", "lowers") if numbers else ("speaks for", "speaks against")
    return [
        Piece("solid line", "for l4"),
        Piece(f" {ups} the {'score' if numbers else 'answer'}; "),
        Piece("dashed line", "against l4"),
        Piece(f" {downs} it; the stronger the "),
        Piece("colour", "for l2"),
        Piece(" and the line, the larger the share."),
    ]


def answers(row: Mapping[str, Any], numbers: bool) -> list[Marked]:
    """The row's texts, marked once for each of its first answers; `numbers`: values are in the unit of the scores."""
    texts = [text for _, text in row["texts"]]
    return [_answer(texts, answer, numbers) for answer in row["answers"][:MOST_ANSWERS]]


def _answer(texts: Sequence[str], answer: Mapping[str, Any], numbers: bool) -> Marked:
    several = len(answer["sentences"]) > len(texts)
    # An entity rests on the words beside it, however long the text is.
    by_sentence = several and not answer["span"] and (numbers or len(answer["words"]) > MANY_WORDS)
    parts = answer["sentences" if by_sentence else "words"]
    largest = max((abs(part[3]) for part in parts), default=0.0)
    pieces = [_pieces(text, [part for part in parts if part[0] == place], largest) for place, text in enumerate(texts)]
    error = answer["completeness_error"]
    accuracy = "the words change nothing" if error is None else f"completeness error {_percent(error)}"
    moved = answer["value"] - answer["baseline"]
    note = (
        f"{'' if numbers else 'logit '}{three(answer['value'])} = {three(answer['baseline'])} without words, "
        f"{moved:+.3g} from these {'sentences' if by_sentence else 'words'}; {accuracy}"
    )
    head = short(answer["label"], 60)
    if answer["span"]:
        head += f" “{short(texts[0][slice(*answer['span'])], 40)}”"
    if answer["span"]:
        pieces = [_near(pieces[0], *answer["span"]), *pieces[1:]]
    return Marked(head, note, pieces, _named(texts, parts, numbers))


def _near(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """The pieces within `NEAR` characters of a span: else a long text is drawn whole for each of its entities."""
    found, at = [], 0
    for piece in pieces:
        first, at = at, at + len(piece.text)
        if at > start - NEAR and first < end + NEAR:
            low, high = max(0, start - NEAR - first), end + NEAR - first
            found.append(piece if piece.css else replace(piece, text=piece.text[low:high]))
    if start > NEAR and found:
        found.insert(0, Piece("… "))
    return [*found, Piece(" …")] if at > end + NEAR else found


def _pieces(text: str, parts: Sequence[Sequence[Any]], largest: float) -> list[Piece]:
    found, done = [], 0
    for _, start, end, share in parts:
        if start >= LONGEST:
            break
        if start > done:
            found.append(Piece(text[done:start]))
        level = _level(share, largest)
        side = "for" if share > 0 else "against"
        found.append(Piece(text[start:end], f"{side} l{level}" if level else "", f"{share:+.3g}"))
        done = end
    rest = text[done:]
    return [*found, Piece(rest if len(rest) + done <= LONGEST else " …")] if rest else found


def _level(share: float, largest: float) -> int:
    """0 (not marked) to LEVELS."""
    relative = abs(share) / largest if largest else 0.0
    return 0 if relative < FAINT else min(LEVELS, 1 + int(relative * LEVELS))


def _named(texts: Sequence[str], parts: Sequence[Sequence[Any]], numbers: bool) -> list[tuple[str, str]]:
    """(for or against, the parts with the largest shares), for readers who see no colours or cannot point at a word."""
    found = []
    for name, sign in zip(("raise it", "lower it") if numbers else ("for it", "against it"), (1, -1), strict=True):
        own = [part for part in parts if sign * part[3] > 0 and _says_something(texts[part[0]][part[1] : part[2]])]
        best = sorted(own, key=lambda part: -abs(part[3]))[:NAMED]
        if best:
            words = ", ".join(f"{short(texts[part[0]][part[1] : part[2]], 28)} {_signed(part[3])}" for part in best)
            found.append((name, words))
    return found


def _percent(share: float) -> str:
    return "under 0.01 %" if share < 1e-4 else f"{100 * share:.2g} %"


def _says_something(text: str) -> bool:
    """A comma's share is marked in the text; by itself it tells a reader nothing."""
    return any(letter.isalnum() for letter in text)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '-'}{number(float(f'{abs(value):.2g}'))}"
