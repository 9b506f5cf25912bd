"""Whole trainings on banking77 in this process, without Ray: rtrain's loop with its evaluation and its checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.prepare import intent
from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    from rtrain.data.stream import WorkerBatch
    from rtrain.trainer.trainer import Clock, TrainingContext, TrainingResult

Stream = Callable[[int, int], Iterator["WorkerBatch"]]
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

    def stop_requested(self) -> bool:
        return False

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@dataclass(frozen=True)
class Ran:
    job: "TrainingContext"
    outcome: "TrainingResult"
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
    from rtrain.data.order import RowOrder
    from rtrain.data.stream import StreamSpec, plan_worker_batch
    from rtrain.models import builder
    from rtrain.parallel.ddp import DDPStrategy
    from rtrain.tasks import base
    from rtrain.trainer import losses, trainer

    settings = {
        **intent(),
        "data.path": "carried",
        "train.precision": bench.precision,
        "model.pooling": "mean",
        **settings,
    }
    recipe, store, task = (
        config.load_config("intent", settings).recipe,
        bench.store("banking77"),
        base.get_task("classification"),
    )
    train = recipe.train
    order = RowOrder(store.manifest.digest, store.num_rows("train"), recipe.global_batch_size, train.epochs, train.seed)
    network: Any = builder.build_network(bench.model, task, store.manifest.labels, train.seed, recipe.model)
    builder.move_to_device(network, bench.device)
    job = trainer.TrainingContext(
        recipe=recipe,
        run=Run(run),
        store=store,
        task=task,
        loss=losses.make_loss(task, recipe.distill, store.manifest.head, train.label_smoothing),
        order=order,
        pad_id=builder.pad_id(bench.model),
        precision=train.precision,
        end_step=min(stop or order.num_steps, order.num_steps),
    )
    share = StreamSpec(store.folder, order, 1, 0, None, PASS[bench.gpu])

    def stream(first: int, stop: int) -> Iterator["WorkerBatch"]:
        return (plan_worker_batch(store, share, number) for number in range(first, stop))

    clock = trainer.Clock()
    reporter = Reporter(clock)
    outcome = trainer.train(job, DDPStrategy(network), wrap(stream), reporter, clock)
    return Ran(job, outcome, reporter, network)
