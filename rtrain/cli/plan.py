"""The verb that says what a run will take, before anything is spent: `rtrain plan`."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.cli.options import (
    DataOption,
    Json,
    ModelOption,
    Set,
    TestOption,
    ValidOption,
    Workers,
    chosen_run,
    configured,
    overrides_of,
)
from rtrain.cli.output import show
from rtrain.errors import ConfigError, Problem
from rtrain.run import Run, shown

if TYPE_CHECKING:
    from rtrain.config import Config
    from rtrain.doctor.forecast import facts, layouts, memory
    from rtrain.strategies.ways import Way

CLUSTER = Path("cluster.yaml")
CARRIED = ("optim.", "tune.")
"""Settings by which --choose-k carries the learning rate; those of the pilot's own training are its run's."""


def plan(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None,
    cluster: Annotated[Path, typer.Option("--cluster", help="The cluster's file, as `ray up` takes it.")] = CLUSTER,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Training rows, in place of --data.", min=1)] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Tokens of a row, with --rows.", min=1)] = None,
    like: Annotated[Path | None, typer.Option("--like", help="A finished run: its pace, or its noise scale.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure exchanges between two processes here, for those within a node.")
    ] = False,
    wires: Annotated[
        list[str] | None,
        typer.Option("--wires", help="How it would scale over efa, 10gbit, ...; for each one."),
    ] = None,
    prices: Annotated[Path | None, typer.Option("--prices", help="File of prices, in place of cluster.prices.")] = None,
    write_prices: Annotated[Path | None, typer.Option("--write-prices", help="Write such a file, to edit it.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Of `rtrain tune`, not of one run.")] = False,
    choose_k: Annotated[
        bool, typer.Option("--choose-k", help="The aggregation frequency that trains soonest, by the run --like.")
    ] = False,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Say whether a run fits on a cluster that does not run yet, how, and what memory, hours and money it takes.
    Nothing is started. A layout that would wait for ever is refused, with the nearest that would not."""
    from rtrain.cluster import prices as pricing
    from rtrain.doctor.forecast import layouts, plan as planning
    from rtrain.doctor.forecast.links import PRESETS

    if write_prices is not None:
        if write_prices.exists():
            fix = "name another file"
            raise ConfigError([Problem("--write-prices", str(write_prices), "is there already", fix)])
        write_prices.write_text(pricing.text(pricing.table(prices)), encoding="utf-8")
        show({"file": str(write_prices)}, as_json, f"{shown(write_prices)}: edit it, and name it by --prices")
        return
    if choose_k:
        files = {"--data": data, "--valid": valid, "--test": test, "--model": model, "--prices": prices}
        counts = {"--workers": workers, "--rows": rows, "--tokens": tokens}
        asked = {"--measure": measure or None, "--wires": wires or None, "--search": search or None}
        where = {"recipe": recipe, "--cluster": None if cluster == CLUSTER else str(cluster)}
        _chosen_k(like, assignments, where | files | counts | asked, as_json)
        return
    if recipe is None:
        raise ConfigError([Problem("recipe", None, "missing", "write a recipe's name or a YAML file")])
    if tokens is not None and rows is None:
        fix = "write --rows N beside it, or leave it out: the rows of data.path are counted"
        raise ConfigError([Problem("--tokens", tokens, "is the length of rows that are not read", fix)])
    if unknown := [name for name in wires or () if name not in PRESETS]:
        raise ConfigError([Problem("--wires", unknown[0], "not known", f"write {', '.join(PRESETS)}")])
    config = configured(recipe, assignments, data=data, valid=valid, test=test, model=model, workers=workers)
    document = planning.read_cluster(cluster)
    nodes = layouts.of_document(document)
    layout = layouts.laid_out(config, nodes, searches=search)  # no torch until here: a refusal comes at once
    named = config.deploy.cluster.prices
    table = pricing.table(prices or (named and Path(named)), document.get("metadata"))
    made = _planned(config, nodes, layout, table, (rows, tokens), (like, measure), search, wires or ())
    show(made, as_json, *planning.text(made))


def _planned(
    config: "Config",
    nodes: "layouts.Cluster",
    layout: "layouts.Layout",
    table: Any,
    given: tuple[int | None, int | None],
    pace_of: tuple[Path | None, bool],
    search: bool,
    wires: Sequence[str],
) -> dict[str, Any]:
    from rtrain.doctor.forecast import facts, money, pace as paces, plan as planning
    from rtrain.network import model as models
    from rtrain.strategies import allowed, ways as strategies

    recipe, root = config.recipe, Path("runs")
    folder = models.resolve(recipe.model.name, root)
    unread = models.check_architecture(folder, recipe.data.window_tokens, chosen=recipe.model)
    refused = [*unread, *models.problems(recipe), *allowed.problems(recipe, folder)]
    if problems := refused or allowed.of_devices(recipe, layout.choice, folder):
        raise ConfigError(problems)
    shape = facts.of_model(folder, recipe.model)
    rows, tokens = given
    if rows is not None:
        counted = facts.given(rows, facts.length(recipe, tokens))
    else:
        counted = facts.of_rows(recipe, folder)
    chosen = planning.choose(config, nodes, layout, _needs(config, layout, folder, counted), table)
    kinds = [*(kind for kind in nodes.kinds if chosen.nodes.get(kind.name)), *nodes.heads]
    kind = max(kinds, key=lambda one: one.node.get("GPU" if layout.device == "gpu" else "CPU", 0.0))
    assumed = paces.assumed(kind.gpu, recipe.train.precision) if layout.device == "gpu" else paces.CPU
    like, measure = pace_of
    pace = paces.of_run(Run(chosen_run(like)), root).pace if like else assumed
    if measure and layout.device == "cpu":
        from rtrain.doctor.forecast import calibrate

        train = chosen.way.of(recipe.train, layout.room)
        by = strategies.transport(train, layout.room, layout.device)
        link = calibrate.fitted(calibrate.exchanges(2, transport=by), 2, "this machine's")
        how = {"shared_memory": "through shared memory", "stock": "by sockets"}[by]
        pace = dataclasses.replace(pace, exchange=link, why=f"{pace.why}; exchanges {how} as measured here")
    found = planning.hours(config, layout, chosen, shape, counted, pace, kind, wires)
    price = money.worker_price(config, table)
    total = planning.searched(config, found, layout.trials, price) if search else found.hours
    watched = "rtrain.cluster.spot" in json.dumps(nodes.document.get("worker_start_ray_commands", []))
    notes = [layout.choice.why, planning.replicas(config, nodes), *planning.untold(recipe.train)]
    notes += planning.unchecked(kinds, layout.needs)
    if measure and layout.device == "gpu":
        notes.append("--measure: nothing was measured, since GPUs do not exchange by what processes of a machine do")
    repeats_s = planning.repeated_s(config, found, watched)
    if price is None:
        cost = planning.money(nodes, chosen.nodes, table, total, repeats_s)
        notes += money.idle(nodes, chosen.nodes)
    else:
        cost = money.of_workers(total, layout.room * layout.trials, price)
    if layout.room < layout.workers:
        notes.append(
            f"there is room for {layout.room} of {layout.workers} workers; it starts with {layout.least} or more"
        )
    if not watched and any(kind.is_spot for kind in nodes.kinds if chosen.nodes.get(kind.name)):
        notes.append("nobody listens for spot notices: an interruption repeats what is not saved yet")
    if recipe.train.strategy == "manual" and chosen.way != strategies.own(recipe.train, layout.room):
        notes.append(f"write {' '.join(f'--set {name}={value}' for name, value in chosen.way.settings.items())}")
    return planning.document(layout, chosen, found, total, cost, pace, [note for note in notes if note])


def _needs(
    config: "Config", layout: "layouts.Layout", folder: Path, rows: "facts.Rows"
) -> "Iterator[tuple[Way, memory.Need]]":
    """What each way to hold the model takes, by a trace of one pass."""
    from rtrain.doctor.forecast import fitting, plan as planning
    from rtrain.network import precision as formats

    recipe, wanted = config.recipe, config.recipe.train.precision
    passes = fitting.Pass(
        fitting.lengths(recipe, layout.device, min(max(rows.windows), recipe.data.window_tokens)),
        "bf16" if wanted == "auto" else formats.resolve(wanted, formats.Native("cpu", frozenset())),
        rows.outputs,
        tokens_of_update=recipe.rows_per_update * rows.tokens_of_row,
    )
    ways = planning.ways(config, folder, layout.room)
    return fitting.needs(recipe, folder, ways, passes, layout.room, layout.device)


def _chosen_k(like: Path | None, assignments: list[str] | None, unused: Mapping[str, Any], as_json: bool) -> None:
    """`unused`: what else the command names, which says nothing of a run that is there."""
    from rtrain import config as configuration
    from rtrain.doctor import frequency

    why, problems = "--choose-k decides by the run --like", list[Problem]()
    if like is None:
        reason = "needs a pilot: a short run of the recipe"
        fix = "write --like RUN, or let one be trained: rtrain profile RECIPE --choose-k"
        problems.append(Problem("--like", None, reason, fix))
    problems += [Problem(name, value, why, "leave it out") for name, value in unused.items() if value is not None]
    overrides = overrides_of(assignments)
    for name in (name for name in overrides if not name.startswith(CARRIED)):
        reason = f"{why}, which was trained with settings of its own"
        fix = "leave it out, or let a pilot be trained with it: rtrain profile RECIPE --choose-k"
        problems.append(Problem(name, overrides[name], reason, fix))
    if like is None or problems:
        raise ConfigError(problems)
    run = Run(chosen_run(like))
    document = frequency.decided(configuration.load(str(run.config), overrides), run)
    show(document, as_json, *frequency.text(document))
