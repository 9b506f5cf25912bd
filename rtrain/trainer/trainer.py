"""A run's loop: updates, cadence, evaluation, checkpoints. Talks to a small Reporter, not to Ray."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rtrain.checkpoint import format as checkpoint_format, loss_scale
from rtrain.checkpoint.remote_copy import Replica
from rtrain.checkpoint.saver import Saver
from rtrain.config import Recipe
from rtrain.core.ragged import Head, Ragged
from rtrain.core.run_folder import Run
from rtrain.data.order import Order, chain
from rtrain.data.store.store import Store
from rtrain.data.stream import Update
from rtrain.metrics.registry import metric_for
from rtrain.models import device, dropout
from rtrain.parallel import collectives, dtensor_utils, gradient_noise
from rtrain.parallel.base import Exchange
from rtrain.tasks import base
from rtrain.trainer import best_checkpoint, losses, optimizers, rung_predictions, step, step_timing
from rtrain.trainer.evaluate import evaluate, gathered
from rtrain.trainer.profiler import Watched

if TYPE_CHECKING:
    import torch

GENESIS = bytes(32)
"""The ledger before the first update."""
NONE = -1
"""Stands for 'no update' in what ranks tell each other."""


@dataclass(frozen=True)
class Cadence:
    """When to evaluate and save. Pure: asked with the number of updates that are done."""

    last: int
    """Updates of the whole run."""
    until: int
    """Updates at which this start ends. Where that is before the run's last, nothing is evaluated for it: the best
    weights of a run must not depend on where it paused."""
    evaluate_every: int
    save_every: int | None

    def due(self, done: int) -> frozenset[str]:
        evaluates = done == self.last or done % self.evaluate_every == 0
        saves = evaluates or done == self.until or (self.save_every is not None and done % self.save_every == 0)
        return frozenset(name for name, is_due in (("evaluate", evaluates), ("save", saves)) if is_due)


@dataclass
class Totals:
    rows_seen: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    passes: int = 0
    updates: int = 0

    def add(self, done: step.Done) -> None:
        self.rows_seen += done.rows
        self.real_tokens += done.real_tokens
        self.padded_tokens += done.padded_tokens
        self.passes += done.passes
        self.updates += 1

    def over_workers(self, exchange: Exchange) -> "Totals":
        """The sums over all workers, `updates` included. Called on every rank."""
        import torch

        # The tensor is on the CPU wherever the model is: the process group has a transport for both.
        sums = exchange.sum(torch.tensor(astuple(self), dtype=torch.int64)).tolist()
        return Totals(**{one.name: value for one, value in zip(fields(self), sums, strict=True)})


@dataclass
class Clock:
    """Seconds of this start, by section."""

    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> float:
        """What updates have taken: no evaluation, no checkpoint, no waiting for rows."""
        return round(self.seconds.get("train", 0.0), 3)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Reporter(Protocol):
    def event(self, kind: str, **fields: Any) -> None:
        """Something happened. Called on every rank; rank 0's is kept."""
        ...

    def score(self, metrics: dict[str, Any]) -> None:
        """An evaluation's result. Called on every rank at the same update."""
        ...

    def notice(self) -> bool:
        """Whether this start is to end after the coming update, with a checkpoint. Asked on every rank."""
        ...


@dataclass(frozen=True)
class Job:
    """One start of a run, as every rank sees it."""

    recipe: Recipe
    run: Run
    store: Store
    task: base.Task
    loss: step.Loss
    order: Order
    pad_id: int
    precision: str
    until: int
    """Updates after which this start ends; `order.updates` for a whole run."""
    rung: bool = False
    """Keep the answers to the validation rows at `until` (`training.rungs`): a search compares them."""
    replica: Replica | None = None
    at_random: int = gradient_noise.EVERY
    """Of how many updates one has its rows dealt at random (`exchange.noise`); 0: none."""
    measures: bool = False
    """Whether these measure the noise of gradients."""
    profile: Path | None = None
    """File that gets this worker's spans of each update (`training.watched`)."""
    chosen: Head | None = None
    """The store's head with what was chosen on the validation rows, once that is known."""

    @property
    def head(self) -> Head:
        return self.chosen or self.store.manifest.head

    @property
    def identity(self) -> str:
        """Digest of the rows of all updates, and of the settings that change the weights: of each checkpoint too."""
        return f"{self.order.identity}-{self.recipe.identity()}"

    @property
    def validates(self) -> bool:
        """Whether there are validation rows. Without them the last weights are the run's."""
        return self.store.rows("valid") > 0


@dataclass(frozen=True)
class Outcome:
    finished: bool
    """False for a start that ended before the run's last update."""
    best_update: int
    ledger: str
    scores: dict[str, dict[str, float]]
    """Scores of the best checkpoint by split: `valid` (the headline alone) where there are validation rows, and `test`
    where the run is finished."""
    outcomes: dict[str, Ragged] = field(default_factory=dict, compare=False)
    """Outcomes of a finished run's best weights by split: of the test rows, and of the validation rows where this start
    made those weights."""


Updates = Callable[[int, int], Iterator[Update]]
"""(first, last) -> this worker's updates from `first` up to but not including `last`."""


def train(job: Job, exchange: Exchange, updates: Updates, reporter: Reporter, clock: Clock) -> Outcome:
    """Run from the newest checkpoint to `job.until`; at the end of a finished run the model holds the weights of the
    best checkpoint."""
    with Saver(job.run.checkpoints, job.recipe.train.keep, job.replica, reporter.event, exchange.watch) as saver:
        return _Loop(job, exchange, reporter, clock, saver).run(updates)


class _Loop(step.Observer):
    """One start of a run on one worker."""

    def __init__(self, job: Job, exchange: Exchange, reporter: Reporter, clock: Clock, saver: Saver):
        self._job, self._exchange, self._reporter, self._clock, self._saver = job, exchange, reporter, clock, saver
        self._optimizer = optimizers.of_run(exchange, job.recipe)
        state = self._restored()
        self._state = replace(state, scale=state.scale or loss_scale.first(job.precision))
        self._totals = Totals()
        self._answers: dict[str, Ragged] = {}
        """Outcomes by split, of the best weights of this start."""
        self._evaluations = best_checkpoint.evaluations(job.run.events("evaluated"), self._headline, state.update)

    def notice(self) -> bool:
        return self._reporter.notice()

    def run(self, updates: Updates) -> Outcome:
        job, exchange = self._job, self._exchange
        cadence = Cadence(
            last=job.order.updates,
            until=job.until,
            evaluate_every=job.recipe.train.evaluate_every or job.order.updates_per_epoch,
            save_every=job.recipe.train.save_every,
        )
        known = {"workers": exchange.workers, "precision": job.precision, "lr": job.recipe.peak_lr}
        known |= {
            "device": device.named(dtensor_utils.device(exchange.module)),
            "rows_per_update": job.recipe.rows_per_update,
        }
        self._reporter.event("started", update=self._state.update, of=job.order.updates, **known)
        exchange.module.train()
        step.settle(exchange, job.loss, job.pad_id, job.precision)
        stream = updates(self._state.update, job.until)
        self._watched = Watched(exchange, job.profile)
        while self._state.update < job.until:
            done = self._trained(self._next(stream))
            finished = self._state.update
            if finished % job.recipe.train.log_every == 0 or finished == job.until:
                self._progress(done)
            due = cadence.due(finished) | ({"save"} if done.notice else set())
            kept: dict[str, Ragged] = {}
            with exchange.timeline.during(step_timing.EVALUATE):
                if "evaluate" in due and job.validates:
                    self._evaluate(kept)
                if job.rung and finished == job.until and job.validates:
                    self._rung(kept)
            if "save" in due:
                self._save()
            self._watched.end(finished - 1, done)
            if done.notice:
                break
        return self._end()

    # ---------------------------------------------------------------------------------------------------- one update

    def _next(self, stream: Iterator[Update]) -> Update:
        section = "input_wait" if "first_batch" in self._clock.seconds else "first_batch"
        with self._clock.section(section), self._exchange.timeline.during(step_timing.GET_BATCH):
            return next(stream)

    def _trained(self, update: Update) -> step.Done:
        """Train on one update, with smaller and smaller loss scales where its gradient is infinite: each row counts
        once, with the dropout that it would have had."""
        job, scale = self._job, self._state.scale
        while True:
            value = None if scale is None else scale.value
            with self._clock.section("train"):
                done = one_update(job, self._exchange, self._optimizer, update, observer=self, scale=value)
            scale = None if scale is None else scale.after(finite=not done.skipped)
            if scale is None or not done.skipped:
                break
            self._reporter.event("skipped", update=update.number, scale=scale.value)
            if scale.hopeless:
                raise step.NonFinite(
                    f"{_named(job, update.number)}: the gradient is not finite with any of {scale.infinite} loss "
                    f"scales down to {2 * scale.value:g}: lower optim.lr, set train.precision=fp32, or set "
                    "optim.clip_norm"
                )
        self._totals.add(done)
        if done.noise is not None:
            self._reporter.event(gradient_noise.KIND, update=update.number + 1, **asdict(done.noise))
        ledger = chain(bytes.fromhex(self._state.ledger), update.digest).hex()
        self._state = replace(self._state, scale=scale, update=update.number + 1, ledger=ledger)
        return done

    def _progress(self, done: step.Done) -> None:
        sums, state = self._totals.over_workers(self._exchange), self._state
        self._reporter.event(
            "progress",
            update=state.update,
            of=self._job.order.updates,
            loss=round(done.loss, 5),
            ledger=state.ledger,
            rows=sums.rows_seen,
            real_tokens=sums.real_tokens,
            padded_tokens=sums.padded_tokens,
            train_s=self._clock.trained,
        )

    # ------------------------------------------------------------------------------------------------------ evaluation

    def _evaluate(self, kept: dict[str, Ragged]) -> None:
        """Score the validation rows, whose outcomes go into `kept`; state and answers say so if that is the best."""
        found, is_best = self._validated(self._state.update, kept)
        if is_best:
            self._state = best_checkpoint.kept(found, self._state)
            self._answers |= kept
        percent = 100 * found.update / self._job.order.updates
        self._reporter.score({"update": found.update, "percent": percent, "score": found.score})

    def _validated(self, update: int, keep: dict[str, Ragged]) -> tuple[best_checkpoint.Evaluated, bool]:
        """Score the validation rows by the weights of `update`, log it, and compare it with the best so far.

        The rows' outcomes go into `keep`. Rank 0 alone computes the loss and compares: on another machine the sum over
        the rows may differ in its last bit, and the ranks must agree on the best.
        """
        job, scores = self._job, self._scores("valid", keep)
        found = best_checkpoint.Evaluated(update, scores[self._headline])

        def compare() -> int:
            nonlocal found
            if outcomes := keep.get("valid"):
                found = found._replace(loss=best_checkpoint.mean_loss(job.task, outcomes, job.store))
            return best_checkpoint.better(found, best_checkpoint.of(self._state))

        is_best = collectives.decided(self._exchange.watch, compare)
        told = {"scores": scores, "loss": found.loss, "train_s": self._clock.trained}
        self._reporter.event("evaluated", split="valid", update=update, **told)
        self._evaluations[update] = found
        return found, bool(is_best)

    def _rung(self, kept: dict[str, Ragged]) -> None:
        """Keep the answers to the validation rows, before the save: a rung's checkpoint has its answers beside it."""
        job, exchange, update = self._job, self._exchange, self._state.update
        if (answers := kept.get("valid")) is None:
            with self._clock.section("evaluate"):
                answers = gathered(exchange, job.task, job.store, "valid", pad_id=job.pad_id, precision=job.precision)
        collectives.decided(exchange.watch, lambda: rung_predictions.keep(job.run, update, answers))
        self._reporter.event("rung", update=update)

    def _scores(self, split: str, keep: dict[str, Ragged]) -> dict[str, float]:
        job, exchange = self._job, self._exchange
        with self._clock.section("evaluate"):
            return evaluate(exchange, job.task, job.store, split, pad_id=job.pad_id, precision=job.precision, keep=keep)

    @property
    def _headline(self) -> str:
        return metric_for(self._job.task.output).headline

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def _restored(self) -> checkpoint_format.State:
        """Rank 0 selects the checkpoint, once; the others follow, so that no two ranks start from different ones."""
        folder, run = self._saver.folder, self._job.identity

        def select() -> int:
            known = checkpoint_format.set_aside(folder)
            chosen = self._saver.select(run)
            for name, reason in checkpoint_format.set_aside(folder).items():
                if name not in known:
                    self._reporter.event("set_aside", checkpoint=name, reason=reason)
            return NONE if chosen is None else chosen

        update = collectives.decided(self._exchange.watch, select)
        if update == NONE:
            return checkpoint_format.State(update=0, ledger=GENESIS.hex(), best_update=None, best_score=None, run=run)
        state = self._loaded(update, self._optimizer)
        # The best one is loaded at the end, so it must verify too; where it does not, the best is sought from here on.
        if self._best(state) == NONE:
            return best_checkpoint.kept(None, state)
        return state

    def _loaded(self, update: int, optimizer: "torch.optim.Optimizer | None" = None) -> checkpoint_format.State:
        """Put a checkpoint into the model of every rank; each reads it by itself, some slower than others."""
        exchange, path = self._exchange, checkpoint_format.path_of(self._saver.folder, update)

        @exchange.watch.busy()
        def load() -> checkpoint_format.State:
            return checkpoint_format.load(path, exchange.module, optimizer)

        return collectives.together(exchange.watch, load)

    def _best(self, state: checkpoint_format.State) -> int:
        """Update of the best checkpoint, or NONE. Rank 0 verifies it, and reports where it is lost."""
        update, folder = state.best_update, self._saver.folder
        if update is None:
            return NONE
        if update == state.update:  # verified when it was loaded, or the weights as they stand
            return update
        if collectives.decided(self._exchange.watch, lambda: checkpoint_format.sound(folder, update, state.run)):
            return update
        self._reporter.event("best_lost", update=update)
        return NONE

    def _save(self) -> None:
        exchange = self._exchange
        with self._clock.section("checkpoint"), exchange.timeline.during(step_timing.CHECKPOINT):
            self._flushed()  # no worker waits inside an exchange for what is still being written
            with exchange.watch.busy():
                self._saver.save(exchange.module, self._optimizer, self._state, exchange.whole)

    def _flushed(self) -> None:
        def flush() -> int:
            self._saver.flush()
            return self._state.update

        collectives.decided(self._exchange.watch, flush)

    # ---------------------------------------------------------------------------------------------------------- the end

    def _end(self) -> Outcome:
        """Restore the best weights and score them on the test rows (a finished run only); report the run's sums."""
        job, state = self._job, self._state
        finished = state.update == job.order.updates
        with self._clock.section("checkpoint"):
            self._flushed()
            if not finished:  # at once: the end of the workers themselves takes seconds, and may come too late
                self._reporter.event("saved", update=state.update)
            # Only a finished run uses its best weights: a rung or a preempted start reads and hashes nothing for them.
            update = self._best(state) if finished else NONE if state.best_update is None else state.best_update
        if finished and update not in (NONE, state.update):
            self._loaded(update)
        chosen = best_checkpoint.of(state) if update != NONE else None
        if finished and update == NONE:
            update = state.update
        if finished and chosen is None and job.validates:  # the best weights are lost: the last ones have a score too
            chosen, _ = self._validated(update, self._answers)
        scores = {"valid": {self._headline: chosen.score if chosen else 0.0}} if job.validates else {}
        if finished and chosen is not None:
            self._reporter.event("best", headline=self._headline, **best_checkpoint.said(chosen, self._evaluations))
        if finished:
            scores["test"] = self._scores("test", self._answers)
            self._reporter.event("evaluated", split="test", update=update, scores=scores["test"])
        self._report_sums(finished, update)
        return Outcome(finished, update, state.ledger, scores, self._answers)

    def _report_sums(self, finished: bool, best: int) -> None:
        exchange, state = self._exchange, self._state
        sums = self._totals.over_workers(exchange)
        self._reporter.event(
            "trained",
            updates=state.update,
            best_update=best,
            order_digest=state.ledger,
            rows_seen=sums.rows_seen,
            real_tokens=sums.real_tokens,
            padded_tokens=sums.padded_tokens,
            passes_per_update=round(sums.passes / exchange.world / max(1, self._totals.updates), 3),
            seconds={name: round(value, 3) for name, value in self._clock.seconds.items()},
            finished=finished,
            exchange=exchange.cost(),
            stages=self._watched.told(),
            **({} if state.scale is None else {"loss_scale": state.scale.value}),
        )


def one_update(
    job: Job,
    exchange: Exchange,
    optimizer: "torch.optim.Optimizer",
    update: Update,
    *,
    run_update: step.RunUpdate | None = None,
    observer: step.Observer | None = None,
    scale: float | None = None,
) -> step.Done:
    """Train on one update at its place in the run: its learning rate, its dropout, its rows and no others.

    `run_update` stands in for `step.run_update`; `observer` and `scale` are handed to it.
    """
    import torch

    epoch = update.number // job.order.updates_per_epoch
    seed, head = job.recipe.train.seed, job.store.manifest.head
    with exchange.timeline.during(step_timing.GET_BATCH):
        passes = [job.task.prepare(tokens, head, seed, epoch) for tokens in update.passes]
        positions = job.order.positions(update.number)
        expected = step.row_sum(job.store.column("train", "row_id")[positions])
        planned = losses.planned(job.loss, job.store, positions) if exchange.world > 1 else None
    optimizers.set_rate(optimizer, optimizers.learning_rate(job.recipe, update.number, job.order.updates))
    torch.manual_seed(dropout.seed_of(seed, update.number, exchange.rank))
    try:
        return (run_update or step.run_update)(
            exchange,
            optimizer,
            job.loss,
            passes,
            pad_id=job.pad_id,
            precision=job.precision,
            scale=scale,
            clip_norm=job.recipe.optim.clip_norm,
            rows=expected,
            observer=observer,
            measures=job.measures and gradient_noise.due(update.number, job.at_random),
            targets=planned,
        )
    except (step.NonFinite, step.WrongRows) as error:
        raise type(error)(f"{_named(job, update.number)}: {error}") from None


def _named(job: Job, number: int) -> str:
    return f"update {number} ({job.store.places('train', job.order.positions(number))})"
