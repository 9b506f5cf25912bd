"""The verb that says what a run costs: where its time goes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.cli.options import (
    Address,
    DataOption,
    Json,
    ModelOption,
    Set,
    TestOption,
    ValidOption,
    Workers,
    configured,
)
from rtrain.cli.output import show
from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rtrain.config import Config


def profile(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Annotated[str | None, typer.Option("--out", help="Folder of the profile, or page of two.")] = None,
    assignments: Set = None,
    address: Address = None,
    updates: Annotated[int, typer.Option("--updates", min=1, help="Updates that are measured.")] = 20,
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Updates before them that are not.")] = 3,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="A row for each value: workers=1,2, loader=1,2,4, precision=..., any setting=..."),
    ] = None,
    choose_k: Annotated[
        bool, typer.Option("--choose-k", help="Train a pilot; say which aggregation frequency trains soonest.")
    ] = False,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--beside", help="No training: a profile's JSON; named twice, one page of both."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where the time of a recipe's updates goes, on each worker; print it, and write a page and a trace."""
    from rtrain.cluster.connection import session
    from rtrain.profiling import cases, profile as profiling, tables
    from rtrain.report.live.progress import Line
    from rtrain.runs import run_folders

    if beside:
        _beside(recipe, beside, out, as_json)
        return
    if recipe is None:
        reason = "takes a recipe, or two profiles by --beside"
        fix = "write rtrain profile RECIPE --data FILE, or --beside A.json --beside B.json"
        raise ConfigError([Problem("profile", None, reason, fix, code="missing")])
    short = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config = run_folders.absolute(configured(recipe, assignments, **short))
    if choose_k:
        if sweep:
            reason, fix = "trains one pilot, and sweeps nothing", "profile first, and choose then"
            raise ConfigError([Problem("--choose-k", None, reason, fix, code="conflicting_settings")])
        _chosen_k(context, config, run_folders.folder_for(f"{config.recipe.name}-choose-k", out), as_json)
        return
    folder = run_folders.folder_for(f"{config.recipe.name}-profile", out)
    length = cases.Length(updates, warm_up)
    found = cases.rows(config, sweep or (), length)
    with Line(context.obj) as line:
        document = profiling.run(
            config, found, length, folder, lambda row, place: session(row, place.parent, line), on_event=line
        )
    files: dict[str, Any] = {name: str(folder / name) for name in (profiling.JSON, profiling.PAGE, profiling.TRACE)}
    said = f"page: {files[profiling.PAGE]}\ntrace, for ui.perfetto.dev: {files[profiling.TRACE]}"
    show({**document, "files": files}, as_json, f"{tables.text(document)}\n", said, context.obj.text())


def _chosen_k(context: typer.Context, config: "Config", folder: Path, as_json: bool) -> None:
    from rtrain.cluster.connection import session
    from rtrain.profiling import profile as profiling
    from rtrain.report.live.progress import Line
    from tune import choose_frequency

    profiling.check([config], folder)
    with Line(context.obj) as line, session(config, folder.parent, line):
        document = choose_frequency.run(config, folder, line)
    file = str(folder / choose_frequency.JSON)
    lines = [*choose_frequency.text(document), f"decision: {file}", context.obj.text()]
    show({**document, "file": file}, as_json, *lines)


def _beside(recipe: str | None, paths: list[Path], out: str | None, as_json: bool) -> None:
    if len(paths) != 2 or recipe is not None:
        fix = "write rtrain profile --beside A.json --beside B.json"
        reason = "sets two profiles beside each other, and trains nothing"
        raise ConfigError([Problem("--beside", None, reason, fix, code="conflicting_settings")])
    from rtrain.profiling import page, profile as profiling, tables

    documents = [profiling.read(path.expanduser().absolute()) for path in paths]
    names = [document["name"] for document in documents]
    if names[0] == names[1]:
        names = [str(path) for path in paths]
    made = Path(out or "profiles.html").expanduser().absolute()
    made.write_text(page.beside(documents, names), encoding="utf-8")
    notes = tables.unpaired(documents, names)
    found = {"profiles": [str(path) for path in paths], "rows": _ratios(documents), "notes": notes, "page": str(made)}
    show(found, as_json, "\n".join([tables.beside(documents, names).text, "", *notes, f"page: {made}"]))


def _ratios(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How long an update of the second takes beside the first, row by row."""
    pairs = zip(*(document["rows"] for document in documents), strict=False)
    return [{"rows": [one["name"], other["name"]], "ratio": other["update"] / one["update"]} for one, other in pairs]
