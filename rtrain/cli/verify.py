"""Verbs that test a recipe on its own rows: verify and drill."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rtrain.cli.options import (
    AddressOption,
    DataOption,
    JsonOption,
    ModelOption,
    OutOption,
    SetOption,
    TestOption,
    WorkersOption,
    build_config,
    format_arguments,
)
from rtrain.cli.output import print_result
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run


def verify(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None,
    ledger: Annotated[Path | None, typer.Option("--ledger", help="Check the rows that this run trained on.")] = None,
    data: DataOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: WorkersOption = None,
    out: OutOption = None,
    assignments: SetOption = None,
    address: AddressOption = None,
    full: Annotated[bool, typer.Option("--full", help="The large matrix, on about 1,000 rows.")] = False,
    inject_bugs: Annotated[bool, typer.Option("--inject-bugs", help="Inject bugs: each must be detected.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show that workers, layouts and resumes change only speed; or, with --ledger, the rows that a run trained on."""
    if (recipe is None) == (ledger is None):
        fix = "write rtrain verify RECIPE --data FILE, or rtrain verify --ledger RUN"
        problem = Problem("verify", recipe, "takes either a recipe or --ledger", fix, code="conflicting_settings")
        raise ConfigError([problem])
    from rtrain.report.live.progress import ProgressLine, format_next_command

    report: Any
    if ledger is not None:
        from rtrain.verification import ledger as ledgers

        report, lines = ledgers.check_ledger(Run(ledger.absolute())), [format_next_command("report", ledger)]
    else:
        assert recipe is not None
        from rtrain.cluster.connection import session
        from rtrain.runs import prepare, run_folders
        from rtrain.verification import verify as proof

        option_values = {"data": data, "test": test, "model": model, "workers": workers, "address": address}
        config = run_folders.resolve_paths(build_config(recipe, assignments, **option_values))
        folder = run_folders.default_run_folder(f"{config.recipe.name}-verify", out)
        prepare.check_run(config, folder.parent)
        with ProgressLine(context.obj) as line, session(proof.make_session_config(config, full), folder.parent, line):
            report = proof.run(config, folder, full=full, plant_bugs=inject_bugs, on_event=line)
        lines = [
            context.obj.format_phases(),
            format_next_command("train", *format_arguments(recipe, assignments, **option_values)),
        ]
    document = report.to_document()
    print_result(document, as_json, report.format_text(), *(lines if document["passed"] else ()))
    if not document["passed"]:
        raise typer.Exit(1)


def drill(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file.")],
    data: DataOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: WorkersOption = None,
    out: OutOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill and resume a run repeatedly, and compare it with an undisturbed run."""
    from rtrain.cluster.connection import session
    from rtrain.report.live.progress import ProgressLine, format_next_command
    from rtrain.runs import prepare, run_folders
    from rtrain.verification import drill as proof

    option_values = {"data": data, "test": test, "model": model, "workers": workers}
    config = run_folders.resolve_paths(build_config(recipe, assignments, **option_values))
    folder = run_folders.default_run_folder(f"{config.recipe.name}-drill", out)
    prepare.check_run(config, folder.parent)
    with ProgressLine(context.obj) as line, session(config, folder.parent, line):
        certificate = proof.run(config, folder, on_event=line)
    lines = [
        context.obj.format_phases(),
        format_next_command("train", *format_arguments(recipe, assignments, **option_values)),
    ]
    print_result(certificate.to_document(), as_json, certificate.format_text(), *(lines if certificate.passed else ()))
    if not certificate.passed:
        raise typer.Exit(1)
