"""The page itself: tiles and sections laid out by `page.html`.

No script, no request: the page forbids both to itself (Content-Security-Policy). Text of the data reaches it escaped,
by the template (`autoescape`) and by `svg.tag`; control characters are shown as their escapes.
"""

import re
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.report.drawing.blocks import Section, Tile
from rtrain.report.drawing.svg import visible

_PIECE = re.compile(r"\s+|[(+-]{0,2}\d{1,12}(?:[.,]\d{1,12})+[,;:.)]*|[^\s_/.:-]{1,22}[_/.:-]*|[_/.:-]+")
"""What of a cell stays on one line: figures as a whole."""


def render(name: str, about: str, tiles: Sequence[Tile], sections: Sequence[Section], lead: str = "") -> str:
    """The whole page, with the time at which it was made. `about` says of what it is, `lead` what comes first: the
    outcome in a sentence."""
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return str(_template().render(name=name, about=about, lead=lead, made=made, tiles=tiles, sections=sections))


def write(path: Path, text: str, fix: str = "make room there, or the folder writable") -> Path:
    """Write a page, whole or not at all: a reader never sees half of one. Raises `UserError` where it cannot be
    written."""
    try:
        with atomic_write.replacement(path) as draft:
            draft.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); {fix}", code="unwritable") from None
    return path


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown, trim_blocks=True
    )
    environment.filters["breakable"] = _breakable
    return environment.from_string((resources.files("rtrain.report.drawing") / "page.html").read_text(encoding="utf-8"))


def _breakable(cell: Any) -> Any:
    """A cell whose long names may be broken after `_`, `/` and the like; one without these may be broken anywhere."""
    if not isinstance(cell, str):
        return cell
    return Markup("<wbr>").join(_PIECE.findall(visible(cell)))


def _shown(value: Any) -> Any:
    """What `{{ }}` prints: figures with separators, text without invisible characters, charts as they are."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
