"""Verbs about memory, time and cost: plan before a run, profile of its steps."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.cli.options import (
    AddressOption,
    DataOption,
    JsonOption,
    ModelOption,
    SetOption,
    SettingOptions,
    TestOption,
    ValidOption,
    WorkersOption,
    expand_options,
    open_session,
    option_error,
    print_result,
    resolve_run_argument,
)
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run, quote_path

if TYPE_CHECKING:
    from rtrain.config import Config
    from rtrain.parallel.layout import ParallelLayout
    from rtrain.planning import memory_estimate, placement, run_facts

DEFAULT_CLUSTER_FILE = Path("cluster.yaml")


@dataclass(frozen=True)
class PlanOptions(SettingOptions):
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None
    cluster: Annotated[Path, typer.Option("--cluster", help="The cluster's file, as `ray up` takes it.")] = (
        DEFAULT_CLUSTER_FILE
    )
    data: DataOption = None
    valid: ValidOption = None
    test: TestOption = None
    model: ModelOption = None
    workers: WorkersOption = None
    rows: Annotated[int | None, typer.Option("--rows", help="Training rows, in place of --data.", min=1)] = None
    tokens: Annotated[int | None, typer.Option("--tokens", help="Tokens of a row, with --rows.", min=1)] = None
    reference_run: Annotated[
        Path | None, typer.Option("--reference-run", help="A finished run whose throughput is used.")
    ] = None
    prices: Annotated[Path | None, typer.Option("--prices", help="File of prices, in place of cluster.prices.")] = None
    write_prices: Annotated[Path | None, typer.Option("--write-prices", help="Write such a file, to edit it.")] = None
    search: Annotated[bool, typer.Option("--search", help="Of `rtrain tune`, not of one run.")] = False
    assignments: SetOption = None
    as_json: JsonOption = False


@expand_options
def plan(options: PlanOptions) -> None:
    """Forecast whether a run fits on a cluster that does not run yet, with layout, memory, hours and cost. Nothing is
    started. A layout that would wait forever is refused, with the nearest layout that fits."""
    from rtrain.cluster import pricing
    from rtrain.planning import placement, plan as planning

    if options.write_prices is not None:
        _write_price_file(options.write_prices, options.prices, options.as_json)
        return
    if options.recipe is None:
        raise option_error("recipe", None, "missing", "write a recipe's name or a YAML file", "missing")
    if options.tokens is not None and options.rows is None:
        fix = "write --rows N beside it, or leave it out: the rows of data.path are counted"
        raise option_error("--tokens", options.tokens, "is the length of rows that are not read", fix, "missing_rows")
    config = options.load_config(options.recipe)
    document = planning.read_cluster_file(options.cluster)
    nodes = placement.parse_cluster(document)
    # No torch until here: a refusal comes at once.
    layout = placement.plan_placement(config, nodes, is_search=options.search)
    prices_file = options.prices or config.deploy.cluster.prices
    table = pricing.load_price_table(prices_file and Path(prices_file), document.get("metadata"))
    forecast = _make_plan(config, nodes, layout, table, options)
    print_result(forecast, options.as_json, *planning.format_plan(forecast))


def _write_price_file(file: Path, prices: Path | None, as_json: bool) -> None:
    from rtrain.cluster import pricing

    if file.exists():
        raise option_error("--write-prices", str(file), "is there already", "name another file", "already_exists")
    file.write_text(pricing.format_price_file(pricing.load_price_table(prices)), encoding="utf-8")
    print_result({"file": str(file)}, as_json, f"{quote_path(file)}: edit it, and name it by --prices")


def _make_plan(
    config: "Config",
    nodes: "placement.PlannedCluster",
    layout: "placement.PlacementPlan",
    table: Any,
    options: PlanOptions,
) -> dict[str, Any]:
    from rtrain.models import builder as models
    from rtrain.parallel import layout as strategies
    from rtrain.planning import placement, plan as planning, run_facts, throughput as paces

    recipe, root = config.recipe, Path("runs")
    folder = models.resolve_folder(recipe.model.name, root)
    architecture_problems = models.check_architecture(folder, recipe.data.window_tokens, model_config=recipe.model)
    all_problems = [
        *architecture_problems,
        *models.check_model_settings(recipe),
        *strategies.check_parallelism(recipe, folder),
    ]
    if problems := all_problems or strategies.check_devices(recipe, layout.device_choice, folder):
        raise ConfigError(problems)
    shape = run_facts.read_encoder_shape(folder, recipe.model)
    if options.rows is not None:
        tokens_per_row = run_facts.assumed_tokens_per_row(recipe, options.tokens)
        row_stats = run_facts.uniform_row_stats(options.rows, tokens_per_row)
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
        paces.measure_throughput(Run(resolve_run_argument(options.reference_run)), root)
        if options.reference_run
        else assumed_throughput
    )
    duration = planning.estimate_duration(config, layout, best_layout, shape, row_stats, node_throughput)
    price = placement.worker_price(config, table)
    total_hours = (
        planning.search_hours(config, duration, layout.concurrent_trials, price)
        if options.search
        else duration.total_hours
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
        notes += placement.idle_node_notes(nodes, best_layout.nodes)
    else:
        cost = placement.cost_per_worker_hour(total_hours, layout.available_workers * layout.concurrent_trials, price)
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
    source = node_throughput.source
    document = planning.plan_document(layout, best_layout, duration, total_hours, cost, source)
    return {**document, "notes": [note for note in notes if note]}


def _iter_memory_needs(
    config: "Config", layout: "placement.PlacementPlan", folder: Path, rows: "run_facts.RowStats"
) -> "Iterator[tuple[ParallelLayout, memory_estimate.WorkerMemory]]":
    """Return the memory of each layout of the model, from a trace of one micro-batch."""
    from rtrain.models import precision as formats
    from rtrain.planning import memory_estimate, plan as planning

    recipe, precision_setting = config.recipe, config.recipe.train.precision
    micro_batch = memory_estimate.MicroBatchShape(
        memory_estimate.largest_micro_batch(
            recipe, layout.device, min(max(rows.window_tokens), recipe.data.window_tokens)
        ),
        "bf16"
        if precision_setting == "auto"
        else formats.resolve_precision(precision_setting, formats.NativeFormats("cpu", frozenset())),
        rows.num_outputs,
        tokens_per_step=recipe.global_batch_size * rows.tokens_per_row,
    )
    parallel_layouts = planning.candidate_layouts(config, folder, layout.available_workers)
    return memory_estimate.memory_of_layouts(
        recipe, folder, parallel_layouts, micro_batch, layout.available_workers, layout.device
    )


@dataclass(frozen=True)
class ProfileOptions(SettingOptions):
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None
    data: DataOption = None
    valid: ValidOption = None
    test: TestOption = None
    model: ModelOption = None
    workers: WorkersOption = None
    out: Annotated[str | None, typer.Option("--out", help="Folder of the profile, or page of two.")] = None
    assignments: SetOption = None
    address: AddressOption = None
    steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps.")] = 20
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Warm-up steps before them.")] = 3
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="A row for each value: workers=1,2, loader=1,2,4, precision=..., any setting=..."),
    ] = None
    choose_k: Annotated[
        bool, typer.Option("--choose-k", help="Train a calibration run; print the fastest aggregation frequency.")
    ] = False
    compared_profiles: Annotated[
        list[Path] | None,
        typer.Option("--compare", help="Compare two profiles (JSON, written twice) on one page, without training."),
    ] = None
    as_json: JsonOption = False


@expand_options
def profile(context: typer.Context, options: ProfileOptions) -> None:
    """Measure the time of each part of a recipe's steps on each worker; print a table, and write a page and a trace."""
    from rtrain.cluster.connection import session
    from rtrain.profiling import profile, profile as profiling, tables
    from rtrain.report.progress import ProgressLine
    from rtrain.runs import run_folders

    if options.compared_profiles:
        _compare_profiles(options.recipe, options.compared_profiles, options.out, options.as_json)
        return
    if options.recipe is None:
        fix = "write rtrain profile RECIPE --data FILE, or --compare A.json --compare B.json"
        raise option_error("profile", None, "needs a recipe, or two profiles by --compare", fix, "missing")
    config = run_folders.resolve_paths(options.load_config(options.recipe))
    if options.choose_k:
        if options.sweep:
            reason, fix = "trains one calibration run, without sweeps", "leave out --sweep"
            raise option_error("--choose-k", None, reason, fix, "conflicting_settings")
        folder = run_folders.default_run_folder(f"{config.recipe.name}-choose-k", options.out)
        _choose_k(context, config, folder, options.as_json)
        return
    folder = run_folders.default_run_folder(f"{config.recipe.name}-profile", options.out)
    length = profile.ProfileLength(options.steps, options.warm_up)
    sweep_rows = profile.expand_sweeps(config, options.sweep or (), length)
    with ProgressLine(context.obj) as line:
        document = profiling.run_profile(
            config, sweep_rows, length, folder, lambda row, place: session(row, place.parent, line), on_event=line
        )
    files: dict[str, Any] = {
        name: str(folder / name) for name in (profiling.JSON_FILE, profiling.PAGE_FILE, profiling.TRACE_FILE)
    }
    file_lines = f"page: {files[profiling.PAGE_FILE]}\ntrace, for ui.perfetto.dev: {files[profiling.TRACE_FILE]}"
    print_result(
        {**document, "files": files},
        options.as_json,
        f"{tables.format_profile(document)}\n",
        file_lines,
        context.obj.format_phases(),
    )


def _choose_k(context: typer.Context, config: "Config", folder: Path, as_json: bool) -> None:
    from rtrain.profiling import profile as profiling
    from tune import choose_frequency

    profiling.check_profile([config], folder)
    with open_session(context, config, folder) as line:
        document = choose_frequency.choose_frequency(config, folder, line)
    file = str(folder / choose_frequency.DECISION_FILE)
    lines = [*choose_frequency.format_decision(document), f"decision: {file}", context.obj.format_phases()]
    print_result({**document, "file": file}, as_json, *lines)


def _compare_profiles(recipe: str | None, paths: list[Path], out: str | None, as_json: bool) -> None:
    if len(paths) != 2 or recipe is not None:
        fix = "write rtrain profile --compare A.json --compare B.json"
        raise option_error("--compare", None, "compares two profiles, and trains nothing", fix, "conflicting_settings")
    from rtrain.profiling import profile as profiling, tables

    documents = [profiling.read_profile(path.expanduser().absolute()) for path in paths]
    names = [document["name"] for document in documents]
    if names[0] == names[1]:
        names = [str(path) for path in paths]
    page_path = Path(out or "profiles.html").expanduser().absolute()
    page_path.write_text(tables.render_comparison(documents, names), encoding="utf-8")
    notes = tables.unpaired_notes(documents, names)
    comparison = {
        "profiles": [str(path) for path in paths],
        "rows": _compute_ratios(documents),
        "notes": notes,
        "page": str(page_path),
    }
    print_result(
        comparison,
        as_json,
        "\n".join([tables.comparison_table(documents, names).formatted, "", *notes, f"page: {page_path}"]),
    )


def _compute_ratios(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of step times of the second profile to the first, row by row."""
    pairs = zip(*(document["rows"] for document in documents), strict=False)
    return [
        {"rows": [first["name"], second["name"]], "ratio": second["step_s"] / first["step_s"]}
        for first, second in pairs
    ]
