"""Verbs about runs: the recipes, train, tune, report, and the demo. Heavy imports are inside the verbs."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rtrain.cli.options import (
    AddressOption,
    DataOption,
    JsonOption,
    ModelOption,
    NewOption,
    OutOption,
    RecipeArgument,
    ResumeOption,
    SetOption,
    TestOption,
    ValidOption,
    WorkersOption,
    build_config,
    open_run,
    resume_hint_on_interrupt,
)
from rtrain.cli.output import print_result
from rtrain.cli.search import run_search
from rtrain.core import env, events
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run, relative_to_cwd


def recipes_list() -> None:
    """List the recipes of rtrain with their purpose."""
    from rtrain import config

    for name in config.list_recipe_names():
        paragraph = config.read_recipe_text(name).partition("\n#\n")[0].replace("\n#", "").removeprefix("# ")
        print(f"{name:<20}{re.split('[.:] ', paragraph.removesuffix('.'))[0]}")


def recipes_show(
    name: Annotated[str, typer.Argument(help="A recipe's name.")],
    show_all: Annotated[bool, typer.Option("--all", help="Every setting, with its description.")] = False,
) -> None:
    """Print a recipe's commented YAML; save it, edit it, and use the file's name in place of the recipe's."""
    from rtrain import config
    from rtrain.config import reference

    if show_all:
        print(reference.render_full_recipe(name), end="")
        return
    text = config.read_recipe_text(name)  # refuses an unknown name before anything is printed
    print(f"# The short form: what this recipe sets. All settings: rtrain recipes show {name} --all\n{text}", end="")


def train(
    context: typer.Context,
    recipe: RecipeArgument = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: WorkersOption = None,
    out: OutOption = None,
    assignments: SetOption = None,
    address: AddressOption = None,
    resume: ResumeOption = False,
    new: NewOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune an encoder on a file of texts; the result is an artifact for predict and serve."""
    option_values = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config, folder, reuse = open_run(recipe, assignments, out, resume, new, **option_values)
    from rtrain.cluster.connection import session
    from rtrain.report.live.progress import ProgressLine, format_summary, next_run_command
    from rtrain.runs import controller, prepare

    source, _ = prepare.check_run(config, folder.parent, is_resumed=reuse == "resume")
    with (
        resume_hint_on_interrupt(folder, "train"),
        ProgressLine(context.obj) as line,
        session(config, folder.parent, line),
    ):
        line(events.make_phase_event("reading the rows", "rows"))
        prepared = prepare.prepare_run(config, folder, reuse, source=source)
        summary = controller.fit(prepared, on_event=line)
    run = prepared.run
    print_result(
        summary,
        as_json,
        format_summary(summary, run),
        _format_disk_usage(run),
        context.obj.format_phases(),
        next_run_command(run, "train"),
    )


def _format_disk_usage(run: Run) -> str:
    """Describe a run's disk usage, and its removable part."""
    from rtrain.runs.store import disk_usage

    parts = disk_usage.bytes_by_part(run)
    checkpoint_bytes = parts.get(disk_usage.CHECKPOINTS, 0)
    cleanup_hint = (
        f", checkpoints {disk_usage.format_bytes(checkpoint_bytes)} of it: rtrain clean "
        f"{relative_to_cwd(run.folder)} removes these"
        if checkpoint_bytes
        else ""
    )
    return f"disk: {disk_usage.format_bytes(sum(parts.values()))}{cleanup_hint}"


def tune(
    context: typer.Context,
    recipe: RecipeArgument = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: WorkersOption = None,
    out: OutOption = None,
    assignments: SetOption = None,
    address: AddressOption = None,
    resume: ResumeOption = False,
    new: NewOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search learning rate and aggregation frequency, train the best to their ends, and print the winner."""
    option_values = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config, folder, reuse = open_run(recipe, assignments, out, resume, new, True, **option_values)
    if config.deploy.tune.study is not None:
        _run_study(context, config, folder, reuse, as_json)
        return
    from rtrain.cluster import preflight

    if problems := preflight.check_oversubscription(
        config, env.available_cores()
    ):  # before Ray is imported, which takes seconds
        raise ConfigError(problems)
    from rtrain.models import builder as models
    from rtrain.report.live.progress import next_run_command
    from rtrain.runs import prepare
    from tune import search

    search.check_search(config)
    prepare.check_run(config, folder.parent, is_resumed=reuse == "resume")
    if reuse != "resume":
        search.check_model(config, models.resolve_folder(config.recipe.model.name, folder.parent))
    run_search(context, config, folder, reuse, as_json, ("tune",), lambda winner: next_run_command(winner, "train"))


def _run_study(context: typer.Context, config: Any, folder: Path, reuse: Any, as_json: bool) -> None:
    """Run `rtrain tune` for a study (`tune.study`)."""
    from rtrain.cluster.connection import session
    from rtrain.report.live.progress import ProgressLine
    from rtrain.runs import prepare
    from tune import study

    study.check_study(config)
    prepare.check_run(config, folder.parent, is_resumed=reuse == "resume")
    with (
        resume_hint_on_interrupt(folder, "tune"),
        ProgressLine(context.obj) as line,
        session(config, folder.parent, line),
    ):
        line(events.make_phase_event("reading the rows", "rows"))
        study_result = study.run_study(config, folder, reuse, on_event=line)
    text = (
        f"{study_result.table.to_markdown}\n\nas a page: {study_result.study.study_page}; as JSON: "
        f"{study_result.study.study_table}"
    )
    print_result(dict(study_result.table.document), as_json, text, context.obj.format_phases())


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run or a search, also unfinished.")],
) -> None:
    """Write RUN/report.html: rows, curves, predictions, times; one page, offline. A search's page has its verdict
    and its trials."""
    resolved_run = Run(run.absolute())
    if resolved_run.is_search:
        from rtrain import config
        from tune.report import page, study_table

        is_study = config.load_config(str(resolved_run.config)).deploy.tune.study is not None
        print(study_table.write_study_page(resolved_run) if is_study else page.write_search_page(resolved_run))
        return
    from rtrain.report import html
    from rtrain.report.live.progress import next_run_command, print_message

    print(html.make_report(resolved_run))
    if resolved_run.is_finished:
        print_message(next_run_command(resolved_run))


def demo(
    out: OutOption = None,
    model: ModelOption = None,
    assignments: SetOption = None,
    address: AddressOption = None,
    keep_serving: Annotated[bool, typer.Option("--keep", help="Keep the endpoint running until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the whole path on the embedded data: ingest, search, train, distill, quantize, serve, ask."""
    from rtrain import demo as whole

    config = build_config("demo", assignments, model=model, address=address)
    document = whole.run_demo(config, out, keep_serving=keep_serving)
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    if not document["answer_matches"]:
        print("rtrain: the endpoint's answers differ from rtrain predict; see the table above", file=sys.stderr)
        raise typer.Exit(1)
