"""Verbs that prove a recipe on its own rows: verify and drill."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rtrain.cli.options import (
    Address,
    DataOption,
    Json,
    ModelOption,
    Out,
    Set,
    TestOption,
    Workers,
    as_given,
    configured,
)
from rtrain.cli.output import show
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run


def verify(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None,
    ledger: Annotated[Path | None, typer.Option("--ledger", help="Check which rows this run trained on.")] = None,
    data: DataOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    full: Annotated[bool, typer.Option("--full", help="The large matrix, on some 1,000 rows.")] = False,
    planted: Annotated[bool, typer.Option("--planted", help="Plant bugs: each must be seen.")] = False,
    as_json: Json = False,
) -> None:
    """Show that workers, layouts and resumes change nothing but speed; or, by --ledger, which rows a run saw."""
    if (recipe is None) == (ledger is None):
        fix = "write rtrain verify RECIPE --data FILE, or rtrain verify --ledger RUN"
        problem = Problem("verify", recipe, "takes a recipe or --ledger, one of them", fix, code="conflicting_settings")
        raise ConfigError([problem])
    from rtrain.report.live.progress import Line, then

    report: Any
    if ledger is not None:
        from rtrain.verification import ledger as ledgers

        report, lines = ledgers.check(Run(ledger.absolute())), [then("report", ledger)]
    else:
        assert recipe is not None
        from rtrain.cluster.connection import session
        from rtrain.runs import prepare, run_folders
        from rtrain.verification import verify as proof

        short = {"data": data, "test": test, "model": model, "workers": workers, "address": address}
        config = run_folders.absolute(configured(recipe, assignments, **short))
        folder = run_folders.folder_for(f"{config.recipe.name}-verify", out)
        prepare.check(config, folder.parent)
        with Line(context.obj) as line, session(proof.session_config(config, full), folder.parent, line):
            report = proof.run(config, folder, full=full, bugs=planted, on_event=line)
        lines = [context.obj.text(), then("train", *as_given(recipe, assignments, **short))]
    document = report.to_document()
    show(document, as_json, report.text(), *(lines if document["passed"] else ()))
    if not document["passed"]:
        raise typer.Exit(1)


def drill(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file.")],
    data: DataOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Kill a run again and again, resume it, and compare it with one that was never touched."""
    from rtrain.cluster.connection import session
    from rtrain.report.live.progress import Line, then
    from rtrain.runs import prepare, run_folders
    from rtrain.verification import drill as proof

    short = {"data": data, "test": test, "model": model, "workers": workers}
    config = run_folders.absolute(configured(recipe, assignments, **short))
    folder = run_folders.folder_for(f"{config.recipe.name}-drill", out)
    prepare.check(config, folder.parent)
    with Line(context.obj) as line, session(config, folder.parent, line):
        certificate = proof.run(config, folder, on_event=line)
    lines = [context.obj.text(), then("train", *as_given(recipe, assignments, **short))]
    show(certificate.to_document(), as_json, certificate.text(), *(lines if certificate.passed else ()))
    if not certificate.passed:
        raise typer.Exit(1)
