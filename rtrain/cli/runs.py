"""Verbs about runs as things: runs, clean, export, import."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import Json, ended_run
from rtrain.cli.output import show
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import ARTIFACT, Run, artifact_of, near, shown


class Keep(StrEnum):
    """What `rtrain clean` keeps."""

    ARTIFACT = "artifact"
    NONE = "none"


class WheelsFor(StrEnum):
    """What the wheels of `rtrain export` are for."""

    PREDICT = "predict"
    SERVE = "serve"
    ALL = "all"


def runs(
    root: Annotated[Path, typer.Argument(help="Folder of runs, or a run.")] = Path("runs"),
    every: Annotated[bool, typer.Option("--all", help="A line for each trial of a search too.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs, searches and students of a folder: state, score, size, what they came from, what may go."""
    from rtrain.runs.store import scan, table

    found = scan.look(root.absolute())
    if as_json:
        show(table.document(found), True, "")
    else:
        print(table.text(found, every))


def clean(
    path: Annotated[Path, typer.Argument(help="A run, or a folder of runs.")],
    keep: Annotated[
        Keep, typer.Option("--keep", help="artifact: all that is finished; none: nothing.")
    ] = Keep.ARTIFACT,
    stores: Annotated[
        bool, typer.Option("--stores", help="Of a folder: also token stores that only ended runs use.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove whole runs (--keep none) without a question.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what a finished run does not need, after saying what goes and what is lost by it."""
    from rtrain.runs.store import clean as store_clean, clean_plan, scan, table

    folder = path.absolute()
    single = scan.holds_run(folder)
    if single and stores:
        fix = f"name the folder that holds the runs: {shown(folder.parent)}"
        raise ConfigError(
            [Problem("--stores", None, "token stores are shared by runs", fix, code="conflicting_settings")]
        )
    found = scan.around(folder) if single else scan.look(folder)
    known = found.of(folder) if single else None
    if single and known is None:
        raise UserError(
            f"{folder} is a link, or lies in another run: nothing is removed there; name the run itself",
            code="not_a_run",
        )
    if not single and not (found.runs or found.shared or found.drafts):
        raise UserError(
            f"{folder} holds no run, and none lies below it; name a run, or the folder that holds them",
            code="not_a_run",
        )
    planned = clean_plan.of_run(known, keep.value, found) if known else clean_plan.of_root(found, keep.value, stores)
    removals = clean_plan.checked(planned)
    if not as_json:
        print(table.removals_text(removals, dry))
    parts = [part for removed in removals for part in removed.parts]
    if single and not parts and (reasons := removals[0].stays):
        raise UserError(f"{folder} is left as it is: {'; '.join(reasons)}", code="not_removed")
    wrong = []
    if parts and not dry:
        _ask(keep, yes, len([removed for removed in removals if removed.whole]))
        try:
            store_clean.carry_out(removals)
        except UserError as error:  # all the others are removed, and are to be told
            wrong.append(str(error))
    if unread := [removed.name for removed in removals if removed.unread]:
        wrong.append(f"files of {', '.join(unread)} cannot be read; what depends on them stays, as listed")
    if as_json:
        show(table.removals_document(removals, dry), True, "")
    if wrong and not as_json:
        raise UserError("\n".join(wrong), code="not_removed")
    if as_json:
        print("".join(f"rtrain: {line}\n" for line in wrong), end="", file=sys.stderr)
        raise typer.Exit(bool(wrong))
    if dry and any(part.size for part in parts):
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
        raise ConfigError(
            [Problem("--keep", "none", "removes whole runs, and nobody can be asked here", fix, code="nobody_asked")]
        )
    if not typer.confirm(f"Remove {count} whole run{'' if count == 1 else 's'}?", err=True):
        raise UserError("nothing was removed", code="declined")


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or a search's.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write, e.g. intent.tar.")],
    int8: Annotated[
        bool, typer.Option("--int8", help="Of the artefacts the int8 one alone: smaller, and answered without torch.")
    ] = False,
    with_wheels: Annotated[
        bool, typer.Option("--with-wheels", help="With the packages that answering needs, by pip download.")
    ] = False,
    wheels_for: Annotated[
        WheelsFor, typer.Option("--wheels-for", help="What these packages must do; all: train as well.")
    ] = WheelsFor.SERVE,
    no_texts: Annotated[
        bool, typer.Option("--no-texts", help="Leave out predictions and the report: they hold texts.")
    ] = False,
    ungated: Annotated[bool, typer.Option("--ungated", help="Carry what the gate has refused, too.")] = False,
    as_json: Json = False,
) -> None:
    """Put a run's artefacts, scores, report and log into one file, for a machine without network."""
    import tempfile

    from rtrain.inference import artifact
    from rtrain.runs.store import disk_usage, export_bundle, wheels

    found, file, name = Run(ended_run(run)), out.expanduser().absolute(), run.absolute().name
    export_bundle.check(found, file, int8)  # before anything is fetched
    verdicts = export_bundle.verdicts(found, int8)
    if not ungated:
        export_bundle.admit(verdicts)
    with tempfile.TemporaryDirectory() as folder:
        fetched, install = [], ""
        if with_wheels:
            print(f"fetching what rtrain {wheels_for} needs", file=sys.stderr)
            places = [found.int8] if int8 else [found.artifact, found.int8]
            made = [place for place in places if (place / ARTIFACT).is_file()]
            engines = [artifact.read(place, verify=False).engine for place in made]
            if doubt := wheels.doubt(wheels.packages(wheels_for.value, engines)):
                print(doubt, file=sys.stderr)
            fetched = wheels.fetch(wheels_for.value, engines, Path(folder))
            install = wheels.instructions(name, file.name, wheels_for.value)
        sent = export_bundle.send(found, name, file, int8, fetched, install, texts=not no_texts)
    carried = f"{sent.files} files, {disk_usage.text(sent.size)}"
    lines = [f"{shown(file)}: the run {name}, {carried}"]
    if sent.with_texts:
        lines.append(f"WARNING: texts of rows are in {', '.join(sent.with_texts)}; --no-texts leaves these files out")
    else:
        lines.append("it holds no texts of rows")
    lines.append("not in it: checkpoints, and the token store")
    lines += [f"not carried, as rtrain does not know it: {', '.join(sent.stayed)}"] if sent.stayed else []
    lines += [f"gate: {one}" for one in verdicts]
    lines += [install] if install else []
    lines.append(f"next, on the other machine: rtrain import {shown(file)}")
    document = {"file": str(file), "run": name, "bytes": sent.size, "files": sent.files, "left": list(sent.stayed)}
    document["with_texts"] = list(sent.with_texts)
    document["gate"] = {one.name: one.verdict for one in verdicts}
    show({**document, "wheels": [path.name for path in fetched]}, as_json, "\n".join(lines))


def import_(
    file: Annotated[Path, typer.Argument(help="A file that rtrain export has written.")],
    out: Annotated[Path | None, typer.Option("--out", help="Run folder (default: runs/<name of the run>).")] = None,
    as_json: Json = False,
) -> None:
    """Unpack a run that rtrain export has packed; every file is checked before the run appears."""
    from rtrain.report.live.progress import then, used
    from rtrain.runs.store import disk_usage, import_bundle, wheels

    got = import_bundle.receive(file.absolute(), out.expanduser().absolute() if out else None, Path("runs").absolute())
    folder = got.run.folder
    lines = [f"{shown(folder)}: {got.files} files, {disk_usage.text(got.size)}, each as it was packed"]
    install = wheels.command(shown(got.wheels)) if got.wheels else None
    lines += [f"to install what it needs, without network: {install}"] if install else []
    use = used(artifact_of(folder), near(folder)).removeprefix("next: ")
    lines.append(f"{then('predict', near(folder), 'a text')}   or: {use}")
    document = {"run": str(folder), "files": got.files, "bytes": got.size, "install": install}
    show(document, as_json, "\n".join(lines))
