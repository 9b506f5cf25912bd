"""Verbs about runs: the recipes, train, tune, report, and the demo. Heavy imports are inside the verbs."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rtrain.cli.options import (
    Address,
    DataOption,
    Json,
    ModelOption,
    New,
    Out,
    Recipe,
    Resume,
    Set,
    TestOption,
    ValidOption,
    Workers,
    configured,
    opened,
    resumable,
)
from rtrain.cli.output import show
from rtrain.cli.search import searched
from rtrain.core import env, events
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run, near


def recipes_list() -> None:
    """The recipes that come with rtrain, each with what it is for."""
    from rtrain import config

    for name in config.recipe_names():
        paragraph = config.recipe_text(name).partition("\n#\n")[0].replace("\n#", "").removeprefix("# ")
        print(f"{name:<20}{re.split('[.:] ', paragraph.removesuffix('.'))[0]}")


def recipes_show(
    name: Annotated[str, typer.Argument(help="A recipe's name.")],
    every: Annotated[bool, typer.Option("--all", help="Every setting, with its description.")] = False,
) -> None:
    """Print a recipe's commented YAML; save it, edit it, and give the file's name in place of the recipe's."""
    from rtrain import config
    from rtrain.config import reference

    if every:
        print(reference.whole_recipe(name), end="")
        return
    text = config.recipe_text(name)  # refuses an unknown name before anything is printed
    print(f"# The short form: what this recipe sets. All settings: rtrain recipes show {name} --all\n{text}", end="")


def train(
    context: typer.Context,
    recipe: Recipe = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    resume: Resume = False,
    new: New = False,
    as_json: Json = False,
) -> None:
    """Fine-tune an encoder on a file of texts; ends with an artefact that predict and serve take."""
    short = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config, folder, reuse = opened(recipe, assignments, out, resume, new, **short)
    from rtrain.cluster.connection import session
    from rtrain.report.live.progress import Line, after, summary_text
    from rtrain.runs import controller, prepare

    source, _ = prepare.check(config, folder.parent, begun=reuse == "resume")
    with resumable(folder, "train"), Line(context.obj) as line, session(config, folder.parent, line):
        line(events.doing("reading the rows", "rows"))
        prepared = prepare.prepare(config, folder, reuse, source=source)
        summary = controller.fit(prepared, on_event=line)
    run = prepared.run
    show(summary, as_json, summary_text(summary, run), _disk(run), context.obj.text(), after(run, "train"))


def _disk(run: Run) -> str:
    """What a run takes on the disk, and what of it can go."""
    from rtrain.runs.store import disk_usage

    parts = disk_usage.parts(run)
    held = parts.get(disk_usage.CHECKPOINTS, 0)
    freed = (
        f", checkpoints {disk_usage.text(held)} of it: rtrain clean {near(run.folder)} removes these" if held else ""
    )
    return f"disk: {disk_usage.text(sum(parts.values()))}{freed}"


def tune(
    context: typer.Context,
    recipe: Recipe = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    resume: Resume = False,
    new: New = False,
    as_json: Json = False,
) -> None:
    """Search learning rate and aggregation frequency, train the best to their ends, and say which has won."""
    short = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config, folder, reuse = opened(recipe, assignments, out, resume, new, True, **short)
    if config.deploy.tune.study is not None:
        _study(context, config, folder, reuse, as_json)
        return
    from rtrain.cluster import preflight

    if problems := preflight.overbooked(config, env.cores()):  # before Ray is imported, which takes seconds
        raise ConfigError(problems)
    from rtrain.models import builder as models
    from rtrain.report.live.progress import after
    from rtrain.runs import prepare
    from tune import search

    search.check(config)
    prepare.check(config, folder.parent, begun=reuse == "resume")
    if reuse != "resume":
        search.check_model(config, models.resolve(config.recipe.model.name, folder.parent))
    searched(context, config, folder, reuse, as_json, ("tune",), lambda winner: after(winner, "train"))


def _study(context: typer.Context, config: Any, folder: Path, reuse: Any, as_json: bool) -> None:
    """`rtrain tune` of a recipe that is studied, and not searched."""
    from rtrain.cluster.connection import session
    from rtrain.report.live.progress import Line
    from rtrain.runs import prepare
    from tune import study

    study.check(config)
    prepare.check(config, folder.parent, begun=reuse == "resume")
    with resumable(folder, "tune"), Line(context.obj) as line, session(config, folder.parent, line):
        line(events.doing("reading the rows", "rows"))
        found = study.run(config, folder, reuse, on_event=line)
    text = f"{found.table.text}\n\nas a page: {found.study.study_page}; as JSON: {found.study.study_table}"
    show(dict(found.table.document), as_json, text, context.obj.text())


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run or a search, also of one that has not ended.")],
) -> None:
    """Write RUN/report.html: the rows, the curves, the answers, where the time went; one page, offline. A
    search's page says whether it has found anything, and shows its trials."""
    made = Run(run.absolute())
    if made.is_search:
        from rtrain import config
        from tune.report import page, study_table

        studied = config.load(str(made.config)).deploy.tune.study is not None
        print(study_table.write(made) if studied else page.write(made))
        return
    from rtrain.report import html
    from rtrain.report.live.progress import after, say

    print(html.make(made))
    if made.finished:
        say(after(made))


def demo(
    out: Out = None,
    model: ModelOption = None,
    assignments: Set = None,
    address: Address = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the endpoint up until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """The whole path on the embedded data: ingest, search, train, distill, quantize, serve, ask."""
    from rtrain import demo as whole

    config = configured("demo", assignments, model=model, address=address)
    document = whole.run(config, out, keep=keep)
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    if not document["answer_matches"]:
        print("rtrain: the endpoint's answers are not those of rtrain predict; see the table above", file=sys.stderr)
        raise typer.Exit(1)
