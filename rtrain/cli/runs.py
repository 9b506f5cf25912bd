"""Verbs about runs as things: runs, clean, export, import."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import Json
from rtrain.cli.output import show
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.run import shown


class Sort(StrEnum):
    """By what `rtrain runs` sorts."""

    WHEN = "when"
    NAME = "name"
    SCORE = "score"
    SIZE = "size"
    TOOK = "took"


class Keep(StrEnum):
    """What `rtrain clean` keeps."""

    BEST = "best"
    ARTIFACT = "artifact"
    NONE = "none"


def runs(
    root: Annotated[Path, typer.Argument(help="Folder of runs, or a run.")] = Path("runs"),
    sort: Annotated[
        Sort, typer.Option("--sort", help="Newest first, by name, or the largest figure first.")
    ] = Sort.WHEN,
    every: Annotated[bool, typer.Option("--all", help="A line for each trial of a search too.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs, searches and students of a folder: state, score, size, what they came from, what may go."""
    from rtrain.inventory import table, walk

    found = walk.look(root.absolute())
    if as_json:
        show(table.document(found, sort), True, "")
    else:
        print(table.text(found, sort, every))


def clean(
    path: Annotated[Path, typer.Argument(help="A run, or a folder of runs.")],
    keep: Annotated[
        Keep,
        typer.Option(
            "--keep",
            help="best: the best checkpoint and all that is finished; artifact: all that is finished; none: nothing.",
        ),
    ] = Keep.ARTIFACT,
    stores: Annotated[
        bool, typer.Option("--stores", help="Of a folder: also token stores that only ended runs use.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove whole runs (--keep none) without a question.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what a finished run does not need, after saying what goes and what is lost by it."""
    from rtrain.inventory import plan, removal, table, walk

    folder = path.absolute()
    single = walk.holds_run(folder)
    if single and stores:
        fix = f"name the folder that holds the runs: {shown(folder.parent)}"
        raise ConfigError([Problem("--stores", None, "token stores are shared by runs", fix)])
    found = walk.around(folder) if single else walk.look(folder)
    known = found.of(folder) if single else None
    if not single and not (found.runs or found.shared or found.drafts):
        raise UserError(f"{folder} holds no run, and none lies below it; name a run, or the folder that holds them")
    removals = plan.of_run(known, keep.value, found) if known else plan.of_root(found, keep.value, stores)
    if not as_json:
        print(table.removals_text(removals, dry))
    parts = [part for removed in removals for part in removed.parts]
    if single and not parts and (reasons := removals[0].stays):
        raise UserError(f"{folder} is left as it is: {'; '.join(reasons)}")
    if parts and not dry:
        _ask(keep, yes, len([removed for removed in removals if removed.whole]))
        removal.carry_out(removals)
    if as_json:
        show(table.removals_document(removals, dry), True, "")
    elif dry and parts:
        options = f"{' --keep ' + keep.value if keep is not Keep.ARTIFACT else ''}{' --stores' if stores else ''}"
        print(f"next: rtrain clean {shown(folder)}{options}{' --yes' if keep is Keep.NONE else ''}")
    else:
        print(f"next: rtrain runs {shown(folder.parent if single else folder)}")


def _ask(keep: Keep, yes: bool, count: int) -> None:
    """Whole runs go only where a person at a terminal, or `--yes`, says so."""
    if keep is not Keep.NONE or yes or not count:
        return
    fix = "write --yes, or --keep artifact to keep what is finished"
    if not sys.stdin.isatty():
        raise ConfigError([Problem("--keep", "none", "removes whole runs, and nobody can be asked here", fix)])
    if not typer.confirm(f"Remove {count} whole run{'' if count == 1 else 's'}?", err=True):
        raise UserError("nothing was removed")
