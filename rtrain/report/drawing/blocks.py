"""What a section of the report is made of: plain values, which `page` turns into HTML."""

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
    """A chart: the title says what to see in it, the note how to read it."""

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
        """Whether all cells of the column are figures, which are set flush right."""
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
    """One row of the data with its answer."""

    text: str
    facts: Sequence[tuple[str, str]]
    where: str


@dataclass(frozen=True)
class Cards:
    title: str
    cards: Sequence[Card]
    note: str
    wide: bool = True
    kind: str = field(default="cards", init=False)


@dataclass(frozen=True)
class Note:
    """A sentence across the page, e.g. why something that a reader may look for is missing."""

    text: str
    wide: bool = True
    kind: str = field(default="note", init=False)


@dataclass(frozen=True)
class Step:
    """One thing to do: what, the figure that calls for it, and the command where one command does it."""

    what: str
    why: str
    command: str = ""


@dataclass(frozen=True)
class Steps:
    title: str
    steps: Sequence[Step]
    note: str = ""
    wide: bool = True
    kind: str = field(default="steps", init=False)


Block = Figure | Table | Code | Cards | Note | Steps


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
