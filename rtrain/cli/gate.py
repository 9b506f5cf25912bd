"""Verbs that judge an artefact: gate, inspect, compare."""

from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import Artefact, Json, Set, answering, overrides_of
from rtrain.cli.output import show
from rtrain.core.errors import ConfigError, Problem

NOT_PROMOTED = 1


def gate(
    context: typer.Context,
    candidate: Artefact,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Artefact, or run, that it replaces (default: its run's float artefact)."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Rows with texts and labels; default: the run's test rows.")
    ] = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Promote, hold or refuse an artefact: its score, slices, latency and size beside its base's, on this machine.
    The verdict is written into an artefact that is a folder here; the exit code is 0 if it is promoted, else 1."""
    from rtrain.evaluation import gate as gates, gate_table
    from rtrain.inference import remote
    from rtrain.report.live.progress import Line, then

    folder = answering(candidate)
    base = answering(against) if against is not None else gates.default_base(folder)
    if base is None:
        fix = "write --against with the artefact, or the run, that it is to replace"
        problem = Problem(
            "--against", None, "missing, and the candidate is no smaller one of a run", fix, code="missing"
        )
        raise ConfigError([problem])
    overrides = overrides_of(assignments, data=data)
    chosen, settings = gates.find(folder, base, overrides)
    with Line(context.obj) as line:
        found = gates.run(chosen, settings, thorough=True, fits=True, on_event=line)
        if not (copied := remote.is_copy(folder)):
            gates.record(folder, found)
    promoted = found["verdict"] == "promote"
    way_on = [then("serve", folder)] if promoted else []
    if copied:
        way_on = ["the verdict is not written: the artefact is a copy; gate it where it is made, and publish it then"]
    show(found, as_json, gate_table.text(found), context.obj.text(), *way_on)
    if not promoted:
        raise typer.Exit(NOT_PROMOTED)


def inspect(
    artifact: Artefact,
    as_json: Json = False,
) -> None:
    """Say what is in an artefact: its numbers and bytes by part, operators, lineage, verdict, how it was made."""
    from rtrain.evaluation import inspect_artifact

    found = inspect_artifact.inspect(answering(artifact))
    show(found, as_json, inspect_artifact.text(found))


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs, searches (their winners) or artefacts; each is set beside the first.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="HTML page (default: beside the first run).")] = None,
    as_json: Json = False,
) -> None:
    """Say whether one run is better than another, by their answers to the same rows; print it and write a page."""
    from rtrain.evaluation import compare as comparing, compare_table, page

    found = comparing.compare(runs)
    path = page.write(found, page.default(found) if out is None else out.expanduser().absolute())
    show({**comparing.document(found), "page": str(path)}, as_json, f"{compare_table.text(found)}\n\npage: {path}")
