"""Verbs that make an artefact smaller, and score it: distill, quantize, evaluate."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rtrain.cli.options import (
    Address,
    Artefact,
    Json,
    New,
    Out,
    Resume,
    Set,
    answering,
    ended_run,
    leave_to_supervisor,
    overrides_of,
    resumable,
    reuse_of,
)
from rtrain.cli.output import show
from rtrain.core.run_folder import Run, artifact_of


def distill(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run folder of the teacher, or a search's.")],
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    resume: Resume = False,
    new: New = False,
    search: Annotated[bool, typer.Option("--search", help="Search over students, by the settings `tune`.")] = False,
    as_json: Json = False,
) -> None:
    """Train a smaller model on a run's rows and its model's answers."""
    from rtrain.config import with_overrides
    from rtrain.config.recipe import FRESH
    from rtrain.runs import run_folders

    teacher, reuse = ended_run(run), reuse_of(resume, new)
    taught = replace(run_folders.stored(teacher, FRESH), named=frozenset())
    config = with_overrides(taught, overrides_of(assignments, address=address))
    config = run_folders.absolute(config, teacher)
    suffix = "students" if search else "student"
    folder = Path(out).expanduser().absolute() if out else run.absolute().with_name(f"{run.absolute().name}-{suffix}")
    leave_to_supervisor(config, folder, reuse)
    if search:
        _search(context, config, teacher, folder, reuse, as_json)
        return
    from rtrain.cluster.connection import session
    from rtrain.compress import distill as distillation
    from rtrain.evaluation import gate_table
    from rtrain.report.live.progress import Line, summary_text

    if reuse != "resume":
        folder = run_folders.choose(folder, config, reuse)[0]
    settled = distillation.settled(config, folder, reuse)
    distillation.started(settled, distillation.Teacher.read(artifact_of(teacher)), folder.parent)  # before Ray starts
    with resumable(folder, "distill", teacher), Line(context.obj) as line, session(settled, folder.parent, line):
        student, summary = distillation.run(config, teacher, folder, reuse, on_event=line)
    gated = gate_table.brief(summary["gate"]) if "gate" in summary else []
    made = Run(student)
    show(summary, as_json, summary_text(summary, made), *gated, context.obj.text(), _after(made, "distill", teacher))


def _after(student: Run, *words: object) -> str:
    """What to do with a student next: quantize it where the gate has let it through, else as with any run."""
    from rtrain.report.live.progress import after, then

    way_on = after(student, *words)
    return then("quantize", student) if way_on == then("serve", student.artifact) else way_on


def _search(context: typer.Context, config: Any, run: Path, folder: Path, reuse: Any, as_json: bool) -> None:
    """`rtrain distill --search`: the students of the artefact of `run`."""
    from rtrain.cli.search import searched
    from rtrain.compress import distill as distillation
    from rtrain.runs import prepare, run_folders
    from tune import students

    prepare.refuse_lost(config, folder, reuse, "distill", run)
    teacher = distillation.Teacher.read(artifact_of(run))
    if reuse == "resume":
        prepare.bring_back(config, folder)
    else:
        folder = run_folders.choose(folder, config, reuse)[0]
    begun = students.begun(distillation.settled(config, folder, reuse), teacher, folder.parent)
    students.check(begun, teacher, folder.parent)
    if reuse != "resume":
        distillation.checked(begun, teacher, folder.parent)
    words = ("distill", run, "--search")
    searched(context, begun, folder, reuse, as_json, words, lambda made: _after(made, "distill", run), teacher.folder)


def quantize(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run folder whose artefact is quantized, or a search's.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the int8 artefact.")] = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Make an int8 artefact with static scales, calibrated on training rows, and score it on the test rows."""
    from rtrain.compress import quantize as quantization
    from rtrain.report.live.progress import Line, then
    from rtrain.runs import run_folders

    parent = Run(ended_run(run))
    config = run_folders.stored(parent.folder, overrides_of(assignments))
    into = (out or parent.int8).expanduser().absolute()
    with Line(context.obj) as line:
        store, threads = quantization.store_of(parent.folder), config.deploy.serve.threads
        report = quantization.run(config.recipe, store, parent.folder, into, line, threads)
    way_on = then("serve", into) if report["gate"]["verdict"] == "promote" else then("inspect", into)
    show(report, as_json, quantization.report_text(report), context.obj.text(), way_on)


def evaluate(
    artifact: Artefact,
    data: Annotated[str, typer.Option("--data", help="Rows with texts and labels.")],
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Score an artefact on a file of rows, through the path that answers requests; the columns are those of its own
    training rows, but for what --set data.label=... and so on say."""
    from rtrain import config
    from rtrain.inference import artifact as artifacts, score
    from rtrain.metrics import scores
    from rtrain.report.live.progress import used

    overrides = {"data.path": data, **dict(config.parse_assignment(text) for text in assignments or ())}
    folder = answering(artifact)
    settings = score.settings_for_scores(artifacts.read(folder), overrides)
    report = score.run(folder, settings)
    labels = artifacts.read(folder).labels
    lines = (scores.text(report), "", *score.describe_rows(report, settings, labels))
    show(report, as_json, "\n".join(lines), used(folder))
