"""A run's loop: updates, cadence, evaluation, checkpoints. Talks to a small Reporter, not to Ray."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rtrain.batch import Head, Ints, Ragged
from rtrain.checkpoints import checkpoint, loss_scale
from rtrain.checkpoints.replica import Replica
from rtrain.checkpoints.saver import Saver
from rtrain.config import Recipe
from rtrain.data.ingest import Update
from rtrain.data.order import Order, chain, version
from rtrain.data.store import Store
from rtrain.exchange import ranks
from rtrain.exchange.gradients import Exchange
from rtrain.metrics.by_output import metric_for
from rtrain.network import device
from rtrain.tasks import base
from rtrain.training import optim, sharded, step
from rtrain.training.cadence import Cadence
from rtrain.training.evaluate import evaluate
from rtrain.training.totals import Totals

if TYPE_CHECKING:
    import torch

GENESIS = bytes(32)
"""The ledger before the first update."""
PLACES = 5
"""Rows of an update that an error names."""
NONE = -1
"""In place of an update, between ranks: there is none."""


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


@dataclass
class Clock:
    """Seconds of this start, by section."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Job:
    """One start of a run, as every rank sees it."""

    recipe: Recipe
    run: Path
    store: Store
    task: base.Task
    loss: step.Loss
    order: Order
    pad_id: int
    precision: str
    until: int
    """Updates after which this start ends; `order.updates` for a whole run."""
    evaluate_at: frozenset[int] = frozenset()
    replica: Replica | None = None
    chosen: Head | None = None
    """The store's head with what was chosen on the validation rows, once it was."""

    @property
    def head(self) -> Head:
        return self.chosen or self.store.manifest.head

    @property
    def validates(self) -> bool:
        """There are validation rows; without, the last weights are the run's."""
        return self.store.rows("valid") > 0


@dataclass(frozen=True)
class Outcome:
    finished: bool
    """False for a start that ended before the run's last update."""
    best_update: int
    ledger: str
    scores: dict[str, dict[str, float]]
    """Of the best checkpoint: `valid` (its headline score) where it validates, `test` where the run is finished."""
    outcomes: dict[str, Ragged] = field(default_factory=dict, compare=False)
    """Of a finished run's best weights: for the test rows, and for the validation rows if they are of this start."""


def train(
    job: Job, exchange: Exchange, updates: Callable[[int, int], Iterator[Update]], reporter: Reporter, clock: Clock
) -> Outcome:
    """Run from the newest checkpoint to `job.until`; in the end the model holds the best checkpoint's weights."""
    with Saver(job.run / "checkpoints", job.recipe.train.keep, job.replica, reporter.event, exchange.watch) as saver:
        return _train(job, exchange, updates, reporter, clock, saver)


def _train(
    job: Job,
    exchange: Exchange,
    updates: Callable[[int, int], Iterator[Update]],
    reporter: Reporter,
    clock: Clock,
    saver: Saver,
) -> Outcome:
    optimizer = sharded.build(exchange, job.recipe, reporter.event)
    state = _restore(saver, identity(job.order), exchange, optimizer, reporter)
    state = replace(state, scale=state.scale or loss_scale.first(job.precision))
    cadence = Cadence(
        last=job.until,
        evaluate_every=job.recipe.train.evaluate_every or job.order.updates_per_epoch,
        save_every=job.recipe.train.save_every,
        evaluate_at=job.evaluate_at,
    )
    where = device.named(next(exchange.module.parameters()).device)
    known = {"workers": exchange.world, "device": where, "precision": job.precision, "lr": job.recipe.peak_lr}
    reporter.event("started", update=state.update, of=job.order.updates, **known)
    exchange.module.train()
    settle(job, exchange)
    totals, best = Totals(), dict[str, Ragged]()
    stream = updates(state.update, job.until)
    while state.update < job.until:
        update = _next(stream, clock)
        done, scale = _trained(job, exchange, optimizer, update, clock, state.scale, reporter)
        totals.add(done)
        finished = update.number + 1
        state = replace(
            state, scale=scale, update=finished, ledger=chain(bytes.fromhex(state.ledger), update.digest).hex()
        )
        if finished % job.recipe.train.log_every == 0 or finished == job.until:
            loss, sums = round(done.loss, 5), totals.over_workers(exchange)
            seen = {"rows": sums.rows_seen, "real_tokens": sums.real_tokens}
            reporter.event("progress", update=finished, of=job.order.updates, loss=loss, ledger=state.ledger, **seen)
        due = cadence.due(finished) | ({"save"} if done.notice else set())
        if "evaluate" in due and job.validates:
            state = _evaluate(job, exchange, state, reporter, clock, best)
        if "save" in due:
            _save(saver, exchange, optimizer, state, clock)
        if done.notice:
            break
    return _end(job, exchange, saver, state, totals, reporter, clock, best)


def settle(job: Job, exchange: Exchange) -> None:
    """Before the first update of every start: discard one exchange, where three workers or more take part.

    DDP rebuilds its buckets after its first exchange, which changes the order of summation from then on: a restart
    would differ from the run it continues. The sum of two terms has only one order.
    """
    if exchange.world > 2:
        step.idle_pass(exchange, job.pad_id, job.precision)


def _restore(
    saver: Saver, run: str, exchange: Exchange, optimizer: "torch.optim.Optimizer", reporter: Reporter
) -> checkpoint.State:
    """Rank 0 selects the checkpoint, once; the others follow, so that no two ranks ever start from different ones."""

    def select() -> int:
        known = checkpoint.set_aside(saver.folder)
        chosen = saver.select(run)
        for name, reason in checkpoint.set_aside(saver.folder).items():
            if name not in known:
                reporter.event("set_aside", checkpoint=name, reason=reason)
        return NONE if chosen is None else chosen

    update = ranks.decided(exchange.watch, select)
    if update == NONE:
        return checkpoint.State(update=0, ledger=GENESIS.hex(), best_update=None, best_score=None, run=run)
    state = _loaded(exchange, checkpoint.path_of(saver.folder, update), optimizer)
    # The best one is loaded at the end, so it must verify too; where it does not, the best is sought anew from here.
    if _best(saver.folder, exchange, state, reporter) == NONE:
        return replace(state, best_update=None, best_score=None)
    return state


def identity(order: Order) -> str:
    """What a run's checkpoints are known by: the rows of all of its updates."""
    rule = version(order.rows)
    parts = astuple(order) if rule == 1 else (*astuple(order), rule)  # what is as it was is known as it was
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _best(folder: Path, exchange: Exchange, state: checkpoint.State, reporter: Reporter) -> int:
    """Update of the best checkpoint, or NONE. Rank 0 verifies it, and reports where it is lost."""
    best = state.best_update
    if best is None:
        return NONE
    if best == state.update:  # verified when it was loaded, or the weights as they stand
        return best
    found = ranks.decided(exchange.watch, lambda: best if checkpoint.sound(folder, best, state.run) else NONE)
    if found == NONE:
        reporter.event("best_lost", update=best)
    return found


def _loaded(exchange: Exchange, path: Path, optimizer: "torch.optim.Optimizer | None" = None) -> checkpoint.State:
    """Put a checkpoint into the model of every rank; each reads it by itself, some slower than others."""

    @exchange.watch.busy()
    def load() -> checkpoint.State:
        return checkpoint.load(path, exchange.module, optimizer)

    return ranks.together(exchange.watch, load)


def _next(stream: Iterator[Update], clock: Clock) -> Update:
    with clock.section("input_wait" if "first_batch" in clock.seconds else "first_batch"):
        return next(stream)


def one_update(
    job: Job,
    exchange: Exchange,
    optimizer: "torch.optim.Optimizer",
    update: Update,
    clock: Clock,
    run_update: Callable[..., step.Done] | None = None,
    notice: bool = False,
    on_gradient: "Callable[[torch.nn.Module], None] | None" = None,
    scale: float | None = None,
) -> step.Done:
    """Train on one update at its place in the run: its learning rate, its dropout, its rows and no others."""
    import torch

    epoch = update.number // job.order.updates_per_epoch
    seed, head = job.recipe.train.seed, job.store.manifest.head
    passes = [job.task.prepare(tokens, head, seed, epoch) for tokens in update.passes]
    expected = step.row_sum(job.store.column("train", "row_id")[job.order.positions(update.number)])
    with clock.section("train"):
        optim.set_rate(optimizer, optim.learning_rate(job.recipe, update.number, job.order.updates))
        # Dropout is a function of (seed, update, rank): a resumed run draws the same masks without stored state.
        torch.manual_seed(_seed(job.recipe.train.seed, update.number, exchange.rank))
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
                notice=notice,
                on_gradient=on_gradient,
            )
        except (step.NonFinite, step.WrongRows) as error:
            raise type(error)(f"{_named(job, update.number)}: {error}") from None


def _trained(
    job: Job,
    exchange: Exchange,
    optimizer: "torch.optim.Optimizer",
    update: Update,
    clock: Clock,
    scale: loss_scale.Scale | None,
    reporter: Reporter,
) -> tuple[step.Done, loss_scale.Scale | None]:
    """Train on one update, with smaller and smaller loss scales where its gradient is infinite: each row counts once,
    with the dropout that it would have had. Returns the scale for the next one too."""
    notice = reporter.notice()
    while True:
        value = None if scale is None else scale.value
        done = one_update(job, exchange, optimizer, update, clock, notice=notice, scale=value)
        scale = None if scale is None else scale.after(finite=not done.skipped)
        if scale is None or not done.skipped:
            return done, scale
        reporter.event("skipped", update=update.number, scale=scale.value)
        if scale.hopeless:
            raise step.NonFinite(
                f"{_named(job, update.number)}: the gradient is not finite with any of {scale.infinite} loss scales "
                f"down to {2 * scale.value:g}: lower optim.lr, set train.precision=fp32, or set optim.clip_norm"
            )


def _named(job: Job, number: int) -> str:
    return f"update {number} ({_places(job.store, job.order.positions(number))})"


def _places(store: Store, positions: Ints) -> str:
    """Where an update's rows come from, for a person: the first few by file and line."""
    rows = store.origins("train").take(sorted(positions)[:PLACES])
    found = [f"{row['source']}:{row['line']}" for row in rows.select(["source", "line"]).to_pylist()]
    more = len(positions) - len(found)
    return ", ".join(found) + (f" and {more} more rows" if more else "")


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def _scores(job: Job, exchange: Exchange, split: str, clock: Clock, keep: dict[str, Ragged]) -> dict[str, float]:
    with clock.section("evaluate"):
        return evaluate(exchange, job.task, job.store, split, pad_id=job.pad_id, precision=job.precision, keep=keep)


def _evaluate(
    job: Job, exchange: Exchange, state: checkpoint.State, reporter: Reporter, clock: Clock, best: dict[str, Ragged]
) -> checkpoint.State:
    """The state with the best score so far; the outcomes that have it are in `best`."""
    kept: dict[str, Ragged] = {}
    scores = _scores(job, exchange, "valid", clock, kept)
    headline = metric_for(job.task.output).headline
    score = scores[headline]
    reporter.event("evaluated", split="valid", update=state.update, scores=scores)
    if state.best_score is None or score > state.best_score:
        state = replace(state, best_update=state.update, best_score=score)
        best |= kept
    reporter.score({"update": state.update, "percent": 100 * state.update / job.order.updates, "score": score})
    return state


def _save(
    saver: Saver, exchange: Exchange, optimizer: "torch.optim.Optimizer", state: checkpoint.State, clock: Clock
) -> None:
    def take() -> int:
        saver.save(exchange.module, optimizer, state)
        return state.update

    with clock.section("checkpoint"), sharded.whole(optimizer):
        ranks.decided(exchange.watch, take)


def _end(
    job: Job,
    exchange: Exchange,
    saver: Saver,
    state: checkpoint.State,
    totals: Totals,
    reporter: Reporter,
    clock: Clock,
    outcomes: dict[str, Ragged],
) -> Outcome:
    """Restore the best weights, score them on the test rows (a finished run only), and report the run's sums."""
    finished, headline = state.update == job.order.updates, metric_for(job.task.output).headline

    def flush() -> int:
        saver.flush(copied=finished)
        return state.update

    with clock.section("checkpoint"):
        ranks.decided(exchange.watch, flush)
        best = _best(saver.folder, exchange, state, reporter)
    if best not in (NONE, state.update):
        _loaded(exchange, checkpoint.path_of(saver.folder, best))
    score = state.best_score if best != NONE else None
    if finished and best == NONE:
        best = state.update
    if finished and score is None and job.validates:  # the best weights are lost: the last ones have their own score
        found = _scores(job, exchange, "valid", clock, outcomes)
        reporter.event("evaluated", split="valid", update=best, scores=found)
        score = found[headline]
    scores = {"valid": {headline: score or 0.0}} if job.validates else {}
    if finished:
        scores["test"] = _scores(job, exchange, "test", clock, outcomes)
        reporter.event("evaluated", split="test", update=best, scores=scores["test"])
    sums = totals.over_workers(exchange)
    reporter.event(
        "trained",
        updates=state.update,
        best_update=best,
        order_digest=state.ledger,
        rows_seen=sums.rows_seen,
        real_tokens=sums.real_tokens,
        padded_tokens=sums.padded_tokens,
        passes_per_update=round(sums.passes / exchange.world / max(1, totals.updates), 3),
        seconds={name: round(value, 3) for name, value in clock.seconds.items()},
        finished=finished,
        **({} if state.scale is None else {"loss_scale": state.scale.value}),
    )
    return Outcome(finished, best, state.ledger, scores, outcomes)
