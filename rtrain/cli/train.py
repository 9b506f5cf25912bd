"""Verbs that train: recipes, train, tune, report, demo, verify, drill. Heavy imports are inside the verbs."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.cli.options import (
    AddressOption,
    DataOption,
    JsonOption,
    ModelOption,
    OutOption,
    SetOption,
    SettingOptions,
    TestOption,
    TrainOptions,
    WorkersOption,
    build_config,
    expand_options,
    open_run,
    open_session,
    option_error,
    print_result,
    resume_hint_on_interrupt,
)
from rtrain.core import env, events
from rtrain.core.errors import ConfigError, TemporaryFailureError
from rtrain.core.run_folder import Run, relative_to_cwd

if TYPE_CHECKING:
    from rtrain.config import Config
    from rtrain.runs.run_folders import Reuse


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


@expand_options
def train(context: typer.Context, options: TrainOptions) -> None:
    """Fine-tune an encoder on a file of texts; the result is an artifact for predict and serve."""
    config, folder, reuse = open_run(options)
    from rtrain.report.progress import format_summary, next_run_command
    from rtrain.runs import controller, prepare

    source, _ = prepare.check_run(config, folder.parent, is_resumed=reuse == "resume")
    with open_session(context, config, folder, "train") as line:
        line(events.make_phase_event("reading the rows", "rows"))
        prepared = prepare.prepare_run(config, folder, reuse, source=source)
        summary = controller.fit(prepared, on_event=line)
    run = prepared.run
    print_result(
        summary,
        options.as_json,
        format_summary(summary, run),
        _format_disk_usage(run),
        context.obj.format_phases(),
        next_run_command(run, "train"),
    )


def _format_disk_usage(run: Run) -> str:
    from rtrain.runs.store import run_info

    parts = run_info.bytes_by_part(run)
    checkpoint_bytes = parts.get(run_info.CHECKPOINTS, 0)
    cleanup_hint = (
        f", checkpoints {run_info.format_bytes(checkpoint_bytes)} of it: rtrain clean "
        f"{relative_to_cwd(run.folder)} removes these"
        if checkpoint_bytes
        else ""
    )
    return f"disk: {run_info.format_bytes(sum(parts.values()))}{cleanup_hint}"


@expand_options
def tune(context: typer.Context, options: TrainOptions) -> None:
    """Search learning rate and aggregation frequency, train the best to their ends, and print the winner."""
    config, folder, reuse = open_run(options, is_search=True)
    if config.deploy.tune.study is not None:
        _run_study(context, config, folder, reuse, options.as_json)
        return
    from rtrain.cluster import preflight

    if problems := preflight.check_oversubscription(
        config, env.available_cores()
    ):  # before Ray is imported, which takes seconds
        raise ConfigError(problems)
    from rtrain.models import builder as models
    from rtrain.report.progress import next_run_command
    from rtrain.runs import prepare
    from tune import search

    search.check_search(config)
    prepare.check_run(config, folder.parent, is_resumed=reuse == "resume")
    if reuse != "resume":
        search.check_model(config, models.resolve_folder(config.recipe.model.name, folder.parent))
    command = SearchCommand(("tune",), lambda winner: next_run_command(winner, "train"))
    run_search(context, config, folder, reuse, options.as_json, command)


def _run_study(context: typer.Context, config: Any, folder: Path, reuse: Any, as_json: bool) -> None:
    """Run `rtrain tune` for a study (`tune.study`)."""
    from rtrain.runs import prepare
    from tune import study

    study.check_study(config)
    prepare.check_run(config, folder.parent, is_resumed=reuse == "resume")
    with open_session(context, config, folder, "tune") as line:
        line(events.make_phase_event("reading the rows", "rows"))
        study_result = study.run_study(config, folder, reuse, on_event=line)
    text = (
        f"{study_result.table.to_markdown}\n\nas a page: {study_result.study.study_page}; as JSON: "
        f"{study_result.study.study_table}"
    )
    print_result(dict(study_result.table.document), as_json, text, context.obj.format_phases())


def report(run: Annotated[Path, typer.Argument(help="Folder of a run or a search, also unfinished.")]) -> None:
    """Write RUN/report.html: rows, curves, predictions, times; one page, offline. A search's page has its verdict
    and its trials."""
    resolved_run = Run(run.absolute())
    if resolved_run.is_search:
        from rtrain import config
        from tune import study
        from tune.report import page

        is_study = config.load_config(str(resolved_run.config)).deploy.tune.study is not None
        print(study.write_study_page(resolved_run) if is_study else page.write_search_page(resolved_run))
        return
    from rtrain.report import html
    from rtrain.report.progress import next_run_command, print_message

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


@dataclass(frozen=True)
class SearchCommand:
    words: tuple[object, ...]
    """The verb and its arguments."""
    next_command: Callable[[Run], str]
    """Makes the next command for a winner that the gate does not refuse."""
    teacher: Path | None = None
    """Artifact whose students are searched."""


def run_search(
    context: typer.Context, config: "Config", folder: Path, reuse: "Reuse", as_json: bool, command: SearchCommand
) -> None:
    from rtrain.cluster.connection import session
    from rtrain.evaluation import gate_table
    from rtrain.report.progress import ProgressLine, format_next_command, format_summary
    from rtrain.report.summary import summarize
    from tune import search, trainable
    from tune.history import Journal
    from tune.report import table

    settings, journal, headline = config.deploy.tune, Journal(Run(folder).trials), trainable.headline_metric(config)
    with (
        resume_hint_on_interrupt(folder, *command.words),
        _print_trials_on_interrupt(folder, headline, settings),
        ProgressLine(context.obj) as line,
        session(config, folder.parent, line, settings.max_concurrent_trials or 1),
        line.follow_search(table.SearchFollower(headline, settings, journal.history)),
    ):
        line(events.make_phase_event("reading the rows", "rows"))
        search_result = search.run_search(config, folder, reuse, on_event=line, teacher=command.teacher)
    summary, baseline_name = summarize(search_result.winner), "trial 0" if command.teacher is None else "the teacher"
    gate_lines = [] if search_result.gate_verdict is None else gate_table.format_brief(search_result.gate_verdict)
    text = [
        f"{(verdict_text := table.describe_search(search_result.search))}\n",
        *(
            ["\n".join([f"gate, these weights against those of {baseline_name}: {gate_lines[0]}", *gate_lines[1:], ""])]
            if gate_lines
            else []
        ),
        table.format_table(search_result.history, headline, settings),
        f"settings of the winner: {search_result.search.best_config}; all trials: {search_result.search.search_page}",
        format_summary(summary, search_result.winner),
    ]
    document = {**search_result.to_document(), "winner": summary, "verdict_text": verdict_text}
    is_refused = search_result.gate_verdict is not None and search_result.gate_verdict["verdict"] == "refuse"
    next_command = (
        format_next_command("inspect", search_result.winner.artifact)
        if is_refused
        else command.next_command(search_result.winner)
    )
    print_result(document, as_json, "\n".join(text), context.obj.format_phases(), next_command)


@contextmanager
def _print_trials_on_interrupt(folder: Path, headline: str, settings: Any) -> Iterator[None]:
    """Print the trials so far when Ctrl-C or a stop request ends a search."""
    try:
        yield
    except (KeyboardInterrupt, TemporaryFailureError):
        from rtrain.report.progress import print_message
        from tune.history import Journal
        from tune.report import table

        if (history := Journal(Run(folder).trials).history).trials:
            print_message(table.format_table(history, headline, settings))
        raise


@dataclass(frozen=True)
class VerifyOptions(SettingOptions):
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None
    ledger: Annotated[Path | None, typer.Option("--ledger", help="Check the rows that this run trained on.")] = None
    data: DataOption = None
    test: TestOption = None
    model: ModelOption = None
    workers: WorkersOption = None
    out: OutOption = None
    assignments: SetOption = None
    address: AddressOption = None
    full: Annotated[bool, typer.Option("--full", help="The large matrix, on about 1,000 rows.")] = False
    inject_bugs: Annotated[bool, typer.Option("--inject-bugs", help="Inject bugs: each must be detected.")] = False
    as_json: JsonOption = False


@expand_options
def verify(context: typer.Context, options: VerifyOptions) -> None:
    """Show that workers, layouts and resumes change only speed; or, with --ledger, the rows that a run trained on."""
    recipe, ledger = options.recipe, options.ledger
    if (recipe is None) == (ledger is None):
        fix = "write rtrain verify RECIPE --data FILE, or rtrain verify --ledger RUN"
        raise option_error("verify", recipe, "takes either a recipe or --ledger", fix, "conflicting_settings")
    from rtrain.report.progress import format_next_command

    report: Any
    if ledger is not None:
        from rtrain.verification import verify as ledgers

        report, lines = ledgers.check_ledger(Run(ledger.absolute())), [format_next_command("report", ledger)]
    else:
        assert recipe is not None
        from rtrain.runs import prepare, run_folders
        from rtrain.verification import verify as proof

        config = run_folders.resolve_paths(options.load_config(recipe))
        folder = run_folders.default_run_folder(f"{config.recipe.name}-verify", options.out)
        prepare.check_run(config, folder.parent)
        session_config = proof.make_session_config(config, options.full)
        with open_session(context, session_config, folder) as line:
            report = proof.run(config, folder, full=options.full, plant_bugs=options.inject_bugs, on_event=line)
        lines = [context.obj.format_phases(), options.format_train_command(recipe)]
    document = report.to_document()
    print_result(document, options.as_json, report.format_text(), *(lines if document["passed"] else ()))
    if not document["passed"]:
        raise typer.Exit(1)


@dataclass(frozen=True)
class DrillOptions(SettingOptions):
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file.")]
    data: DataOption = None
    test: TestOption = None
    model: ModelOption = None
    workers: WorkersOption = None
    out: OutOption = None
    assignments: SetOption = None
    as_json: JsonOption = False


@expand_options
def drill(context: typer.Context, options: DrillOptions) -> None:
    """Kill and resume a run repeatedly, and compare it with an undisturbed run."""
    from rtrain.runs import prepare, run_folders
    from rtrain.verification import drill as proof

    config = run_folders.resolve_paths(options.load_config(options.recipe))
    folder = run_folders.default_run_folder(f"{config.recipe.name}-drill", options.out)
    prepare.check_run(config, folder.parent)
    with open_session(context, config, folder) as line:
        certificate = proof.run(config, folder, on_event=line)
    lines = [context.obj.format_phases(), options.format_train_command(options.recipe)]
    print_result(
        certificate.to_document(), options.as_json, certificate.format_text(), *(lines if certificate.passed else ())
    )
    if not certificate.passed:
        raise typer.Exit(1)
