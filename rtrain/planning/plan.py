"""What a run will take of a cluster: nodes, memory, hours, money. From the recipe, the cluster's file and a price file.

The verdict whether it can ever start comes first, and needs no torch (`layouts`). Memory is that of a traced pass,
hours are rows by the pace, money is hours by prices.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rtrain.cluster import capacity
from rtrain.cluster.pricing import Price
from rtrain.config import Config, Train
from rtrain.core.errors import ConfigError, Problem
from rtrain.parallel import layout as strategies
from rtrain.parallel.layout import Way
from rtrain.planning import cost_estimate as pricing, memory_fit, placement, throughput as paces
from rtrain.planning.memory_needs import Need
from rtrain.planning.placement import Cluster, Kind, Layout
from rtrain.planning.run_facts import Rows, Shape

NODE_S: Final = 300.0
"""Seconds until a node that is asked for has joined the cluster, without an image of its own."""
START_S: Final = 30.0
"""Seconds in which a run starts: Ray, the workers, their first rows."""
USABLE: Final = 0.65
"""Share of a node's memory that workers may take: Ray's object store has up to 30 %, the system the rest."""
FINAL_RUNS: Final = 4.0
"""Full runs of a search's end, unless `tune.final_rows` says another number of rows."""
FINALISTS: Final = 3
"""Trials that go to their ends: the best two, and the one of the recipe's own settings."""
UNCHANGED: Final = "no weight changes by it"


def ways(config: Config, folder: Path, workers: int) -> Iterator[Way]:
    """The recipe's own way and those that come after it; all that there are where the recipe leaves it open."""
    train, found = config.recipe.train, strategies.possible(config.recipe, folder, workers)
    return found if train.strategy == "auto" else strategies.beginning_with(strategies.own(train, workers), found)


def holds(need: Need, needs: capacity.Needs) -> placement.Holds:
    """How many workers' memory a node has. One whose memory is not known holds as many as it has places for
    (`unchecked` says so)."""

    def count(kind: Kind) -> int:
        if needs.device == "gpu":
            known = paces.PEAK.get(kind.gpu)
            own = None if known is None else needs.share * memory_fit.USABLE_GPU * known.gigabytes * 1e9
            return needs.places(kind.node) if own is None or need.total - need.process <= own else 0
        if kind.instance is None:
            return 1 << 30
        left = USABLE * kind.instance.memory_gb * 1e9 - need.checkpoint
        return max(0, int(left // (need.total - need.checkpoint)))

    return count


def unchecked(kinds: Iterable[Kind], needs: capacity.Needs) -> list[str]:
    """What is to be said of types with places for workers whose memory is in no table."""
    found = []
    for kind in (kind for kind in kinds if needs.offered([kind.host]).places):
        if needs.device == "gpu" and kind.gpu not in paces.PEAK:
            known = f"write {capacity.ACCELERATOR}KIND: 1 among its resources, where KIND is {', '.join(paces.PEAK)}"
            found.append(f"the memory of {kind.called}'s GPU is not known and was not checked: {known}")
        elif needs.device == "cpu" and kind.instance is None:
            found.append(f"the memory of {kind.called} is not known and was not checked")
    return found


@dataclass(frozen=True)
class Chosen:
    """A way with the nodes on which it fits."""

    way: Way
    why: str
    need: Need
    nodes: placement.Nodes


def choose(
    config: Config,
    cluster: Cluster,
    layout: Layout,
    needs: Iterable[tuple[Way, Need]],
    table: Mapping[str, Price],
) -> Chosen:
    """The first way that fits, on the cheapest nodes; no later one is asked for. Raises `ConfigError` where none
    does."""

    def price(kind: Kind) -> float | None:
        known = table.get(kind.type or "")
        return known.hourly(is_spot=kind.is_spot) if known else None

    larger: list[str] = []
    for way, need in needs:
        room = holds(need, layout.needs)
        nodes = placement.fewest(cluster, layout.needs, layout.need, price, room)
        if nodes is not None:
            return Chosen(way, _why(config, larger), need, nodes)
        larger.append(f"{way} would take {need.total / 1e6:,.0f} MB a worker")
    if layout.device == "gpu":
        largest = max((paces.PEAK[kind.gpu].gigabytes for kind in cluster.kinds if kind.gpu in paces.PEAK), default=0)
        size, larger_ones = need.total - need.process, f"GPUs of more than {largest:g} GB"
    else:
        instances = (kind.instance for kind in cluster.kinds if kind.instance and kind.node.get("CPU", 0))
        largest = max((instance.memory_gb for instance in instances), default=0)
        size, larger_ones = need.total, f"nodes of more than {largest:g} GB, fewer workers"
    reason = f"a worker needs {size / 1e9:.1f} GB even with {way}, and {layout.need.places} do not fit"
    fix = f"name {larger_ones}, or --set train.tokens_per_pass=512"
    raise ConfigError([Problem("train.workers", config.recipe.train.workers, reason, fix, code="out_of_memory")])


def _why(config: Config, larger: Sequence[str]) -> str:
    if larger:
        return f"{larger[-1]}, which does not fit; {UNCHANGED}"
    return "the first, and it fits" if config.recipe.train.strategy == "auto" else "as the recipe says"


@dataclass(frozen=True)
class Hours:
    """How long a run takes, and of what."""

    updates: int
    compute_s: float
    """Seconds of an update in which a worker computes."""
    exchange_s: float
    """Those by which the exchange of the gradients lengthens it, as far as that is known."""
    evaluate_s: float
    start_s: float

    @property
    def update_s(self) -> float:
        return self.compute_s + self.exchange_s

    @property
    def train_s(self) -> float:
        return self.updates * self.update_s

    @property
    def hours(self) -> float:
        return (self.train_s + self.evaluate_s + self.start_s) / 3600


def hours(config: Config, layout: Layout, chosen: Chosen, shape: Shape, rows: Rows, pace: paces.Pace) -> Hours:
    """Rows by the pace."""
    workers, recipe = layout.room, config.recipe
    train = chosen.way.of(recipe.train, workers)
    work = paces.work(recipe, shape, rows)
    compute = pace.compute(work)
    # An evaluation has no backward pass, and computes nothing again; nor does a pass through a frozen encoder.
    forward = 1.0 if paces.frozen(recipe) else paces.FORWARD
    of_row = forward * compute.pass_s / train.micro_batch
    pass_s = compute.pass_s
    if train.gradient_checkpointing and not paces.frozen(recipe):
        pass_s *= paces.RECOMPUTED
    # Workers of a replica have a part of each of its passes.
    computing = compute.step_s / paces.step_shares(train, workers) + pass_s * paces.passes(recipe, workers)
    exchange = (pace.exchange_s or 0.0) * work.gradient if workers > 1 else 0.0
    each = math.ceil(rows.train / recipe.rows_per_update)
    number = train.epochs * each
    # The last update is followed by one in any case.
    every = train.evaluate_every
    evaluations = math.ceil(number / every) if every else train.epochs
    scored = rows.valid * evaluations + rows.test
    starts = START_S + (NODE_S if chosen.nodes else 0.0)
    # A pipeline's stages answer one after another.
    return Hours(number, computing, exchange, scored * of_row / (workers // train.pipeline), starts)


def searched(config: Config, one: Hours, trials: int, price: float | None = None) -> float:
    """Hours of a search: its budget, over the trials that run side by side, and its end, of which `FINALISTS` trainings
    do. No search is shorter than a run, since its first trial goes to its end in any case, as the best two do; minutes,
    and money by the `price` of a worker's hour, bound when a trial may begin. It may stop sooner."""
    tune = config.deploy.tune
    full_rows = one.updates * config.recipe.rows_per_update
    budget = tune.full_runs if tune.rows is None else tune.rows / full_rows
    if tune.trials is not None:
        budget = min(budget, tune.trials)
    end = FINAL_RUNS if tune.final_rows is None else tune.final_rows / full_rows
    whole = one.train_s + one.evaluate_s
    searching = budget * whole / trials
    limits = [] if tune.minutes is None else [60 * tune.minutes]
    if tune.money is not None and price:
        limits.append(3600 * tune.money / price / config.recipe.train.workers / trials)
    searching = min([searching, *(limit + tune.first_rung * whole for limit in limits)])
    ending = max(end, FINALISTS * (1 - tune.first_rung)) * whole / min(trials, FINALISTS)
    return (one.start_s + max(whole, searching + ending)) / 3600


def repeated_s(config: Config, found: Hours, watched: bool) -> float:
    """Seconds of training that an interruption repeats: with a spot notice a run saves after its coming update, without
    one it goes back by half of what is between two checkpoints."""
    if watched:
        return found.update_s
    train = config.recipe.train
    each = found.updates / train.epochs
    between = min(train.save_every or each, train.evaluate_every or each)
    return between / 2 * found.update_s


def money(
    cluster: Cluster, nodes: placement.Nodes, table: Mapping[str, Price], total_h: float, repeats_s: float
) -> pricing.Cost | None:
    """None where the price of a node is not known."""
    return pricing.of_nodes(cluster, nodes, table, total_h, repeats_s=repeats_s, restart_s=NODE_S + START_S)


def untold(train: Train) -> list[str]:
    """What is to be said of settings whose costs nobody foretells."""
    found = []
    for name in ("shard", "tensor", "pipeline", "context"):
        if getattr(train, name) > 1:
            found.append(f"train.{name}: what workers send each other within a pass is not foretold")
    if train.context > 1:
        found.append("train.context: memory is that of workers which have all tokens")
    if train.pipeline > 1:
        found.append("train.pipeline: memory is that of workers which have all layers")
    return found


def document(
    layout: Layout,
    chosen: Chosen,
    found: Hours,
    total_h: float,
    cost: pricing.Cost | None,
    pace: paces.Pace,
    said: Sequence[str],
) -> dict[str, Any]:
    """The plan as JSON."""
    parts = {name: round(value / 1e6, 1) for name, value in asdict(chosen.need).items() if value}
    return {
        "fits": True,
        "device": layout.device,
        "workers": layout.room,
        "trials": layout.trials,
        "data_cpus": layout.spare,
        "nodes": dict(chosen.nodes),
        "strategy": chosen.way.strategy,
        "tensor": chosen.way.tensor,
        "pipeline": chosen.way.pipeline,
        "recomputed_layers": chosen.way.gradient_checkpointing,
        "why": chosen.why,
        "memory_mb": {**parts, "total": round(chosen.need.total / 1e6, 1)},
        "updates": found.updates,
        "update_s": {"total": found.update_s, "compute": found.compute_s, "exchange": found.exchange_s},
        "hours": total_h,
        "seconds": {"train": found.train_s, "evaluate": found.evaluate_s, "start": found.start_s},
        "cost": None if cost is None else asdict(cost),
        "pace": pace.why,
        "notes": list(said),
    }


def text(made: Mapping[str, Any]) -> list[str]:
    """The plan as lines."""
    memory, update, cost = made["memory_mb"], made["update_s"], made["cost"]
    nodes = ", ".join(f"{number} x {name}" for name, number in made["nodes"].items()) or "the head alone"
    parts = ", ".join(f"{name} {value:,.0f}" for name, value in memory.items() if name != "total")
    cut = "".join(f", {name} {made[name]}" for name in ("tensor", "pipeline") if made[name] > 1)
    trials = f", {made['trials']} trials at a time" if made["trials"] > 1 else ""
    lines = [
        f"fits       {made['workers']} workers ({made['device']}), {made['data_cpus']} CPUs for data{trials}; {nodes}",
        f"strategy   {made['strategy']}{cut}{' with recomputed layers' if made['recomputed_layers'] else ''}: "
        f"{made['why']}",
        f"memory     {memory['total']:,.0f} MB a worker ({parts})",
        f"an update  {update['total']:.3g} s: {update['compute']:.3g} computing, {update['exchange']:.3g} exchanging",
        f"hours      {made['hours']:.2f}, {made['updates']:,} updates; {made['pace']}",
    ]
    if cost is None:
        unknown = "unknown: a node's price is not known; write it, or that of a worker's hour, into a file (--prices)"
        lines.append(f"money      {unknown}")
    elif cost["of_workers"]:
        lines.append(f"money      {cost['dollars']:.2f} $ by the price of a worker's hour")
    else:
        lines.append(f"money      {cost['dollars']:.2f} $ on demand; {_of_spot(cost)}")
    return [*lines, *(f"note       {note}" for note in made["notes"])]


def _of_spot(cost: Mapping[str, Any]) -> str:
    if cost["spot_dollars"] is None:
        return (
            "spot nodes would be taken away faster than it gets on: write a smaller train.save_every, listen for spot "
            "notices, or have fewer nodes"
        )
    return (
        f"{cost['spot_dollars']:.2f} $ on spot nodes with {cost['interruptions']:.2g} interruptions expected, which "
        f"add {cost['repeated_hours'] * 60:.1f} minutes"
    )


def read_cluster(file: Path) -> dict[str, Any]:
    """A cluster's file. Raises `ConfigError` where it is none."""
    import yaml

    if not file.is_file():
        fix = "write one with rtrain cluster init --cloud aws"
        raise ConfigError([Problem("--cluster", str(file), "no such file", fix, code="not_found")])
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: other bytes, a date that the calendar has not
        reason, fix = f"no YAML ({error})", "see rtrain cluster lint"
        raise ConfigError([Problem("--cluster", str(file), reason, fix, code="malformed")]) from None
    return found if isinstance(found, dict) else {}
