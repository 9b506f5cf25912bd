"""report.html: one page that needs nothing else, made from a run folder alone."""

from pathlib import Path

from rtrain.errors import UserError
from rtrain.report import attributions, collect
from rtrain.report.drawing.page import render
from rtrain.report.live.progress import say
from rtrain.report.sections import answers, certificate, curves, data, hardest, overview, slices, timing

NAME = "report.html"


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
    tiles = overview.tiles(run, answers.intervals(run))
    shown = [section for section in sections if section]
    return render(run.summary["run"], run.config.recipe.name, tiles, shown, now)
