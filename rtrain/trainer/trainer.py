"""Training loop of a run: steps, evaluation, checkpoints. It reports to a small Reporter, and does not depend on
Ray."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rtrain.checkpoint import format as checkpoint_format, loss_scale
from rtrain.checkpoint.remote_copy import RemoteCopy
from rtrain.checkpoint.saver import CheckpointSaver
from rtrain.config import Recipe
from rtrain.core.ragged import Head, RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder, chain_digest
from rtrain.data.store.store import Store
from rtrain.data.stream import WorkerBatch
from rtrain.metrics.registry import get_metric
from rtrain.models import device, dropout
from rtrain.parallel import collectives, dtensor_utils, gradient_noise
from rtrain.parallel.base import Strategy
from rtrain.tasks import base
from rtrain.trainer import best_checkpoint, losses, optimizers, rung_predictions, step, step_timing
from rtrain.trainer.evaluate import evaluate, gather_row_results
from rtrain.trainer.profiler import StepProfiler

if TYPE_CHECKING:
    import torch

INITIAL_LEDGER = bytes(32)
"""The ledger before the first step."""
NO_STEP = -1
"""Code for 'no step' in messages between ranks."""


@dataclass(frozen=True)
class Cadence:
    """When to evaluate and save, by the number of finished steps. Pure."""

    total_steps: int
    """Steps of the whole run."""
    end_step: int
    """Step at which this attempt ends. If that is before the run's end there is no evaluation for it: the best weights
    of a run must not depend on where it paused."""
    evaluate_every: int
    save_every: int | None

    def due_actions(self, steps_done: int) -> frozenset[str]:
        should_evaluate = steps_done == self.total_steps or steps_done % self.evaluate_every == 0
        should_save = (
            should_evaluate
            or steps_done == self.end_step
            or (self.save_every is not None and steps_done % self.save_every == 0)
        )
        return frozenset(name for name, is_due in (("evaluate", should_evaluate), ("save", should_save)) if is_due)


@dataclass
class Totals:
    rows_seen: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0
    steps: int = 0

    def add(self, step_result: step.StepResult) -> None:
        self.rows_seen += step_result.rows
        self.real_tokens += step_result.real_tokens
        self.padded_tokens += step_result.padded_tokens
        self.micro_batches += step_result.micro_batches
        self.steps += 1

    def sum_over_workers(self, strategy: Strategy) -> "Totals":
        """Sums over all workers, `steps` included. Called on every rank."""
        import torch

        # On the CPU: the process group has a backend for CPU tensors on every device.
        sums = strategy.sum_over_replicas(torch.tensor(astuple(self), dtype=torch.int64)).tolist()
        return Totals(**{data_field.name: value for data_field, value in zip(fields(self), sums, strict=True)})


@dataclass
class Clock:
    """Seconds of this attempt, by section."""

    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def train_seconds(self) -> float:
        """Seconds of steps, without evaluation, checkpoints and waiting for rows."""
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
        """Report an event. Called on every rank; rank 0's is kept."""
        ...

    def score(self, metrics: dict[str, Any]) -> None:
        """Report an evaluation. Called on every rank at the same step."""
        ...

    def stop_requested(self) -> bool:
        """Whether to stop after the coming step, with a checkpoint. Called on every rank."""
        ...


@dataclass(frozen=True)
class TrainingContext:
    """One attempt of a run, as every rank sees it."""

    recipe: Recipe
    run: Run
    store: Store
    task: base.Task
    loss: step.Loss
    order: RowOrder
    pad_id: int
    precision: str
    end_step: int
    """Step after which this attempt ends; `order.num_steps` for a whole run."""
    is_rung: bool = False
    """Keep the predictions on the validation rows at `end_step` (`rtrain.trainer.rung_predictions`), for a search."""
    remote_copy: RemoteCopy | None = None
    random_step_interval: int = gradient_noise.DEFAULT_INTERVAL
    """Interval of steps with rows in random order (`rtrain.parallel.gradient_noise`); 0 for none."""
    measures_noise: bool = False
    """Whether these steps measure the gradient noise."""
    profile_path: Path | None = None
    """File for this worker's spans of each step (`rtrain.trainer.profiler`)."""
    selected_head: Head | None = None
    """The store's head with the choices made on the validation rows, once they are known."""

    @property
    def head(self) -> Head:
        return self.selected_head or self.store.manifest.head

    @property
    def run_digest(self) -> str:
        """Digest of the rows of all steps and of the settings that change the weights, also stored in checkpoints."""
        return f"{self.order.order_digest}-{self.recipe.recipe_digest()}"

    @property
    def has_validation_rows(self) -> bool:
        """Whether there are validation rows. Without them the last weights are the run's."""
        return self.store.num_rows("valid") > 0


@dataclass(frozen=True)
class TrainingResult:
    is_finished: bool
    """False for an attempt that ended before the run's last step."""
    best_step: int
    ledger: str
    scores: dict[str, dict[str, float]]
    """Scores of the best checkpoint by split: `valid` (the headline alone) if there are validation rows, and `test` if
    the run is finished."""
    row_results: dict[str, RaggedArray] = field(default_factory=dict, compare=False)
    """Row results of a finished run's best weights by split: of the test rows, and of the validation rows if this
    attempt computed those weights."""


BatchSource = Callable[[int, int], Iterator[WorkerBatch]]
"""(first, last) -> this worker's steps from `first` up to, but not including, `last`."""


def train(
    context: TrainingContext, strategy: Strategy, batches: BatchSource, reporter: Reporter, clock: Clock
) -> TrainingResult:
    """Train from the newest checkpoint to `context.end_step`. At the end of a finished run the model holds the weights
    of the best checkpoint."""
    with CheckpointSaver(
        context.run.checkpoints,
        context.recipe.train.keep_checkpoints,
        context.remote_copy,
        reporter.event,
        strategy.watchdog,
    ) as saver:
        return _TrainingLoop(context, strategy, reporter, clock, saver).run(batches)


class _TrainingLoop(step.Observer):
    """One attempt of a run on one worker."""

    def __init__(
        self, context: TrainingContext, strategy: Strategy, reporter: Reporter, clock: Clock, saver: CheckpointSaver
    ):
        self._context, self._strategy, self._reporter, self._clock, self._saver = (
            context,
            strategy,
            reporter,
            clock,
            saver,
        )
        self._optimizer = optimizers.build_run_optimizer(strategy, context.recipe)
        state = self._restore()
        self._state = replace(state, scale=state.scale or loss_scale.initial_scale(context.precision))
        self._totals = Totals()
        self._row_results: dict[str, RaggedArray] = {}
        """Row results by split, of the best weights of this attempt."""
        self._evaluations = best_checkpoint.read_evaluations(
            context.run.events("evaluated"), self._headline, state.step
        )

    def stop_requested(self) -> bool:
        return self._reporter.stop_requested()

    def run(self, batches: BatchSource) -> TrainingResult:
        context, strategy = self._context, self._strategy
        cadence = Cadence(
            total_steps=context.order.num_steps,
            end_step=context.end_step,
            evaluate_every=context.recipe.train.evaluate_every or context.order.steps_per_epoch,
            save_every=context.recipe.train.save_every,
        )
        event_data = {"workers": strategy.num_workers, "precision": context.precision, "lr": context.recipe.peak_lr}
        event_data |= {
            "device": device.device_name(dtensor_utils.module_device(strategy.module)),
            "global_batch_size": context.recipe.global_batch_size,
        }
        self._reporter.event("started", step=self._state.step, total_steps=context.order.num_steps, **event_data)
        strategy.module.train()
        step.warm_up(strategy, context.loss, context.pad_id, context.precision)
        stream = batches(self._state.step, context.end_step)
        self._profiler = StepProfiler(strategy, context.profile_path)
        while self._state.step < context.end_step:
            step_result = self._train_batch(self._next_batch(stream))
            steps_done = self._state.step
            if steps_done % context.recipe.train.log_every == 0 or steps_done == context.end_step:
                self._report_progress(step_result)
            due_actions = cadence.due_actions(steps_done) | ({"save"} if step_result.stop_requested else set())
            row_results: dict[str, RaggedArray] = {}
            with strategy.timeline.span(step_timing.EVALUATE):
                if "evaluate" in due_actions and context.has_validation_rows:
                    self._evaluate(row_results)
                if context.is_rung and steps_done == context.end_step and context.has_validation_rows:
                    self._save_rung(row_results)
            if "save" in due_actions:
                self._save()
            self._profiler.end_step(steps_done - 1, step_result)
            if step_result.stop_requested:
                break
        return self._finish()

    # ---------------------------------------------------------------------------------------------------- one step

    def _next_batch(self, stream: Iterator[WorkerBatch]) -> WorkerBatch:
        section = "input_wait" if "first_batch" in self._clock.seconds else "first_batch"
        with self._clock.section(section), self._strategy.timeline.span(step_timing.GET_BATCH):
            return next(stream)

    def _train_batch(self, batch: WorkerBatch) -> step.StepResult:
        """Train one step, with decreasing loss scales while its gradient is infinite. Each row counts once, with its
        usual dropout."""
        context, scale = self._context, self._state.scale
        while True:
            scale_value = None if scale is None else scale.value
            with self._clock.section("train"):
                step_result = train_step(
                    context, self._strategy, self._optimizer, batch, observer=self, scale=scale_value
                )
            scale = None if scale is None else scale.next_scale(is_finite=not step_result.is_skipped)
            if scale is None or not step_result.is_skipped:
                break
            self._reporter.event("step_skipped", step=batch.step, scale=scale.value)
            if scale.is_exhausted:
                raise step.NonFinite(
                    f"{_describe_step(context, batch.step)}: the gradient is not finite with any of "
                    f"{scale.overflow_steps} loss "
                    f"scales down to {2 * scale.value:g}: lower optim.lr, set train.precision=fp32, or set "
                    "optim.max_grad_norm"
                )
        self._totals.add(step_result)
        if step_result.noise_measurement is not None:
            self._reporter.event(
                gradient_noise.EVENT_KIND, step=batch.step + 1, **asdict(step_result.noise_measurement)
            )
        ledger = chain_digest(bytes.fromhex(self._state.ledger), batch.digest).hex()
        self._state = replace(self._state, scale=scale, step=batch.step + 1, ledger=ledger)
        return step_result

    def _report_progress(self, step_result: step.StepResult) -> None:
        totals, state = self._totals.sum_over_workers(self._strategy), self._state
        self._reporter.event(
            "progress",
            step=state.step,
            total_steps=self._context.order.num_steps,
            loss=round(step_result.loss, 5),
            ledger=state.ledger,
            rows=totals.rows_seen,
            real_tokens=totals.real_tokens,
            padded_tokens=totals.padded_tokens,
            train_s=self._clock.train_seconds,
        )

    # ------------------------------------------------------------------------------------------------------ evaluation

    def _evaluate(self, row_results: dict[str, RaggedArray]) -> None:
        """Score the validation rows into `row_results`; update the state if the score is the best."""
        evaluation, is_best = self._validate(self._state.step, row_results)
        if is_best:
            self._state = best_checkpoint.with_best(evaluation, self._state)
            self._row_results |= row_results
        percent = 100 * evaluation.step / self._context.order.num_steps
        self._reporter.score({"step": evaluation.step, "percent": percent, "score": evaluation.score})

    def _validate(
        self, step_number: int, row_results: dict[str, RaggedArray]
    ) -> tuple[best_checkpoint.Evaluation, bool]:
        """Score the validation rows by the weights of `step_number`, log the scores, and compare them with the best.

        `row_results` receives the row results. Rank 0 alone computes the loss and compares: on another machine the sum
        over the rows may differ in its last bit, and the ranks must agree on the best.
        """
        context, scores = self._context, self._score_split("valid", row_results)
        evaluation = best_checkpoint.Evaluation(step_number, scores[self._headline])

        def compare() -> int:
            nonlocal evaluation
            if valid_results := row_results.get("valid"):
                loss = best_checkpoint.mean_row_loss(context.task, valid_results, context.store)
                evaluation = evaluation._replace(loss=loss)
            return best_checkpoint.is_better(evaluation, best_checkpoint.best_in(self._state))

        is_best = collectives.decide_on_rank_zero(self._strategy.watchdog, compare)
        event_data = {"scores": scores, "loss": evaluation.loss, "train_s": self._clock.train_seconds}
        self._reporter.event("evaluated", split="valid", step=step_number, **event_data)
        self._evaluations[step_number] = evaluation
        return evaluation, bool(is_best)

    def _save_rung(self, row_results: dict[str, RaggedArray]) -> None:
        """Keep the predictions on the validation rows before the checkpoint, so that a rung's checkpoint always has
        them."""
        context, strategy, step_number = self._context, self._strategy, self._state.step
        if (valid_results := row_results.get("valid")) is None:
            with self._clock.section("evaluate"):
                valid_results = gather_row_results(
                    strategy, context.task, context.store, "valid", pad_id=context.pad_id, precision=context.precision
                )
        collectives.decide_on_rank_zero(
            strategy.watchdog, lambda: rung_predictions.write_rung(context.run, step_number, valid_results)
        )
        self._reporter.event("rung", step=step_number)

    def _score_split(self, split: str, row_results: dict[str, RaggedArray]) -> dict[str, float]:
        context, strategy = self._context, self._strategy
        with self._clock.section("evaluate"):
            return evaluate(
                strategy,
                context.task,
                context.store,
                split,
                pad_id=context.pad_id,
                precision=context.precision,
                results_by_split=row_results,
            )

    @property
    def _headline(self) -> str:
        return get_metric(self._context.task.output).headline

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def _restore(self) -> checkpoint_format.CheckpointState:
        """Select the checkpoint on rank 0; the other ranks follow, so that all start from the same one."""
        folder, run_digest = self._saver.folder, self._context.run_digest

        def select() -> int:
            quarantined_before = checkpoint_format.list_quarantined(folder)
            selected = self._saver.select_checkpoint(run_digest)
            for name, reason in checkpoint_format.list_quarantined(folder).items():
                if name not in quarantined_before:
                    self._reporter.event("quarantined", checkpoint=name, reason=reason)
            return NO_STEP if selected is None else selected

        step_number = collectives.decide_on_rank_zero(self._strategy.watchdog, select)
        if step_number == NO_STEP:
            return checkpoint_format.CheckpointState(
                step=0, ledger=INITIAL_LEDGER.hex(), best_step=None, best_score=None, run_id=run_digest
            )
        state = self._load(step_number, self._optimizer)
        # The best checkpoint is loaded at the end, so it must verify too; otherwise the search for the best restarts
        # here.
        if self._verify_best(state) == NO_STEP:
            return best_checkpoint.with_best(None, state)
        return state

    def _load(
        self, step_number: int, optimizer: "torch.optim.Optimizer | None" = None
    ) -> checkpoint_format.CheckpointState:
        """Load a checkpoint into the model on every rank. Each rank reads it itself; some are slower than others."""
        strategy, path = self._strategy, checkpoint_format.checkpoint_path(self._saver.folder, step_number)

        @strategy.watchdog.extended_timeout()
        def load() -> checkpoint_format.CheckpointState:
            return checkpoint_format.load_checkpoint(path, strategy.module, optimizer)

        return collectives.run_on_all_ranks(strategy.watchdog, load)

    def _verify_best(self, state: checkpoint_format.CheckpointState) -> int:
        """Step of the best checkpoint, or NO_STEP. Rank 0 verifies it, and reports a lost one."""
        step_number, folder = state.best_step, self._saver.folder
        if step_number is None:
            return NO_STEP
        if step_number == state.step:  # verified when it was loaded, or the current weights
            return step_number
        if collectives.decide_on_rank_zero(
            self._strategy.watchdog, lambda: checkpoint_format.verify_or_quarantine(folder, step_number, state.run_id)
        ):
            return step_number
        self._reporter.event("best_lost", step=step_number)
        return NO_STEP

    def _save(self) -> None:
        strategy = self._strategy
        with self._clock.section("checkpoint"), strategy.timeline.span(step_timing.CHECKPOINT):
            self._flush()  # no worker waits inside a collective for pending writes
            with strategy.watchdog.extended_timeout():
                self._saver.save(strategy.module, self._optimizer, self._state, strategy.gather_full_tensors)

    def _flush(self) -> None:
        def flush() -> int:
            self._saver.flush()
            return self._state.step

        collectives.decide_on_rank_zero(self._strategy.watchdog, flush)

    # ---------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> TrainingResult:
        """Restore the best weights and score them on the test rows (finished runs only); report the totals."""
        context, state = self._context, self._state
        is_finished = state.step == context.order.num_steps
        with self._clock.section("checkpoint"):
            self._flush()
            if not is_finished:  # immediately: the shutdown of the workers takes seconds and may come too late
                self._reporter.event("saved", step=state.step)
            # Only a finished run uses its best weights; a rung or a preempted attempt reads and hashes nothing for
            # them.
            step_number = (
                self._verify_best(state) if is_finished else NO_STEP if state.best_step is None else state.best_step
            )
        if is_finished and step_number not in (NO_STEP, state.step):
            self._load(step_number)
        best_evaluation = best_checkpoint.best_in(state) if step_number != NO_STEP else None
        if is_finished and step_number == NO_STEP:
            step_number = state.step
        if (
            is_finished and best_evaluation is None and context.has_validation_rows
        ):  # the best weights are lost: score the last ones
            best_evaluation, _ = self._validate(step_number, self._row_results)
        scores = (
            {"valid": {self._headline: best_evaluation.score if best_evaluation else 0.0}}
            if context.has_validation_rows
            else {}
        )
        if is_finished and best_evaluation is not None:
            self._reporter.event(
                "best", headline=self._headline, **best_checkpoint.best_event(best_evaluation, self._evaluations)
            )
        if is_finished:
            scores["test"] = self._score_split("test", self._row_results)
            self._reporter.event("evaluated", split="test", step=step_number, scores=scores["test"])
        self._report_totals(is_finished, step_number)
        return TrainingResult(is_finished, step_number, state.ledger, scores, self._row_results)

    def _report_totals(self, is_finished: bool, best_step: int) -> None:
        strategy, state = self._strategy, self._state
        totals = self._totals.sum_over_workers(strategy)
        self._reporter.event(
            "trained",
            steps=state.step,
            best_step=best_step,
            order_digest=state.ledger,
            rows_seen=totals.rows_seen,
            real_tokens=totals.real_tokens,
            padded_tokens=totals.padded_tokens,
            micro_batches_per_step=round(totals.micro_batches / strategy.num_replicas / max(1, self._totals.steps), 3),
            seconds={name: round(value, 3) for name, value in self._clock.seconds.items()},
            finished=is_finished,
            gradient_sync=strategy.comm_cost(),
            stages=self._profiler.event_fields(),
            **({} if state.scale is None else {"loss_scale": state.scale.value}),
        )


def train_step(
    context: TrainingContext,
    strategy: Strategy,
    optimizer: "torch.optim.Optimizer",
    batch: WorkerBatch,
    *,
    run_step: step.RunStep | None = None,
    observer: step.Observer | None = None,
    scale: float | None = None,
) -> step.StepResult:
    """Train one step at its place in the run: its learning rate, dropout and rows.

    Args:
        run_step: A replacement for `step.run_step`.
        observer: Passed to `run_step`, as is `scale`.
    """
    import torch

    epoch = batch.step // context.order.steps_per_epoch
    seed, head = context.recipe.train.seed, context.store.manifest.head
    with strategy.timeline.span(step_timing.GET_BATCH):
        micro_batches = [context.task.prepare(tokens, head, seed, epoch) for tokens in batch.micro_batches]
        positions = context.order.positions(batch.step)
        expected_row_sum = step.sum_row_ids(context.store.column("train", "row_id")[positions])
        planned_counts = (
            losses.plan_target_counts(context.loss, context.store, positions) if strategy.num_replicas > 1 else None
        )
    optimizers.set_learning_rate(
        optimizer, optimizers.learning_rate(context.recipe, batch.step, context.order.num_steps)
    )
    torch.manual_seed(dropout.derive_seed(seed, batch.step, strategy.replica_rank))
    try:
        return (run_step or step.run_step)(
            strategy,
            optimizer,
            context.loss,
            micro_batches,
            pad_id=context.pad_id,
            precision=context.precision,
            scale=scale,
            max_grad_norm=context.recipe.optim.max_grad_norm,
            expected_row_sum=expected_row_sum,
            observer=observer,
            measure_noise=context.measures_noise
            and gradient_noise.has_random_rows(batch.step, context.random_step_interval),
            expected_targets=planned_counts,
        )
    except (step.NonFinite, step.WrongRows) as error:
        raise type(error)(f"{_describe_step(context, batch.step)}: {error}") from None


def _describe_step(context: TrainingContext, step_number: int) -> str:
    return f"step {step_number} ({context.store.describe_rows('train', context.order.positions(step_number))})"
