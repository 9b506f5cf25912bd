"""The verb `rtrain plan`: a forecast of a run's memory, time and cost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.cli.options import (
    DataOption,
    JsonOption,
    ModelOption,
    SetOption,
    TestOption,
    ValidOption,
    WorkersOption,
    build_config,
    resolve_run_argument,
)
from rtrain.cli.output import print_result
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run, quote_path

if TYPE_CHECKING:
    from rtrain.config import Config
    from rtrain.parallel.layout import ParallelLayout
    from rtrain.planning import memory_needs, placement, run_facts

DEFAULT_CLUSTER_FILE = Path("cluster.yaml")


def plan(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None,
    cluster: Annotated[
        Path, typer.Option("--cluster", help="The cluster's file, as `ray up` takes it.")
    ] = DEFAULT_CLUSTER_FILE,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: WorkersOption = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Training rows, in place of --data.", min=1)] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Tokens of a row, with --rows.", min=1)] = None,
    reference_run: Annotated[
        Path | None, typer.Option("--reference-run", help="A finished run whose throughput is used.")
    ] = None,
    prices: Annotated[Path | None, typer.Option("--prices", help="File of prices, in place of cluster.prices.")] = None,
    write_prices: Annotated[Path | None, typer.Option("--write-prices", help="Write such a file, to edit it.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Of `rtrain tune`, not of one run.")] = False,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast whether a run fits on a cluster that does not run yet, with layout, memory, hours and cost. Nothing is
    started. A layout that would wait forever is refused, with the nearest layout that fits."""
    from rtrain.cluster import pricing as pricing
    from rtrain.planning import placement, plan as planning

    if write_prices is not None:
        if write_prices.exists():
            fix = "name another file"
            raise ConfigError(
                [Problem("--write-prices", str(write_prices), "is there already", fix, code="already_exists")]
            )
        write_prices.write_text(pricing.format_price_file(pricing.load_price_table(prices)), encoding="utf-8")
        print_result(
            {"file": str(write_prices)}, as_json, f"{quote_path(write_prices)}: edit it, and name it by --prices"
        )
        return
    if recipe is None:
        fix = "write a recipe's name or a YAML file"
        raise ConfigError([Problem("recipe", None, "missing", fix, code="missing")])
    if tokens is not None and rows is None:
        fix = "write --rows N beside it, or leave it out: the rows of data.path are counted"
        raise ConfigError(
            [Problem("--tokens", tokens, "is the length of rows that are not read", fix, code="missing_rows")]
        )
    config = build_config(recipe, assignments, data=data, valid=valid, test=test, model=model, workers=workers)
    document = planning.read_cluster_file(cluster)
    nodes = placement.parse_cluster(document)
    layout = placement.plan_placement(config, nodes, is_search=search)  # no torch until here: a refusal comes at once
    prices_file = config.deploy.cluster.prices
    table = pricing.load_price_table(prices or (prices_file and Path(prices_file)), document.get("metadata"))
    forecast = _make_plan(config, nodes, layout, table, (rows, tokens), reference_run, search)
    print_result(forecast, as_json, *planning.format_plan(forecast))


def _make_plan(
    config: "Config",
    nodes: "placement.PlannedCluster",
    layout: "placement.PlacementPlan",
    table: Any,
    row_size: tuple[int | None, int | None],
    reference_run: Path | None,
    search: bool,
) -> dict[str, Any]:
    from rtrain.models import builder as models
    from rtrain.parallel import constraints, layout as strategies
    from rtrain.planning import cost_estimate, plan as planning, run_facts, throughput as paces

    recipe, root = config.recipe, Path("runs")
    folder = models.resolve_folder(recipe.model.name, root)
    architecture_problems = models.check_architecture(folder, recipe.data.window_tokens, model_config=recipe.model)
    all_problems = [
        *architecture_problems,
        *models.check_model_settings(recipe),
        *constraints.check_parallelism(recipe, folder),
    ]
    if problems := all_problems or constraints.check_devices(recipe, layout.device_choice, folder):
        raise ConfigError(problems)
    shape = run_facts.read_encoder_shape(folder, recipe.model)
    rows, tokens = row_size
    if rows is not None:
        row_stats = run_facts.uniform_row_stats(rows, run_facts.assumed_tokens_per_row(recipe, tokens))
    else:
        row_stats = run_facts.measure_rows(recipe, folder)
    best_layout = planning.choose_layout(
        config, nodes, layout, _iter_memory_needs(config, layout, folder, row_stats), table
    )
    node_types = [*(kind for kind in nodes.node_types if best_layout.nodes.get(kind.name)), *nodes.head_types]
    largest_node_type = max(
        node_types, key=lambda node_type: node_type.resources.get("GPU" if layout.device == "gpu" else "CPU", 0.0)
    )
    assumed_throughput = (
        paces.assumed_throughput(largest_node_type.gpu_type, recipe.train.precision)
        if layout.device == "gpu"
        else paces.CPU_THROUGHPUT
    )
    node_throughput = (
        paces.measure_throughput(Run(resolve_run_argument(reference_run)), root)
        if reference_run
        else assumed_throughput
    )
    duration = planning.estimate_duration(config, layout, best_layout, shape, row_stats, node_throughput)
    price = cost_estimate.worker_price(config, table)
    total_hours = (
        planning.search_hours(config, duration, layout.concurrent_trials, price) if search else duration.total_hours
    )
    has_spot_watcher = "rtrain.cluster.spot_watcher" in json.dumps(nodes.document.get("worker_start_ray_commands", []))
    notes = [
        layout.device_choice.message,
        *planning.unmodelled_costs(best_layout.layout.apply_to(recipe.train, layout.available_workers)),
    ]
    notes += planning.unknown_memory_notes(node_types, layout.request)
    if node_throughput.all_reduce_s_per_byte is None and layout.available_workers > 1:
        notes.append("the all-reduce time is not estimated; name a finished run by --reference-run")
    lost_work_s = planning.lost_work_seconds(config, duration, has_spot_watcher)
    if price is None:
        cost = planning.plan_cost(nodes, best_layout.nodes, table, total_hours, lost_work_s)
        notes += cost_estimate.idle_node_notes(nodes, best_layout.nodes)
    else:
        cost = cost_estimate.cost_per_worker_hour(
            total_hours, layout.available_workers * layout.concurrent_trials, price
        )
    if layout.available_workers < layout.workers:
        notes.append(
            f"the cluster has capacity for {layout.available_workers} of {layout.workers} workers; the run starts with "
            f"{layout.min_workers} or more"
        )
    if not has_spot_watcher and any(kind.is_spot for kind in nodes.node_types if best_layout.nodes.get(kind.name)):
        notes.append("no spot watcher runs: an interruption repeats all steps since the last checkpoint")
    if recipe.train.strategy == "manual" and best_layout.layout != strategies.layout_from_config(
        recipe.train, layout.available_workers
    ):
        notes.append(
            f"write {' '.join(f'--set {name}={value}' for name, value in best_layout.layout.settings.items())}"
        )
    return planning.plan_document(
        layout, best_layout, duration, total_hours, cost, node_throughput, [note for note in notes if note]
    )


def _iter_memory_needs(
    config: "Config", layout: "placement.PlacementPlan", folder: Path, rows: "run_facts.RowStats"
) -> "Iterator[tuple[ParallelLayout, memory_needs.WorkerMemory]]":
    """Return the memory of each layout of the model, from a trace of one micro-batch."""
    from rtrain.models import precision as formats
    from rtrain.planning import memory_fit, plan as planning

    recipe, precision_setting = config.recipe, config.recipe.train.precision
    micro_batch = memory_fit.MicroBatchShape(
        memory_fit.largest_micro_batch(recipe, layout.device, min(max(rows.window_tokens), recipe.data.window_tokens)),
        "bf16"
        if precision_setting == "auto"
        else formats.resolve_precision(precision_setting, formats.NativeFormats("cpu", frozenset())),
        rows.num_outputs,
        tokens_per_step=recipe.global_batch_size * rows.tokens_per_row,
    )
    parallel_layouts = planning.candidate_layouts(config, folder, layout.available_workers)
    return memory_fit.memory_of_layouts(
        recipe, folder, parallel_layouts, micro_batch, layout.available_workers, layout.device
    )
