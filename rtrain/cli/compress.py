"""Verbs that make an artefact smaller, and score it: distill, quantize, evaluate."""

from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import (
    Address,
    Json,
    New,
    Out,
    Resume,
    Set,
    answering,
    chosen_run,
    configured,
    leave_to_supervisor,
    overrides_of,
    reuse_of,
)
from rtrain.cli.output import show
from rtrain.run import Run, shown


def distill(
    run: Annotated[Path, typer.Argument(help="Run folder of the teacher, or a search's.")],
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    resume: Resume = False,
    new: New = False,
    as_json: Json = False,
) -> None:
    """Train a student with fewer layers on a run's rows and its model's answers."""
    from rtrain.runs import opening

    teacher, reuse = chosen_run(run), reuse_of(resume, new)
    config = opening.stored(teacher, overrides_of(assignments, address=address))
    folder = Path(out).absolute() if out else run.absolute().with_name(f"{run.absolute().name}-student")
    leave_to_supervisor(config, folder, reuse)
    from rtrain.cluster.session import session
    from rtrain.compress import distill as distillation
    from rtrain.report.live.progress import Line, summary_text

    with session(distillation.settled(config, folder, reuse), folder.parent), Line() as line:
        student, summary = distillation.run(config, teacher, folder, reuse, on_event=line)
    show(summary, as_json, summary_text(summary, Run(student)))


def quantize(
    run: Annotated[Path, typer.Argument(help="Run folder whose artefact is quantized, or a search's.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the int8 artefact.")] = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Make an int8 artefact with static scales, calibrated on training rows, and score it on the test rows."""
    from rtrain.compress import quantize as quantization

    parent = Run(chosen_run(run))
    config = configured(str(parent.config), assignments)
    made = (out or parent.int8).absolute()
    report = quantization.run(config.recipe, quantization.store_of(parent.folder), parent.folder, made)
    lines = [f"{name:>16}  {value}" for name, value in report.items()]
    show(report, as_json, "\n".join([*lines, f"next: rtrain serve {shown(made)}"]))


def evaluate(
    artifact: Annotated[Path, typer.Argument(help="Artefact folder, or a run's or a search's.")],
    data: Annotated[str, typer.Option("--data", help="Rows with texts and labels.")],
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Score an artefact on a file of rows, through the path that answers requests; the columns are those of its own
    training rows, but for what --set data.label=... and so on say."""
    from rtrain import artifact as artifacts, config, score
    from rtrain.metrics import scores

    overrides = {"data.path": data, **dict(config.parse_assignment(text) for text in assignments or ())}
    folder = answering(artifact)
    report = score.run(folder, score.settings(artifacts.read(folder), overrides))
    rate = f"{report['bad_rows']} bad rows, {report['rows_per_second']} rows/s"
    show(report, as_json, f"{scores.text(report)}\n\n{rate}")
