"""Verbs that judge an artifact: gate, inspect, compare."""

from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import ArtifactArgument, JsonOption, SetOption, collect_overrides, resolve_artifact_argument
from rtrain.cli.output import print_result
from rtrain.core.errors import ConfigError, Problem

NOT_PROMOTED = 1


def gate(
    context: typer.Context,
    candidate: ArtifactArgument,
    baseline_argument: Annotated[
        str | None,
        typer.Option("--baseline", help="Artifact, or run, to compare with (default: its run's float artifact)."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Rows with texts and labels; default: the run's test rows.")
    ] = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Promote, hold or refuse an artifact: score, slices, latency and size against its baseline, on this machine.
    The verdict is written into a local artifact; the exit code is 0 if it is promoted, else 1."""
    from rtrain.evaluation import gate as gates, gate_table
    from rtrain.inference import remote
    from rtrain.report.live.progress import ProgressLine, format_next_command

    folder = resolve_artifact_argument(candidate)
    baseline = (
        resolve_artifact_argument(baseline_argument)
        if baseline_argument is not None
        else gates.find_default_baseline(folder)
    )
    if baseline is None:
        fix = "write --baseline with the artifact, or the run, to compare with"
        problem = Problem(
            "--baseline", None, "missing, and the candidate is not compressed from a run", fix, code="missing"
        )
        raise ConfigError([problem])
    overrides = collect_overrides(assignments, data=data)
    request, settings = gates.prepare_request(folder, baseline, overrides)
    with ProgressLine(context.obj) as line:
        verdict = gates.run_gate(request, settings, measures_memory=True, trains_rivals=True, on_event=line)
        if not (is_cached := remote.is_cached(folder)):
            gates.record_verdict(folder, verdict)
    is_promoted = verdict["verdict"] == "promote"
    next_commands = [format_next_command("serve", folder)] if is_promoted else []
    if is_cached:
        next_commands = [
            "the verdict is not written: the artifact is a downloaded copy; gate the original, then publish it"
        ]
    print_result(verdict, as_json, gate_table.format_verdict(verdict), context.obj.format_phases(), *next_commands)
    if not is_promoted:
        raise typer.Exit(NOT_PROMOTED)


def inspect(
    artifact: ArtifactArgument,
    as_json: JsonOption = False,
) -> None:
    """Describe an artifact: numbers and bytes by part, operators, lineage, verdict, command that makes it."""
    from rtrain.evaluation import inspect_artifact

    artifact_report = inspect_artifact.inspect_artifact(resolve_artifact_argument(artifact))
    print_result(artifact_report, as_json, inspect_artifact.format_inspection(artifact_report))


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs, searches (their winners) or artifacts; each is compared with the first.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="HTML page (default: beside the first run).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Test whether one run is better than another, by their answers to the same rows; print it and write a page."""
    from rtrain.evaluation import compare as comparing, compare_table, page

    comparison = comparing.compare_runs(runs)
    path = page.write_comparison(
        comparison, page.default_path(comparison) if out is None else out.expanduser().absolute()
    )
    print_result(
        {**comparing.build_document(comparison), "page": str(path)},
        as_json,
        f"{compare_table.format_comparison(comparison)}\n\npage: {path}",
    )
