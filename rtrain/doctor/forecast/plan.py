"""What a run will take of a cluster: nodes, memory, hours, money. From the recipe, the cluster's file and a price file.

The verdict whether it can ever start comes first, and needs no torch (`layouts`). Memory is that of a traced pass,
hours are rows by the scaling model, money is hours by prices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rtrain.cluster.prices import Price
from rtrain.config import Config
from rtrain.doctor.forecast import layouts, memory, money as pricing, pace as paces, scaling
from rtrain.doctor.forecast.facts import Rows, Shape
from rtrain.doctor.forecast.layouts import Cluster, Kind, Layout
from rtrain.doctor.forecast.memory import Need
from rtrain.errors import ConfigError, Problem
from rtrain.training import pass_size

NODE_S: Final = 300.0
"""Seconds until a node that is asked for has joined the cluster, without an image of its own."""
START_S: Final = 30.0
"""Seconds in which a run starts: Ray, the workers, their first rows."""
USABLE: Final = 0.65
"""Share of a node's memory that workers may take: Ray's object store has up to 30 %, the system the rest."""
USABLE_GPU: Final = 0.85
FORWARD: Final = 1 / 3
"""An evaluation's share of a training pass: it has no backward pass."""
CURVE: Final = (1, 8, 64, 512, 4096)
"""Workers that a plan tells the efficiency of."""
STAGES: Final = tuple(memory.STRATEGIES)
"""By `train.shard`."""
RECOMPUTED: Final = 4 / 3
"""How many times as long a pass is whose layers are computed again: one more forward pass."""


@dataclass(frozen=True)
class Way:
    """A way to hold the model on the workers."""

    strategy: str
    recomputed: bool
    why: str

    @property
    def settings(self) -> str:
        """What of the recipe asks for it."""
        recomputed = "true" if self.recomputed else "false"
        return f"train.shard={STAGES.index(self.strategy)} train.gradient_checkpointing={recomputed}"


def ways(config: Config, workers: int) -> list[Way]:
    """The recipe's own way, then those that take less memory, the fastest first."""
    train = config.recipe.train
    own = (STAGES[train.shard if workers > 1 else 0], train.gradient_checkpointing)
    found = [Way(*own, "as the recipe says")]
    shared = "the recipe's own way does not fit; sharing the optimizer's moments changes no weight"
    again = (
        "the recipe's own way does not fit; layers that are computed again change no weight, and a pass takes longer"
    )
    others = [("zero1", own[1], shared)] if workers > 1 else []
    others += [("ddp", True, again), *([("zero1", True, again)] if workers > 1 else [])]
    gathered = "nothing else fits; sharing the weights too changes none, and each layer is gathered when its turn comes"
    others += [("zero3", True, gathered)] if workers > 1 else []
    return found + [Way(*one) for one in others if one[:2] != own]


def holds(need: Need, device: str) -> layouts.Holds:
    """How many workers' memory a node has. One whose instance type is not known holds as many as it has places for."""

    def count(kind: Kind) -> int:
        if kind.instance is None:
            return 1 << 30
        if device == "gpu":
            known = paces.PEAK.get(kind.instance.gpu or "")
            fits = known is None or need.total - need.process <= USABLE_GPU * known[2] * 1e9
            return kind.instance.gpus if fits else 0
        return int(USABLE * kind.instance.memory_gb * 1e9 // need.total)

    return count


@dataclass(frozen=True)
class Chosen:
    """A way with the nodes on which it fits."""

    way: Way
    need: Need
    nodes: layouts.Nodes
    per_node: int
    """Workers of the fullest node."""


def choose(
    config: Config, cluster: Cluster, layout: Layout, needs: Mapping[Way, Need], table: Mapping[str, Price]
) -> Chosen:
    """The first way that fits, on the cheapest nodes. Raises `ConfigError` where none does."""

    def price(kind: Kind) -> float:
        known = table.get(kind.instance.name) if kind.instance else None
        return 1.0 if known is None else known.spot if kind.is_spot else known.on_demand

    places, spare = layout.room * layout.trials, layout.spare * layout.trials
    for way, need in needs.items():
        room = holds(need, layout.device)
        nodes = layouts.fewest(cluster, places, layout.device, spare, price, room)
        if nodes is not None:
            return Chosen(way, need, nodes, layouts.dealt(cluster, nodes, places, layout.device, room))
    way, need = list(needs.items())[-1]
    largest = max(
        (kind.instance.memory_gb for kind in cluster.kinds if kind.instance and kind.node.get("CPU", 0)), default=0
    )
    reason = f"a worker needs {need.total / 1e9:.1f} GB even with {way.settings}, and {places} do not fit"
    fix = f"name nodes of more than {largest:g} GB, fewer workers, or --set train.tokens_per_pass=512"
    raise ConfigError([Problem("train.workers", config.recipe.train.workers, reason, fix)])


def lengths(config: Config, device: str, longest: int) -> list[int]:
    """The windows of a pass that takes the most memory."""
    train = config.recipe.train
    tokens = train.tokens_per_pass or (pass_size.ON_CPU if device == "cpu" else 4 * pass_size.ON_CPU)
    return [longest] * max(1, tokens // longest)


@dataclass(frozen=True)
class Hours:
    """How long a run takes, and of what."""

    updates: int
    update: scaling.Update
    train_s: float
    evaluate_s: float
    start_s: float
    curve: tuple[scaling.Update, ...]
    """An update on numbers of workers up to 4,096, each of which does as much as ever."""

    @property
    def hours(self) -> float:
        return (self.train_s + self.evaluate_s + self.start_s) / 3600


def hours(
    config: Config, layout: Layout, chosen: Chosen, shape: Shape, rows: Rows, pace: paces.Pace, kind: Kind
) -> Hours:
    """Rows by the scaling model; `kind`: the type of the workers' nodes."""
    recipe, workers = config.recipe, layout.room
    gpu, instance = layout.device == "gpu", kind.instance
    work, compute = paces.work(recipe, shape, rows), pace.compute(paces.work(recipe, shape, rows))
    if chosen.way.recomputed:
        compute = scaling.Compute(compute.step_s, compute.pass_s * RECOMPUTED, compute.spread)
    fabric = paces.wires(
        pace,
        instance.gpu if instance and gpu else None,
        instance.gpus if instance else 1,
        instance.efa if instance else 0,
        chosen.per_node,
    )
    update = scaling.update(compute, work, fabric, workers, paces.passes(recipe, workers), hides=gpu)
    each = math.ceil(rows.train / recipe.rows_per_update)
    number = recipe.train.epochs * each
    evaluations = number // recipe.train.evaluate_every if recipe.train.evaluate_every else recipe.train.epochs
    scored = rows.valid * evaluations + rows.test
    of_row = FORWARD * compute.pass_s / recipe.train.micro_batch
    passes = paces.passes(recipe, workers)
    curve = tuple(scaling.curve(compute, work, fabric, CURVE, passes, hides=gpu))
    return Hours(number, update, number * update.seconds, scored * of_row / workers, START_S + NODE_S, curve)


def searched(config: Config, one: Hours, trials: int) -> float:
    """Hours of a search: its budget and its end, in full runs, over the trials that run side by side."""
    tune = config.deploy.tune
    full = tune.full_runs + 4.0  # `tune.final_rows`: 4 full runs, unless it says another number
    return (one.start_s + full * (one.train_s + one.evaluate_s) / trials) / 3600


def repeated_s(config: Config, found: Hours, watched: bool) -> float:
    """Seconds of training that an interruption repeats: with a spot notice a run saves after its coming update, without
    one it goes back by half of what is between two checkpoints."""
    if watched:
        return found.update.seconds
    train = config.recipe.train
    each = found.updates / train.epochs
    between = min(train.save_every or each, train.evaluate_every or each)
    return between / 2 * found.update.seconds


def money(
    cluster: Cluster, nodes: layouts.Nodes, table: Mapping[str, Price], total_h: float, repeats_s: float
) -> pricing.Cost | None:
    """None where the price of a node is not known."""
    paid: dict[str, tuple[int, Price]] = {}
    for kind in cluster.kinds:
        if number := nodes.get(kind.name, 0):
            if kind.instance is None or kind.instance.name not in table:
                return None
            paid[kind.name] = (number, table[kind.instance.name])
    heads = [table[kind.instance.name] for kind in cluster.heads if kind.instance and kind.instance.name in table]
    return pricing.cost(total_h, paid, heads[0] if heads else None, repeats_s=repeats_s, restart_s=NODE_S + START_S)


def replicas(config: Config, cluster: Cluster) -> str | None:
    """What is to be said of the endpoint's processors, if anything: replicas never wait for ever, but share."""
    serve = config.deploy.serve
    wanted = (serve.max_replicas or serve.replicas) * serve.threads
    has = sum(kind.node.get("CPU", 0.0) for kind in cluster.heads)
    has += max((kind.node.get("CPU", 0.0) for kind in cluster.kinds), default=0.0) * cluster.limit
    if wanted <= has:
        return None
    return f"{wanted} replicas' threads share {has:g} processors: replicas answer more slowly, and none waits"


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
        "recomputed_layers": chosen.way.recomputed,
        "why": chosen.way.why,
        "memory_mb": {**parts, "total": round(chosen.need.total / 1e6, 1)},
        "updates": found.updates,
        "update_s": {
            "total": found.update.seconds,
            "compute": found.update.compute_s,
            "exchange": found.update.exchange_s,
            "exposed_exchange": found.update.exposed_s,
            "waiting": found.update.waiting_s,
        },
        "efficiency": found.update.efficiency,
        "scaling": [
            {"workers": one.workers, "update_s": one.seconds, "efficiency": one.efficiency} for one in found.curve
        ],
        "hours": total_h,
        "cost": None if cost is None else asdict(cost),
        "pace": pace.why,
        "notes": list(said),
    }


def text(made: Mapping[str, Any]) -> list[str]:
    """The plan as lines."""
    memory, update, cost = made["memory_mb"], made["update_s"], made["cost"]
    nodes = ", ".join(f"{number} x {name}" for name, number in made["nodes"].items()) or "the head alone"
    parts = ", ".join(f"{name} {value:,.0f}" for name, value in memory.items() if name != "total")
    trials = f", {made['trials']} trials at a time" if made["trials"] > 1 else ""
    lines = [
        f"fits       {made['workers']} workers ({made['device']}), {made['data_cpus']} CPUs for data{trials}; {nodes}",
        f"strategy   {made['strategy']}{' with recomputed layers' if made['recomputed_layers'] else ''}: {made['why']}",
        f"memory     {memory['total']:,.0f} MB a worker ({parts})",
        f"an update  {update['total']:.3g} s: {update['compute']:.3g} computing, {update['exposed_exchange']:.3g} of "
        f"{update['exchange']:.3g} exchanging unhidden, {update['waiting']:.3g} waiting ({made['efficiency']:.0%})",
        f"hours      {made['hours']:.2f}, {made['updates']:,} updates; {made['pace']}",
    ]
    by_workers = ", ".join(f"{one['workers']:,} {one['efficiency']:.0%}" for one in made["scaling"])
    lines.append(f"scaling    efficiency by workers, each with as many rows: {by_workers}")
    if cost is None:
        lines.append("money      unknown: a node's price is not known; write it into a file (--prices)")
    else:
        lines.append(
            f"money      {cost['dollars']:.2f} $ on demand; {cost['spot_dollars']:.2f} $ on spot nodes with "
            f"{cost['interruptions']:.2g} interruptions expected, which add {cost['repeated_hours'] * 60:.1f} minutes"
        )
    return [*lines, *(f"note       {note}" for note in made["notes"])]


def read_cluster(file: Path) -> dict[str, Any]:
    """A cluster's file. Raises `ConfigError` where it is none."""
    import yaml

    if not file.is_file():
        fix = "write one with rtrain cluster init --cloud aws"
        raise ConfigError([Problem("--cluster", str(file), "no such file", fix)])
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError([Problem("--cluster", str(file), f"no YAML ({error})", "see rtrain cluster lint")]) from None
    return found if isinstance(found, dict) else {}
