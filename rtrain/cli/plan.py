"""The verb that says what a run will take, before anything is spent: `rtrain plan`."""

import json
from collections.abc import Iterator
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
)
from rtrain.cli.output import show
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run, shown

if TYPE_CHECKING:
    from rtrain.config import Config
    from rtrain.parallel.layout import Way
    from rtrain.planning import memory_needs, placement, run_facts

CLUSTER = Path("cluster.yaml")


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
    like: Annotated[Path | None, typer.Option("--like", help="A finished run, for its pace.")] = None,
    prices: Annotated[Path | None, typer.Option("--prices", help="File of prices, in place of cluster.prices.")] = None,
    write_prices: Annotated[Path | None, typer.Option("--write-prices", help="Write such a file, to edit it.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Of `rtrain tune`, not of one run.")] = False,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Say whether a run fits on a cluster that does not run yet, how, and what memory, hours and money it takes.
    Nothing is started. A layout that would wait for ever is refused, with the nearest that would not."""
    from rtrain.cluster import pricing as pricing
    from rtrain.planning import placement, plan as planning

    if write_prices is not None:
        if write_prices.exists():
            fix = "name another file"
            raise ConfigError(
                [Problem("--write-prices", str(write_prices), "is there already", fix, code="already_exists")]
            )
        write_prices.write_text(pricing.text(pricing.table(prices)), encoding="utf-8")
        show({"file": str(write_prices)}, as_json, f"{shown(write_prices)}: edit it, and name it by --prices")
        return
    if recipe is None:
        fix = "write a recipe's name or a YAML file"
        raise ConfigError([Problem("recipe", None, "missing", fix, code="missing")])
    if tokens is not None and rows is None:
        fix = "write --rows N beside it, or leave it out: the rows of data.path are counted"
        raise ConfigError(
            [Problem("--tokens", tokens, "is the length of rows that are not read", fix, code="missing_rows")]
        )
    config = configured(recipe, assignments, data=data, valid=valid, test=test, model=model, workers=workers)
    document = planning.read_cluster(cluster)
    nodes = placement.of_document(document)
    layout = placement.laid_out(config, nodes, searches=search)  # no torch until here: a refusal comes at once
    named = config.deploy.cluster.prices
    table = pricing.table(prices or (named and Path(named)), document.get("metadata"))
    made = _planned(config, nodes, layout, table, (rows, tokens), like, search)
    show(made, as_json, *planning.text(made))


def _planned(
    config: "Config",
    nodes: "placement.Cluster",
    layout: "placement.Layout",
    table: Any,
    given: tuple[int | None, int | None],
    like: Path | None,
    search: bool,
) -> dict[str, Any]:
    from rtrain.models import builder as models
    from rtrain.parallel import constraints, layout as strategies
    from rtrain.planning import cost_estimate, plan as planning, run_facts, throughput as paces

    recipe, root = config.recipe, Path("runs")
    folder = models.resolve(recipe.model.name, root)
    unread = models.check_architecture(folder, recipe.data.window_tokens, chosen=recipe.model)
    refused = [*unread, *models.problems(recipe), *constraints.problems(recipe, folder)]
    if problems := refused or constraints.of_devices(recipe, layout.choice, folder):
        raise ConfigError(problems)
    shape = run_facts.of_model(folder, recipe.model)
    rows, tokens = given
    if rows is not None:
        counted = run_facts.given(rows, run_facts.length(recipe, tokens))
    else:
        counted = run_facts.of_rows(recipe, folder)
    chosen = planning.choose(config, nodes, layout, _needs(config, layout, folder, counted), table)
    kinds = [*(kind for kind in nodes.kinds if chosen.nodes.get(kind.name)), *nodes.heads]
    kind = max(kinds, key=lambda one: one.node.get("GPU" if layout.device == "gpu" else "CPU", 0.0))
    assumed = paces.assumed(kind.gpu, recipe.train.precision) if layout.device == "gpu" else paces.CPU
    pace = paces.of_run(Run(chosen_run(like)), root) if like else assumed
    found = planning.hours(config, layout, chosen, shape, counted, pace)
    price = cost_estimate.worker_price(config, table)
    total = planning.searched(config, found, layout.trials, price) if search else found.hours
    watched = "rtrain.cluster.spot_watcher" in json.dumps(nodes.document.get("worker_start_ray_commands", []))
    notes = [layout.choice.why, *planning.untold(chosen.way.of(recipe.train, layout.room))]
    notes += planning.unchecked(kinds, layout.needs)
    if pace.exchange_s is None and layout.room > 1:
        notes.append("how long an update waits for the exchange of gradients is not foretold; name a run by --like")
    repeats_s = planning.repeated_s(config, found, watched)
    if price is None:
        cost = planning.money(nodes, chosen.nodes, table, total, repeats_s)
        notes += cost_estimate.idle(nodes, chosen.nodes)
    else:
        cost = cost_estimate.of_workers(total, layout.room * layout.trials, price)
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
    config: "Config", layout: "placement.Layout", folder: Path, rows: "run_facts.Rows"
) -> "Iterator[tuple[Way, memory_needs.Need]]":
    """What each way to hold the model takes, by a trace of one pass."""
    from rtrain.models import precision as formats
    from rtrain.planning import memory_fit, plan as planning

    recipe, wanted = config.recipe, config.recipe.train.precision
    passes = memory_fit.Pass(
        memory_fit.lengths(recipe, layout.device, min(max(rows.windows), recipe.data.window_tokens)),
        "bf16" if wanted == "auto" else formats.resolve(wanted, formats.Native("cpu", frozenset())),
        rows.outputs,
        tokens_of_update=recipe.rows_per_update * rows.tokens_of_row,
    )
    ways = planning.ways(config, folder, layout.room)
    return memory_fit.needs(recipe, folder, ways, passes, layout.room, layout.device)
