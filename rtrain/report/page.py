"""The HTML page of a report: tiles and sections, whose blocks are plain values, in the template `page.html`.

A Content-Security-Policy forbids scripts and requests. The template (`autoescape`) and `svg.make_element` escape all
text; control characters are shown as escapes.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.report.svg import escape_controls

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


_CELL_PIECE = re.compile(r"\s+|[(+-]{0,2}\d{1,12}(?:[.,]\d{1,12})+[,;:.)]*|[^\s_/.:-]{1,22}[_/.:-]*|[_/.:-]+")
"""Parts of a cell without a line break, e.g. figures."""


def render_html(name: str, about: str, tiles: Sequence[Tile], sections: Sequence[Section], lead: str = "") -> str:
    """Render the page with its time of creation.

    Args:
        about: description of the subject.
        lead: the outcome in a sentence.
    """
    created_at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return str(
        _load_template().render(
            name=name, about=about, lead=lead, created_at=created_at, tiles=tiles, sections=sections
        )
    )


def write_page(path: Path, text: str, fix: str = "free disk space, or make the folder writable") -> Path:
    """Write a page atomically. Raises `UserError` if it cannot be written."""
    try:
        with atomic_write.replace_file(path) as draft:
            draft.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); {fix}", code="unwritable") from None
    return path


def _load_template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_finalize, trim_blocks=True
    )
    environment.filters["breakable"] = _make_breakable
    return environment.from_string((resources.files("rtrain.report") / "page.html").read_text(encoding="utf-8"))


def _make_breakable(cell: Any) -> Any:
    """Allow line breaks in a cell after `_`, `/` and similar characters."""
    if not isinstance(cell, str):
        return cell
    return Markup("<wbr>").join(_CELL_PIECE.findall(escape_controls(cell)))


def _finalize(value: Any) -> Any:
    """Format values of `{{ }}`: integers with separators, text without invisible characters, charts unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value
