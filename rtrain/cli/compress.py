"""Verbs that shrink, score, judge and compare artifacts: distill, quantize, evaluate, gate, inspect, compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rtrain.cli.options import (
    AddressOption,
    ArtifactArgument,
    JsonOption,
    NewOption,
    OutOption,
    ResumeOption,
    SetOption,
    SettingOptions,
    collect_overrides,
    expand_options,
    follow_verb,
    leave_to_supervisor,
    print_result,
    resolve_artifact_argument,
    resolve_run_argument,
)
from rtrain.cli.train import print_search
from rtrain.core.run_folder import Run


@dataclass(frozen=True)
class DistillOptions(SettingOptions):
    run: Annotated[Path, typer.Argument(help="Run folder of the teacher, or a search's.")]
    out: OutOption = None
    assignments: SetOption = None
    address: AddressOption = None
    resume: ResumeOption = False
    new: NewOption = False
    search: Annotated[bool, typer.Option("--search", help="Search over students, by the settings `tune`.")] = False
    as_json: JsonOption = False


@expand_options
def distill(context: typer.Context, options: DistillOptions) -> None:
    """Train a smaller model on a run's rows and its model's answers."""
    from rtrain.api import training
    from rtrain.cluster import supervisor

    run = resolve_run_argument(options.run)
    if supervisor.should_supervise():
        keywords = {"resume": options.resume, "new": options.new}
        request = training.DistillRequest.from_arguments(
            options.run, options.out, options.overrides, keywords, options.search
        )
        leave_to_supervisor(request.config, request.folder, request.reuse)
    words = ("distill", run, "--search") if options.search else ("distill", run)
    with follow_verb(context, *words) as line:
        distill_or_search: Any = training.distill
        result = distill_or_search(
            options.run,
            out=options.out,
            search=options.search,
            settings=options.overrides,
            on_event=line,
            resume=options.resume,
            new=options.new,
        )
    if options.search:
        print_search(context, result, options.as_json, _next_command(result.winner.run, "distill", run))
        return
    next_command = _next_command(result.run, "distill", run)
    print_result(result.document, options.as_json, result.text, context.obj.format_phases(), next_command)


def _next_command(student: Run, *words: object) -> str:
    """What to do with a student next: quantize it where the gate has let it through, else as with any run."""
    from rtrain.report.progress import format_next_command, next_run_command

    next_command = next_run_command(student, *words)
    return (
        format_next_command("quantize", student)
        if next_command == format_next_command("serve", student.artifact)
        else next_command
    )


def quantize(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run folder whose artifact is quantized, or a search's.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the int8 artifact.")] = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an int8 artifact with static scales, calibrated on training rows, and score it on the test rows."""
    from rtrain.api import artifacts
    from rtrain.report.progress import ProgressLine, format_next_command

    resolve_run_argument(run)
    with ProgressLine(context.obj) as line:
        result = artifacts.quantize(run, out=out, settings=collect_overrides(assignments), on_event=line)
    verb = "serve" if result.verdict == "promote" else "inspect"
    next_command = format_next_command(verb, result.folder)
    print_result(result.document, as_json, result.text, context.obj.format_phases(), next_command)


def evaluate(
    artifact: ArtifactArgument,
    data: Annotated[str, typer.Option("--data", help="Rows with texts and labels.")],
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score an artifact on a file of rows, through the path that answers requests; the columns are those of its own
    training rows, but for what --set data.label=... and so on say."""
    from rtrain.api import artifacts
    from rtrain.report.progress import next_artifact_command

    folder = resolve_artifact_argument(artifact)
    result = artifacts.evaluate(folder, data, settings=collect_overrides(assignments))
    print_result(result.document, as_json, result.text, next_artifact_command(folder))


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
    from rtrain.api import artifacts
    from rtrain.report.progress import ProgressLine, format_next_command

    folder = resolve_artifact_argument(candidate)
    baseline = None if baseline_argument is None else resolve_artifact_argument(baseline_argument)
    with ProgressLine(context.obj) as line:
        result = artifacts.gate(folder, baseline, data, settings=collect_overrides(assignments), on_event=line)
    is_promoted = result.verdict == "promote"
    next_commands = [format_next_command("serve", folder)] if is_promoted else []
    if not result.is_recorded:
        next_commands = [
            "the verdict is not written: the artifact is a downloaded copy; gate the original, then publish it"
        ]
    print_result(result.document, as_json, result.text, context.obj.format_phases(), *next_commands)
    if not is_promoted:
        raise typer.Exit(NOT_PROMOTED)


def inspect(artifact: ArtifactArgument, as_json: JsonOption = False) -> None:
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
    from rtrain.api import artifacts

    result = artifacts.compare(*runs, out=out)
    print_result(result.document, as_json, result.text)
