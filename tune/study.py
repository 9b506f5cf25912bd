"""What the aggregation frequency buys in time and costs in score: full trainings of one recipe at several frequencies,
by AdamW, by AdamW under the linear rule, and by RAdam; no search, no halving.

The published study that it follows: "Faster NLP with Deep Learning: Distributed Training" (Determined AI, 2020), on
BERT and SQuAD. The linear rule is Goyal et al. 2017 (arXiv:1706.02677); RAdam is Liu et al. 2020 (arXiv:1908.03265).

Pure but for `run`, which is handed a function that trains, and `of_run`, which reads a run's folder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.config.deploy import SPACE
from rtrain.data.order import Order
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.metrics.by_output import metric_for
from rtrain.report import summary
from rtrain.run import Run
from rtrain.tasks import base

FREQUENCY = "train.aggregation_frequency"
FREQUENCIES = (1, 2, 10, 100)
"""Those of the published study; a `tune.space` of one's own may name others."""
FIRST = 1
"""The frequency with which the others are compared."""
FEWEST_UPDATES = 20
"""Below, a warm-up of a tenth of the updates is one or two of them: no longer the frequency alone is compared."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"optim.name": "adamw", "optim.lr_scaling": "none"},
    "AdamW, linear rule": {"optim.name": "adamw", "optim.lr_scaling": "linear"},
    "RAdam": {"optim.name": "radam", "optim.lr_scaling": "none"},
}
"""The rows of the table. The rule takes the recipe's learning rate as that of the first frequency."""
LINKS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
"""Networks for which times are predicted, in bits per second and direction."""

Settings = Mapping[str, Any]
Finish = Callable[[Mapping[int, Settings]], Mapping[int, Run]]
"""Settings by number -> the runs that were trained to their ends with them. A run that failed may be left out."""


# ---------------------------------------------------------------------------------------------------------- what to run


@dataclass(frozen=True)
class Cell:
    """A place of the table. Two cells whose weights are the same have one run."""

    optimizer: str
    frequency: int
    number: int
    """Of the run."""


@dataclass(frozen=True)
class Plan:
    cells: tuple[Cell, ...]
    runs: Mapping[int, Settings]
    """What each run sets otherwise than the recipe, by number; run 0 is the first frequency with AdamW."""
    left_out: Mapping[int, str]
    """Frequencies that these rows are too few for, and why."""


def plan(config: Config, rows: int) -> Plan:
    """The runs for `rows` training rows.

    Raises `ConfigError` if a setting contradicts the study, and `UserError` if the rows leave nothing to compare.
    """
    _refuse(config)
    recipe = config.recipe
    of_one = recipe.train.workers * recipe.train.micro_batch * FIRST
    wanted = frequencies(config)
    left_out = {k: why for k in wanted if (why := too_few(rows, of_one * k, recipe.train.epochs))}
    kept = [k for k in wanted if k not in left_out]
    if FIRST not in kept or len(kept) < 2:
        told = "; ".join(f"k={k}: {why}" for k, why in left_out.items())
        raise UserError(
            f"{rows} training rows are too few to compare aggregation frequencies ({told}); give more rows, or more "
            "epochs with --set train.epochs"
        )
    cells, runs, known = list[Cell](), dict[int, Settings](), dict[str, int]()
    for optimizer in OPTIMIZERS:
        for k in kept:
            changed = _changed(config, optimizer, k, of_one)
            # The rule changes nothing at the first frequency: the same weights need no second training.
            weights = configuration.with_overrides(config, _neutral(changed, k)).recipe.identity()
            number = known.setdefault(weights, len(known))
            runs.setdefault(number, changed)
            cells.append(Cell(optimizer, k, number))
    return Plan(tuple(cells), runs, left_out)


def frequencies(config: Config) -> tuple[int, ...]:
    """Those that `tune.space` names as a list, where it is not that of a search; else the published ones."""
    space = config.deploy.tune.space
    named = None if space == SPACE else space.get(FREQUENCY)
    return tuple(sorted(int(k) for k in named)) if isinstance(named, tuple) else FREQUENCIES


def too_few(rows: int, rows_per_update: int, epochs: int) -> str | None:
    """Why a training with these updates tells nothing about the frequency; None if it does."""
    if rows_per_update > rows:
        return f"one update takes {rows_per_update} rows, and there are {rows}"
    updates = Order("", rows, rows_per_update, epochs, 0).updates
    return f"{updates} updates, fewer than {FEWEST_UPDATES}" if updates < FEWEST_UPDATES else None


def _refuse(config: Config) -> None:
    problems = []
    if (rows := config.recipe.train.rows_per_update) is not None:
        reason = f"the study sets {FREQUENCY}, and so the rows of an update"
        problems.append(Problem("train.rows_per_update", rows, reason, "leave it out"))
    if FIRST not in frequencies(config):
        reason = f"times are told against an exchange after every pass, {FREQUENCY}={FIRST}"
        problems.append(Problem("tune.space", frequencies(config), reason, f"add {FIRST}"))
    if problems:
        raise ConfigError(problems)


def _changed(config: Config, optimizer: str, k: int, lr_rows: int) -> Settings:
    """What a cell sets otherwise than the recipe."""
    chosen = {**OPTIMIZERS[optimizer], FREQUENCY: k}
    if chosen["optim.lr_scaling"] != "none":
        chosen["optim.lr_rows"] = lr_rows
    now = configuration.flat(config)
    return {name: value for name, value in chosen.items() if now[name] != value}


def _neutral(changed: Settings, k: int) -> Settings:
    """The same settings, without the rule where it changes nothing."""
    return {**changed, "optim.lr_scaling": "none"} if k == FIRST else changed


# ------------------------------------------------------------------------------------------------------ what it came to


@dataclass(frozen=True)
class Result:
    """What the run of a cell came to."""

    optimizer: str
    frequency: int
    score: float | None = None
    """The task's headline on the test rows; None if the run failed."""
    seconds: float | None = None
    """Seconds of training: without its start, evaluations and checkpoints."""
    updates: int = 0
    exchange_s: float = 0.0
    """Mean seconds by which an exchange lengthens a pass; 0 with one worker."""
    exchange_bytes: int = 0
    """Bytes of a gradient."""
    workers: int = 1
    transport: str = ""
    error: str | None = None
    """Why there is no score."""

    @property
    def share(self) -> float | None:
        """The share of the time that goes into the exchange."""
        return None if not self.seconds else self.updates * self.exchange_s / self.seconds

    def over(self, exchange_s: float) -> float | None:
        """Seconds of the same training where an exchange takes so many."""
        return None if self.seconds is None else self.seconds + self.updates * (exchange_s - self.exchange_s)


def of_run(cell: Cell, run: Run | None) -> Result:
    log = [] if run is None else run.events()
    if run is None or summary.status(log) != "finished":
        failed = next((event["error"] for event in reversed(log) if event["kind"] == "failed"), "the run did not end")
        return Result(cell.optimizer, cell.frequency, error=str(failed).splitlines()[0])
    found, last = summary.summarise(run), next(event for event in reversed(log) if event["kind"] == "trained")
    cost = last.get("exchange") or {"seconds": 0.0, "bytes": 0}
    return Result(
        cell.optimizer,
        cell.frequency,
        score=found["metrics"]["test"][metric_for(base.get(found["task"]).output).headline],
        seconds=found["seconds"]["train"] + found["seconds"]["input_wait"],
        updates=found["updates"],
        exchange_s=cost["seconds"],
        exchange_bytes=cost["bytes"],
        workers=found["workers"],
        transport=found["exchange"]["transport"],
    )


def over_link(gradient_bytes: int, workers: int, bits_per_second: float) -> float:
    """Seconds of an exchange over a link: in a ring, each worker sends 2 (n - 1) / n of a gradient (Patarasuk and Yuan
    2009). Latency is left out, and nothing is hidden behind the backward pass."""
    return 2 * (workers - 1) / workers * gradient_bytes * 8 / bits_per_second


# --------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Table:
    text: str
    """Markdown that a terminal shows well."""
    document: Mapping[str, Any]


def table(
    results: Sequence[Result],
    headline: str,
    left_out: Mapping[int, str] | None = None,
    networks: Mapping[str, float] | None = None,
) -> Table:
    """The table of a study: optimizers are its rows, frequencies its columns; a part for each figure.

    `networks` has the seconds of an exchange over networks that were measured, by name (`benchmarks.slow_network`);
    beside them the times over `LINKS` are predicted.
    """
    by = {(one.optimizer, one.frequency): one for one in results}
    here = next((one.transport for one in results if one.transport), "") or "one worker"

    def saved(one: Result, seconds: Callable[[Result], float | None]) -> float | None:
        first, own = seconds(by[one.optimizer, FIRST]), seconds(one)
        return None if not first or own is None else 1 - own / first

    def lost(one: Result) -> float | None:
        first = by[one.optimizer, FIRST].score
        return None if first is None or one.score is None else first - one.score

    parts = [
        _part(f"{headline} on the test rows", results, lambda one: one.score, "{:.4f}"),
        _part(f"lost against k = {FIRST}", results, lost, "{:+.4f}"),
        _part(f"seconds of training here ({here})", results, lambda one: one.seconds, "{:.1f}"),
        _part("share of them in the exchange", results, lambda one: one.share, "{:.1%}"),
        _part(
            f"time saved against k = {FIRST}", results, lambda one: saved(one, lambda other: other.seconds), "{:.1%}"
        ),
    ]
    document: dict[str, Any] = {
        "headline": headline,
        "results": [
            {**asdict(one), "share": one.share, "saved": saved(one, lambda other: other.seconds), "lost": lost(one)}
            for one in results
        ],
        "left_out": {str(k): why for k, why in (left_out or {}).items()},
        "networks": {},
    }
    for name, (how, cost) in _networks(networks or {}).items():

        def there(one: Result, cost: Callable[[Result], float] = cost) -> float | None:
            return one.over(cost(one))

        title = f"seconds over {name}, {how} (saved)"
        parts.append(_part(title, results, there, "{:.1f}", lambda one, there=there: saved(one, there)))  # type: ignore[misc]
        document["networks"][name] = {
            "how": how,
            "results": [
                {"optimizer": one.optimizer, "frequency": one.frequency, "seconds": there(one)}
                | {"saved": saved(one, there)}
                for one in results
            ],
        }
    notes = [f"k = {k} is left out: {why}." for k, why in (left_out or {}).items()]
    failed = {f"{one.optimizer}, k = {one.frequency}": one.error for one in results if one.error}
    notes += [f"{name}: {why}" for name, why in failed.items()]
    return Table("\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]), document)


def of_document(document: Mapping[str, Any], networks: Mapping[str, float] | None = None) -> Table:
    """The table of a study that was kept, with other networks."""
    names = Result.__dataclass_fields__.keys()
    results = [Result(**{name: one[name] for name in names}) for one in document["results"]]
    left_out = {int(k): why for k, why in document["left_out"].items()}
    return table(results, document["headline"], left_out, networks)


def _networks(measured: Mapping[str, float]) -> dict[str, tuple[str, Callable[[Result], float]]]:
    """How the time of an exchange over each network is known, and the seconds that a result's exchange takes there."""

    def known(seconds: float) -> Callable[[Result], float]:
        return lambda one: seconds if one.workers > 1 else 0.0

    def predicted(bits: float) -> Callable[[Result], float]:
        return lambda one: over_link(one.exchange_bytes, one.workers, bits)

    told = {name: ("predicted", predicted(bits)) for name, bits in LINKS.items()}
    return told | {name: ("measured", known(seconds)) for name, seconds in measured.items()}


def _part(
    title: str,
    results: Iterable[Result],
    value: Callable[[Result], float | None],
    form: str,
    beside: Callable[[Result], float | None] | None = None,
) -> str:
    """A figure of all results, `beside` it a share in brackets."""
    rows: dict[str, dict[int, str]] = {}
    for one in results:
        own, other = value(one), beside(one) if beside else None
        shown = "failed" if own is None else form.format(own)
        rows.setdefault(one.optimizer, {})[one.frequency] = shown + ("" if other is None else f" ({other:.0%})")
    columns = sorted({k for row in rows.values() for k in row})
    lines = [f"| {title} | " + " | ".join(f"k = {k}" for k in columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(row.get(k, "") for k in columns) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def run(config: Config, rows: int, finish: Finish) -> Table:
    """Train what the table needs, by `finish`, and make it. Raises what `plan` raises, and `UserError` if no run
    ended."""
    planned = plan(config, rows)
    runs = finish(planned.runs)
    results = [of_run(cell, runs.get(cell.number)) for cell in planned.cells]
    if all(one.error for one in results):
        raise UserError(f"no run of the study came to its end; {results[0].error}")
    headline = metric_for(base.get(config.recipe.task).output).headline
    return table(results, headline, planned.left_out)
