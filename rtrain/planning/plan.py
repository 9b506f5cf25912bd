"""Plan of a run: nodes, memory, hours and cost, from the recipe, the cluster file and a price file.

`placement` decides first whether the run can ever start, without torch. Memory comes from a traced micro-batch, hours
from rows and throughput, cost from hours and prices.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rtrain.cluster import capacity
from rtrain.cluster.pricing import Price
from rtrain.config import Config, TrainConfig
from rtrain.core.errors import ConfigError, Problem
from rtrain.parallel import layout as parallel_layout
from rtrain.parallel.layout import ParallelLayout
from rtrain.planning import memory_estimate, placement, throughput as throughput_model
from rtrain.planning.memory_estimate import WorkerMemory
from rtrain.planning.placement import NodeType, PlacementPlan, PlannedCluster
from rtrain.planning.run_facts import EncoderShape, RowStats
from rtrain.planning.throughput import GPU_SPECS

NODE_START_S: Final = 300.0
"""Seconds until a requested node has joined the cluster, without a prebuilt image."""
RUN_START_S: Final = 30.0
"""Seconds that a run takes to start: Ray, the workers, their first rows."""
USABLE_MEMORY_SHARE: Final = 0.65
"""Share of a node's memory that workers may use: Ray's object store takes up to 30 %, the system the rest."""
DEFAULT_FINAL_RUNS: Final = 4.0
"""Full runs of the finals of a search, unless `tune.final_budget_rows` is set."""
NUM_FINALISTS: Final = 3
"""Trials that train to the end: the best two, and the trial of the recipe's own settings."""
SAME_WEIGHTS_NOTE: Final = "the weights are the same"


def candidate_layouts(config: Config, folder: Path, workers: int) -> Iterator[ParallelLayout]:
    """The recipe's layout and the layouts after it; all valid layouts if `train.strategy` is `auto`."""
    train, possible = config.recipe.train, parallel_layout.iter_valid_layouts(config.recipe, folder, workers)
    if train.strategy == "auto":
        return possible
    return parallel_layout.start_from(parallel_layout.layout_from_config(train, workers), possible)


def slots_in_memory(worker_memory: WorkerMemory, request: capacity.ResourceRequest) -> placement.SlotFunction:
    """Number of workers that a node's memory holds. A node of unknown memory holds as many as it has slots
    (`unknown_memory_notes` reports it)."""

    def count_slots(node_type: NodeType) -> int:
        if request.device == "gpu":
            slots, gpu_spec = request.worker_slots(node_type.resources), GPU_SPECS.get(node_type.gpu_type)
            if gpu_spec is None:
                return slots
            usable_bytes = request.gpu_share * memory_estimate.USABLE_GPU_SHARE * gpu_spec.memory_gb * 1e9
            return slots if worker_memory.tensor_bytes <= usable_bytes else 0
        if node_type.instance is None:
            return 1 << 30
        free_bytes = USABLE_MEMORY_SHARE * node_type.instance.memory_gb * 1e9 - worker_memory.checkpoint
        return max(0, int(free_bytes // (worker_memory.total - worker_memory.checkpoint)))

    return count_slots


def unknown_memory_notes(node_types: Iterable[NodeType], request: capacity.ResourceRequest) -> list[str]:
    """Notes about node types with worker slots whose memory is unknown."""
    notes = []
    for node_type in node_types:
        if not request.capacity_of([node_type.node_spec]).worker_slots:
            continue
        if request.device == "gpu" and node_type.gpu_type not in GPU_SPECS:
            hint = f"write {capacity.ACCELERATOR_PREFIX}KIND: 1 among its resources, where KIND is"
            reason = f"the GPU memory of {node_type.display_name} is unknown and was not checked"
            notes.append(f"{reason}: {hint} {', '.join(GPU_SPECS)}")
        elif request.device == "cpu" and node_type.instance is None:
            notes.append(f"the memory of {node_type.display_name} is unknown and was not checked")
    return notes


@dataclass(frozen=True)
class PlacedLayout:
    """A layout, and the nodes that it fits on."""

    layout: ParallelLayout
    reason: str
    worker_memory: WorkerMemory
    nodes: placement.NodeCounts


def choose_layout(
    config: Config,
    cluster: PlannedCluster,
    placement_plan: PlacementPlan,
    candidates: Iterable[tuple[ParallelLayout, WorkerMemory]],
    price_table: Mapping[str, Price],
) -> PlacedLayout:
    """Return the first layout that fits, on the cheapest nodes; later candidates are not evaluated. Raises
    `ConfigError` if none fits."""

    def price_of(node_type: NodeType) -> float | None:
        price = price_table.get(node_type.instance_name or "")
        return price.hourly_price(is_spot=node_type.is_spot) if price else None

    rejected: list[str] = []
    for layout, worker_memory in candidates:
        slots = slots_in_memory(worker_memory, placement_plan.request)
        nodes = placement.cheapest_nodes(cluster, placement_plan.request, placement_plan.required, price_of, slots)
        if nodes is not None:
            return PlacedLayout(layout, _choice_reason(config, rejected), worker_memory, nodes)
        rejected.append(f"{layout} needs {worker_memory.total / 1e6:,.0f} MB per worker")
    if placement_plan.device == "gpu":
        specs = (GPU_SPECS[kind.gpu_type] for kind in cluster.node_types if kind.gpu_type in GPU_SPECS)
        largest = max((spec.memory_gb for spec in specs), default=0)
        required_bytes, remedy = worker_memory.tensor_bytes, f"GPUs of more than {largest:g} GB"
    else:
        instances = (kind.instance for kind in cluster.node_types if kind.instance and kind.resources.get("CPU", 0))
        largest = max((instance.memory_gb for instance in instances), default=0)
        required_bytes, remedy = worker_memory.total, f"nodes of more than {largest:g} GB, fewer workers"
    num_workers = placement_plan.required.worker_slots
    reason = f"a worker needs {required_bytes / 1e9:.1f} GB even with {layout}, and {num_workers} do not fit"
    fix = f"name {remedy}, or --set train.max_tokens_per_micro_batch=512"
    raise ConfigError([Problem("train.workers", config.recipe.train.workers, reason, fix, code="out_of_memory")])


def _choice_reason(config: Config, rejected: Sequence[str]) -> str:
    if rejected:
        return f"{rejected[-1]}, which does not fit; {SAME_WEIGHTS_NOTE}"
    return "the first layout that fits" if config.recipe.train.strategy == "auto" else "set by the recipe"


@dataclass(frozen=True)
class Duration:
    """Duration of a run, by part."""

    steps: int
    compute_s: float
    """Compute seconds of a step."""
    all_reduce_s: float
    """Seconds that the all-reduce adds to a step, if known."""
    evaluate_s: float
    start_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.all_reduce_s

    @property
    def train_s(self) -> float:
        return self.steps * self.step_s

    @property
    def total_hours(self) -> float:
        return (self.train_s + self.evaluate_s + self.start_s) / 3600


def estimate_duration(
    config: Config,
    placement_plan: PlacementPlan,
    choice: PlacedLayout,
    shape: EncoderShape,
    row_stats: RowStats,
    throughput: throughput_model.Throughput,
) -> Duration:
    """Estimate the duration from rows and throughput."""
    workers, recipe = placement_plan.available_workers, config.recipe
    train = choice.layout.apply_to(recipe.train, workers)
    model_work = throughput_model.estimate_work(recipe, shape, row_stats)
    compute_time = throughput.compute_time(model_work)
    # Evaluation has no backward and recomputes nothing; nor does training with a frozen encoder.
    is_frozen = throughput_model.is_encoder_frozen(recipe)
    forward_share = 1.0 if is_frozen else throughput_model.FORWARD_SHARE
    seconds_per_row = forward_share * compute_time.micro_batch_s / train.micro_batch_size
    micro_batch_s = compute_time.micro_batch_s
    if train.gradient_checkpointing and not is_frozen:
        micro_batch_s *= throughput_model.RECOMPUTE_FACTOR
    # The workers of a replica share each of its micro-batches.
    overhead_s = compute_time.overhead_s / throughput_model.optimizer_shares(train, workers)
    compute_s = overhead_s + micro_batch_s * throughput_model.micro_batches_per_step(recipe, workers)
    all_reduce_s = (throughput.all_reduce_s_per_byte or 0.0) * model_work.gradient_bytes if workers > 1 else 0.0
    steps_per_epoch = math.ceil(row_stats.train / recipe.global_batch_size)
    steps = train.epochs * steps_per_epoch
    # An evaluation always follows the last step.
    evaluate_interval = train.evaluate_every
    evaluations = math.ceil(steps / evaluate_interval) if evaluate_interval else train.epochs
    scored_rows = row_stats.valid * evaluations + row_stats.test
    start_s = RUN_START_S + (NODE_START_S if choice.nodes else 0.0)
    # Pipeline stages evaluate sequentially.
    evaluate_s = scored_rows * seconds_per_row / (workers // train.pipeline_parallel_size)
    return Duration(steps, compute_s, all_reduce_s, evaluate_s, start_s)


def search_hours(config: Config, duration: Duration, trials: int, price: float | None = None) -> float:
    """Estimate the hours of a search: its budget divided by the concurrent trials, plus the finals of `NUM_FINALISTS`
    runs. A search takes at least one full run, since the first trial and the best two train to the end. Limits on
    minutes and cost bound when a trial may start. A search may stop earlier."""
    tune = config.deploy.tune
    full_rows = duration.steps * config.recipe.global_batch_size
    budget = tune.budget_full_runs if tune.budget_rows is None else tune.budget_rows / full_rows
    if tune.trials is not None:
        budget = min(budget, tune.trials)
    final_runs = DEFAULT_FINAL_RUNS if tune.final_budget_rows is None else tune.final_budget_rows / full_rows
    run_s = duration.train_s + duration.evaluate_s
    sampling_s = budget * run_s / trials
    time_limits = [] if tune.max_minutes is None else [60 * tune.max_minutes]
    if tune.max_cost is not None and price:
        time_limits.append(3600 * tune.max_cost / price / config.recipe.train.workers / trials)
    sampling_s = min([sampling_s, *(limit + tune.min_resource_fraction * run_s for limit in time_limits)])
    finals_s = max(final_runs, NUM_FINALISTS * (1 - tune.min_resource_fraction)) * run_s / min(trials, NUM_FINALISTS)
    return (duration.start_s + max(run_s, sampling_s + finals_s)) / 3600


def lost_work_seconds(config: Config, duration: Duration, has_spot_watcher: bool) -> float:
    """Seconds of training that an interruption repeats: one step with a spot watcher, since the run saves after the
    current step; else half the checkpoint interval."""
    if has_spot_watcher:
        return duration.step_s
    train = config.recipe.train
    steps_per_epoch = duration.steps / train.epochs
    save_interval = min(train.save_every or steps_per_epoch, train.evaluate_every or steps_per_epoch)
    return save_interval / 2 * duration.step_s


def plan_cost(
    cluster: PlannedCluster,
    nodes: placement.NodeCounts,
    price_table: Mapping[str, Price],
    hours: float,
    repeated_s: float,
) -> placement.RunCost | None:
    """Cost of the run; None if the price of a node is unknown."""
    return placement.node_cost(
        cluster, nodes, price_table, hours, repeated_s=repeated_s, restart_s=NODE_START_S + RUN_START_S
    )


def unmodelled_costs(train: TrainConfig) -> list[str]:
    """Notes about settings whose costs are not estimated."""
    names = ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    reason = "communication within a micro-batch is not estimated"
    notes = [f"train.{name}: {reason}" for name in names if getattr(train, name) > 1]
    if train.context_parallel_size > 1:
        notes.append("train.context_parallel_size: memory is estimated as if each worker had all tokens")
    if train.pipeline_parallel_size > 1:
        notes.append("train.pipeline_parallel_size: memory is estimated as if each worker had all layers")
    return notes


def plan_document(
    placement_plan: PlacementPlan,
    choice: PlacedLayout,
    duration: Duration,
    hours: float,
    cost: placement.RunCost | None,
    throughput_source: str,
) -> dict[str, Any]:
    """Build the JSON document of the plan, but for its `notes`."""
    memory_mb = {name: round(value / 1e6, 1) for name, value in asdict(choice.worker_memory).items() if value}
    return {
        "fits": True,
        "device": placement_plan.device,
        "workers": placement_plan.available_workers,
        "trials": placement_plan.concurrent_trials,
        "data_cpus": placement_plan.data_cpus,
        "nodes": dict(choice.nodes),
        "strategy": choice.layout.strategy,
        "tensor_parallel_size": choice.layout.tensor_parallel_size,
        "pipeline_parallel_size": choice.layout.pipeline_parallel_size,
        "recomputed_layers": choice.layout.gradient_checkpointing,
        "reason": choice.reason,
        "memory_mb": {**memory_mb, "total": round(choice.worker_memory.total / 1e6, 1)},
        "steps": duration.steps,
        "step_s": {"total": duration.step_s, "compute": duration.compute_s, "all_reduce": duration.all_reduce_s},
        "hours": hours,
        "seconds": {"train": duration.train_s, "evaluate": duration.evaluate_s, "start": duration.start_s},
        "cost": None if cost is None else asdict(cost),
        "throughput": throughput_source,
    }


def format_plan(plan: Mapping[str, Any]) -> list[str]:
    """Format the plan for the terminal."""
    memory, step, cost = plan["memory_mb"], plan["step_s"], plan["cost"]
    nodes = ", ".join(f"{number} x {name}" for name, number in plan["nodes"].items()) or "the head alone"
    parts = ", ".join(f"{name} {value:,.0f}" for name, value in memory.items() if name != "total")
    parallel_sizes = "".join(
        f", {name} {plan[name]}" for name in ("tensor_parallel_size", "pipeline_parallel_size") if plan[name] > 1
    )
    trials = f", {plan['trials']} trials at a time" if plan["trials"] > 1 else ""
    recomputed = " with recomputed layers" if plan["recomputed_layers"] else ""
    lines = [
        f"fits       {plan['workers']} workers ({plan['device']}), {plan['data_cpus']} CPUs for data{trials}; {nodes}",
        f"strategy   {plan['strategy']}{parallel_sizes}{recomputed}: {plan['reason']}",
        f"memory     {memory['total']:,.0f} MB per worker ({parts})",
        f"step       {step['total']:.3g} s: {step['compute']:.3g} compute, {step['all_reduce']:.3g} all-reduce",
        f"hours      {plan['hours']:.2f}, {plan['steps']:,} steps; {plan['throughput']}",
    ]
    return [*lines, f"cost       {_format_cost(cost)}", *(f"note       {note}" for note in plan["notes"])]


def _format_cost(cost: Mapping[str, Any] | None) -> str:
    if cost is None:
        return "unknown: a node has no price; write it, or the price of a worker hour, into a file (--prices)"
    dollars = f"{cost['dollars']:.2f} $"
    if cost["is_per_worker"]:
        return f"{dollars} by the price of a worker hour"
    if cost["spot_dollars"] is None:
        return (
            f"{dollars} on demand; spot nodes are interrupted faster than the run progresses: set a smaller "
            "train.save_every, start a spot watcher, or use fewer nodes"
        )
    return (
        f"{dollars} on demand; {cost['spot_dollars']:.2f} $ on spot nodes with {cost['interruptions']:.2g} expected "
        f"interruptions, which add {cost['repeated_hours'] * 60:.1f} minutes"
    )


def read_cluster_file(file: Path) -> dict[str, Any]:
    """Read a cluster file. Raises `ConfigError` if the file is missing or invalid."""
    import yaml

    if not file.is_file():
        fix = "write one with rtrain cluster init --cloud aws"
        raise ConfigError([Problem("--cluster", str(file), "the file does not exist", fix, code="not_found")])
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid bytes or dates
        reason, fix = f"invalid YAML ({error})", "run rtrain cluster lint"
        raise ConfigError([Problem("--cluster", str(file), reason, fix, code="invalid_cluster_file")]) from None
    return document if isinstance(document, dict) else {}
