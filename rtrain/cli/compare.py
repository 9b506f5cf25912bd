"""The verb that sets runs beside each other."""

from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import Json
from rtrain.cli.output import show


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs, searches (their winners) or artefacts; each is set beside the first.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="HTML page (default: beside the first run).")] = None,
    as_json: Json = False,
) -> None:
    """Say whether one run is better than another, by their answers to the same rows; print it and write a page."""
    from rtrain.comparison import compare as comparing, page, text

    found = comparing.compare(runs)
    path = page.write(found, page.default(found) if out is None else out.expanduser().absolute())
    show({**comparing.document(found), "page": str(path)}, as_json, f"{text.text(found)}\n\npage: {path}")
