"""Verbs that train: recipes, train, tune, report, demo, verify, drill. Heavy imports are inside the verbs."""

import json
import re
import sys
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
    follow_verb,
    format_arguments,
    leave_to_supervisor,
    open_session,
    option_error,
    print_result,
)
from rtrain.core.run_folder import Run, relative_to_cwd

if TYPE_CHECKING:
    from rtrain.api.results import TuneResult


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


@dataclass(frozen=True)
class FoldOptions(TrainOptions):
    folds: Annotated[
        int | None, typer.Option("--folds", min=2, max=100, help="Cross-validate: train this many runs, one per fold.")
    ] = None


@expand_options
def train(context: typer.Context, options: FoldOptions) -> None:
    """Fine-tune an encoder on a file of texts; the result is an artifact for predict and serve."""
    _leave_to_supervisor("train", options)
    from rtrain.api import training
    from rtrain.api.results import FoldsResult
    from rtrain.report.progress import format_next_command, next_run_command

    words: list[object] = ["train"]
    if options.folds is not None and options.recipe is not None:
        words += [*format_arguments(options.recipe, options.assignments, **options.settings), "--folds", options.folds]
    with follow_verb(context, *words) as line:
        result = training.train(**options.api_arguments, folds=options.folds, on_event=line)
    if isinstance(result, FoldsResult):
        report_command = format_next_command("report", result.runs[0].folder)
        print_result(result.document, options.as_json, result.text, context.obj.format_phases(), report_command)
        return
    print_result(
        result.document,
        options.as_json,
        result.text,
        _format_disk_usage(result.run),
        context.obj.format_phases(),
        next_run_command(result.run, "train"),
    )


def _leave_to_supervisor(verb: str, options: TrainOptions) -> None:
    from rtrain.api.training import RunRequest
    from rtrain.cluster import supervisor

    if supervisor.should_supervise():  # else the function of the verb loads the settings
        keywords = {"resume": options.resume, "new": options.new, "folds": getattr(options, "folds", None)}
        request = RunRequest.from_arguments(verb, options.recipe, options.out, options.overrides, keywords)
        leave_to_supervisor(*request.load_settings(), request.reuse)


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
    _leave_to_supervisor("tune", options)
    from rtrain.api import training
    from rtrain.api.results import StudyResult
    from rtrain.report.progress import next_run_command

    with follow_verb(context, "tune") as line:
        result: Any = training.tune(**options.api_arguments, on_event=line)
    if isinstance(result, StudyResult):
        print_result(result.document, options.as_json, result.text, context.obj.format_phases())
    else:
        print_search(context, result, options.as_json, next_run_command(result.winner.run, "train"))


def print_search(context: typer.Context, result: "TuneResult", as_json: bool, next_command: str) -> None:
    """Print the result of a search. `next_command`: for a winner that the gate does not refuse."""
    from rtrain.report.progress import format_next_command

    gate_verdict = result.document["gate"]
    if gate_verdict is not None and gate_verdict["verdict"] == "refuse":
        next_command = format_next_command("inspect", result.winner.artifact.folder)
    print_result(result.document, as_json, result.text, context.obj.format_phases(), next_command)


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run or a search, also unfinished.")],
    trackers: Annotated[
        bool, typer.Option("--trackers", help="Send the events that its trackers lack, too; of a run that has ended.")
    ] = False,
) -> None:
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
    if trackers:
        from rtrain.config import load_config
        from rtrain.report import tracker_feed
        from rtrain.runs import run_folders

        with run_folders.lock(resolved_run):
            run_config = load_config(str(resolved_run.config))
            if not run_config.deploy.report.trackers:
                fix = f"write {resolved_run.resume_command} --set report.trackers=[mlflow]"
                raise option_error("--trackers", None, "report.trackers of the run is empty", fix, "missing")
            tracker_feed.send_missing(run_config, resolved_run, lambda event: print_message(event["text"]), always=True)
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
