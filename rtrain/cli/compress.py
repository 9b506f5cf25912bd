"""Verbs that shrink, score, judge and compare artifacts: distill, quantize, evaluate, gate, inspect, compare."""

from dataclasses import dataclass, replace
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
    leave_to_supervisor,
    open_session,
    option_error,
    print_result,
    require_finished_run,
    resolve_artifact_argument,
    resolve_reuse,
)
from rtrain.core.run_folder import Run, resolve_artifact


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
    from rtrain.config import with_overrides
    from rtrain.config.recipe import SETTINGS_RESET_FOR_STUDENTS
    from rtrain.runs import run_folders

    run, search, as_json = options.run, options.search, options.as_json
    teacher, reuse = require_finished_run(run), resolve_reuse(options.resume, options.new)
    teacher_config = replace(
        run_folders.load_config(teacher, SETTINGS_RESET_FOR_STUDENTS), explicit_settings=frozenset()
    )
    config = with_overrides(teacher_config, collect_overrides(options.assignments, **options.settings))
    config = run_folders.resolve_paths(config, teacher)
    suffix = "students" if search else "student"
    folder = (
        Path(options.out).expanduser().absolute()
        if options.out
        else run.absolute().with_name(f"{run.absolute().name}-{suffix}")
    )
    leave_to_supervisor(config, folder, reuse)
    if search:
        _run_student_search(context, config, teacher, folder, reuse, as_json)
        return
    from rtrain.compress import distill as distillation
    from rtrain.evaluation import gate_table
    from rtrain.report.progress import format_summary

    if reuse != "resume":
        folder = run_folders.choose_folder(folder, config, reuse)[0]
    resolved_config = distillation.resolve_config(config, folder, reuse)
    distillation.derive_student_config(
        resolved_config, distillation.Teacher.load(resolve_artifact(teacher)), folder.parent
    )  # before Ray starts
    with open_session(context, resolved_config, folder, "distill", teacher) as line:
        student, summary = distillation.run_distillation(config, teacher, folder, reuse, on_event=line)
    gate_lines = gate_table.format_brief(summary["gate"]) if "gate" in summary else []
    student_run = Run(student)
    print_result(
        summary,
        as_json,
        format_summary(summary, student_run),
        *gate_lines,
        context.obj.format_phases(),
        _next_command(student_run, "distill", teacher),
    )


def _next_command(student: Run, *words: object) -> str:
    """What to do with a student next: quantize it where the gate has let it through, else as with any run."""
    from rtrain.report.progress import format_next_command, next_run_command

    next_command = next_run_command(student, *words)
    return (
        format_next_command("quantize", student)
        if next_command == format_next_command("serve", student.artifact)
        else next_command
    )


def _run_student_search(
    context: typer.Context, config: Any, run: Path, folder: Path, reuse: Any, as_json: bool
) -> None:
    """`rtrain distill --search`: the students of the artifact of `run`."""
    from rtrain.cli.train import SearchCommand, run_search
    from rtrain.compress import distill as distillation
    from rtrain.runs import prepare, run_folders
    from tune import search, students

    prepare.refuse_lost_search(config, folder, reuse, "distill", run)
    teacher = distillation.Teacher.load(resolve_artifact(run))
    if reuse == "resume":
        prepare.restore_run(config, folder)
    else:
        folder = run_folders.choose_folder(folder, config, reuse)[0]
    search_config = students.derive_search_config(
        distillation.resolve_config(config, folder, reuse), teacher, folder.parent
    )
    search.check_students(search_config, teacher, folder.parent)
    if reuse != "resume":
        distillation.check_config(search_config, teacher, folder.parent)
    command = SearchCommand(
        ("distill", run, "--search"), lambda student: _next_command(student, "distill", run), teacher.folder
    )
    run_search(context, search_config, folder, reuse, as_json, command)


def quantize(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run folder whose artifact is quantized, or a search's.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the int8 artifact.")] = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an int8 artifact with static scales, calibrated on training rows, and score it on the test rows."""
    from rtrain.compress import quantize as quantization
    from rtrain.report.progress import ProgressLine, format_next_command
    from rtrain.runs import run_folders

    parent = Run(require_finished_run(run))
    config = run_folders.load_config(parent.folder, collect_overrides(assignments))
    out_folder = (out or parent.int8_artifact).expanduser().absolute()
    with ProgressLine(context.obj) as line:
        store, threads = quantization.find_token_store(parent.folder), config.deploy.serve.threads
        report = quantization.run_quantization(config.recipe, store, parent.folder, out_folder, line, threads)
    next_command = (
        format_next_command("serve", out_folder)
        if report["gate"]["verdict"] == "promote"
        else format_next_command("inspect", out_folder)
    )
    print_result(report, as_json, quantization.format_report(report), context.obj.format_phases(), next_command)


def evaluate(
    artifact: ArtifactArgument,
    data: Annotated[str, typer.Option("--data", help="Rows with texts and labels.")],
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score an artifact on a file of rows, through the path that answers requests; the columns are those of its own
    training rows, but for what --set data.label=... and so on say."""
    from rtrain import config
    from rtrain.inference import artifact as artifacts, score
    from rtrain.metrics import scores
    from rtrain.report.progress import next_artifact_command

    overrides = {"data.path": data, **dict(config.parse_assignment(text) for text in assignments or ())}
    folder = resolve_artifact_argument(artifact)
    settings = score.resolve_scoring_settings(artifacts.read_artifact(folder), overrides)
    report = score.score_file(folder, settings)
    labels = artifacts.read_artifact(folder).labels
    lines = (scores.format_scores(report), "", *score.describe_rows(report, settings, labels))
    print_result(report, as_json, "\n".join(lines), next_artifact_command(folder))


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
    from rtrain.inference import artifact
    from rtrain.report.progress import ProgressLine, format_next_command

    folder = resolve_artifact_argument(candidate)
    baseline = (
        resolve_artifact_argument(baseline_argument)
        if baseline_argument is not None
        else gates.find_default_baseline(folder)
    )
    if baseline is None:
        fix = "write --baseline with the artifact, or the run, to compare with"
        raise option_error(
            "--baseline", None, "missing, and the candidate is not compressed from a run", fix, "missing"
        )
    overrides = collect_overrides(assignments, data=data)
    request, settings = gates.prepare_request(folder, baseline, overrides)
    with ProgressLine(context.obj) as line:
        verdict = gates.run_gate(request, settings, measures_memory=True, trains_rivals=True, on_event=line)
        if not (is_cached := artifact.is_cached(folder)):
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
    from rtrain.evaluation import compare as comparing, page

    comparison = comparing.compare_runs(runs)
    path = page.write_comparison(
        comparison, page.default_path(comparison) if out is None else out.expanduser().absolute()
    )
    print_result(
        {**comparing.build_document(comparison), "page": str(path)},
        as_json,
        f"{page.format_comparison(comparison)}\n\npage: {path}",
    )
