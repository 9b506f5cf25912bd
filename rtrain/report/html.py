"""report.html: one page that needs nothing else, made from a run folder alone.

No script, no request: the page forbids both to itself (Content-Security-Policy). Text of the data reaches it escaped,
by the template (`autoescape`) and by `svg.tag`; control characters are shown as their escapes.
"""

import re
import time
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rtrain.errors import UserError
from rtrain.report import attributions, collect
from rtrain.report.progress import say
from rtrain.report.sections import answers, certificate, curves, data, hardest, overview, slices, timing
from rtrain.report.svg import visible

NAME = "report.html"
_PIECE = re.compile(r"\s+|[^\s_/.:-]{1,22}[_/.:-]*|[_/.:-]+")


def make(folder: Path) -> Path:
    """`write`, with the attributions of the hardest rows where they can be had. Raises as `write` does."""
    run = collect.read(folder)
    try:
        attributions.ensure(run.folder)
    except UserError as error:
        say(f"no attributions: {error}")
    return write(folder)


def write(folder: Path) -> Path:
    """Make `<folder>/report.html`. Raises `UserError` for a folder that holds no run."""
    path = folder / NAME
    draft = path.with_name(f".{NAME}.draft")
    draft.write_bytes(page(collect.read(folder)).encode("utf-8", "backslashreplace"))
    draft.rename(path)  # a reader never sees half a page
    return path


def page(run: collect.Run, now: float | None = None) -> str:
    """The whole page."""
    sections = [
        overview.section(run),
        data.section(run),
        curves.section(run),
        answers.section(run),
        slices.section(run),
        hardest.section(run),
        timing.section(run),
        certificate.section(run),
    ]
    return str(
        _template().render(
            name=run.summary["run"],
            recipe=run.config.recipe.name,
            made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)),
            tiles=overview.tiles(run, answers.intervals(run)),
            sections=[section for section in sections if section],
        )
    )


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown, trim_blocks=True
    )
    environment.filters["breakable"] = _breakable
    return environment.from_string((resources.files("rtrain.report") / "page.html").read_text(encoding="utf-8"))


def _breakable(cell: Any) -> Any:
    """A cell whose long names may be broken after `_`, `/` and the like, and elsewhere where there is none of them."""
    if not isinstance(cell, str):
        return cell
    return Markup("<wbr>").join(_PIECE.findall(visible(cell)))


def _shown(value: Any) -> Any:
    """What `{{ }}` prints: figures with separators, text without invisible characters, charts as they are."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
