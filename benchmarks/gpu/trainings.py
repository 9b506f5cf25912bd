"""Whole trainings on banking77 in this process, without Ray: rtrain's loop with its evaluation and its checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.prepare import intent
from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    from rtrain.data.stream import Update
    from rtrain.trainer.trainer import Clock, Job, Outcome

Stream = Callable[[int, int], Iterator["Update"]]
PASS = {True: 1 << 16, False: 1 << 11}
"""Tokens of a pass, by whether there is a GPU."""


@dataclass
class Reporter:
    """Keeps the events of the loop, with the seconds of training until each."""

    clock: "Clock"
    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, kind: str, **fields: Any) -> None:
        seconds = sum(self.clock.seconds.get(name, 0.0) for name in ("first_batch", "input_wait", "train"))
        self.events.append({"kind": kind, "seconds": seconds, **fields})

    def score(self, metrics: dict[str, Any]) -> None:
        """Scores are of no use here."""

    def notice(self) -> bool:
        return False

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["kind"] == kind]


@dataclass(frozen=True)
class Ran:
    job: "Job"
    outcome: "Outcome"
    reporter: Reporter
    network: Any


def start(
    bench: Bench,
    run: Path,
    settings: Mapping[str, Any],
    *,
    stop: int | None = None,
    wrap: Callable[[Stream], Stream] = lambda stream: stream,
) -> Ran:
    """Start the run at `run` once, from its newest checkpoint to update `stop`. `settings` are of the recipe
    `intent`."""
    from rtrain import config
    from rtrain.data.order import Order
    from rtrain.data.stream import Share, plan_update
    from rtrain.models import builder
    from rtrain.parallel.ddp import Replicated
    from rtrain.tasks import base
    from rtrain.trainer import losses, trainer

    given = {
        **intent(),
        "data.path": "carried",
        "train.precision": bench.precision,
        "model.pooling": "mean",
        **settings,
    }
    recipe, store, task = config.load("intent", given).recipe, bench.store("banking77"), base.get("classification")
    train = recipe.train
    order = Order(store.manifest.digest, store.rows("train"), recipe.rows_per_update, train.epochs, train.seed)
    network: Any = builder.build(bench.model, task, store.manifest.labels, train.seed, recipe.model)
    builder.place(network, bench.device)
    job = trainer.Job(
        recipe=recipe,
        run=Run(run),
        store=store,
        task=task,
        loss=losses.for_run(task, recipe.distill, store.manifest.head, train.label_smoothing),
        order=order,
        pad_id=builder.pad_id(bench.model),
        precision=train.precision,
        until=min(stop or order.updates, order.updates),
    )
    share = Share(store.folder, order, 1, 0, None, PASS[bench.gpu])

    def stream(first: int, stop: int) -> Iterator["Update"]:
        return (plan_update(store, share, number) for number in range(first, stop))

    clock = trainer.Clock()
    reporter = Reporter(clock)
    outcome = trainer.train(job, Replicated(network), wrap(stream), reporter, clock)
    return Ran(job, outcome, reporter, network)
