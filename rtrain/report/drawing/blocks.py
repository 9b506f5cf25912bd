"""Blocks of a report section as plain values; `page` renders them as HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

Cell = str | int | float
_FIGURE = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?( ?(%|s)| to -?[\d.]+)?|-")


def _is_figure(cell: Cell) -> bool:
    return not isinstance(cell, str) or _FIGURE.fullmatch(cell) is not None


@dataclass(frozen=True)
class Figure:
    """A chart. The title states the finding, the note explains the chart."""

    title: str
    chart: Markup
    note: str
    wide: bool = False
    kind: str = field(default="figure", init=False)


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    wide: bool = False
    kind: str = field(default="table", init=False)

    def is_figure(self, column: int) -> bool:
        """Whether all cells of the column are figures, which are aligned to the right."""
        cells = [row[column] for row in self.rows]
        return any(cell != "-" for cell in cells) and all(map(_is_figure, cells))


@dataclass(frozen=True)
class Code:
    """A command to copy."""

    title: str
    text: str
    note: str = ""
    wide: bool = True
    kind: str = field(default="code", init=False)


@dataclass(frozen=True)
class Card:
    """A row of the data with its prediction."""

    text: str
    facts: Sequence[tuple[str, str]]
    location: str


@dataclass(frozen=True)
class Cards:
    title: str
    cards: Sequence[Card]
    note: str
    wide: bool = True
    kind: str = field(default="cards", init=False)


@dataclass(frozen=True)
class Note:
    """A sentence across the page, e.g. the reason for a missing chart."""

    text: str
    wide: bool = True
    kind: str = field(default="note", init=False)


@dataclass(frozen=True)
class Recommendation:
    """A recommended action, the figure that is its reason, and optionally its command."""

    action: str
    reason: str
    command: str = ""


@dataclass(frozen=True)
class RecommendationList:
    title: str
    recommendations: Sequence[Recommendation]
    note: str = ""
    wide: bool = True
    kind: str = field(default="recommendations", init=False)


Block = Figure | Table | Code | Cards | Note | RecommendationList


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    intro: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    name: str
    value: str
    note: str = ""
