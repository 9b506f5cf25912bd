"""Training loop of a run: steps, evaluation, checkpoints. It reports to a small Reporter, and does not depend on
Ray."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.remote_copy import RemoteCopy
from rtrain.checkpoint.saver import CheckpointSaver
from rtrain.config import Recipe
from rtrain.core.ragged import Head, RaggedArray, TokenBatch
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder, chain_digest
from rtrain.data.store.store import Store
from rtrain.data.stream import WorkerBatch
from rtrain.metrics.collapse import find_collapsed_answers
from rtrain.models import device, dropout
from rtrain.parallel import collectives, dtensor_utils, gradient_noise, profiler
from rtrain.parallel.base import Strategy
from rtrain.parallel.profiler import StepProfiler
from rtrain.tasks import base
from rtrain.trainer import evaluate, losses, optimizers, selection, step
from rtrain.trainer.evaluate import Evaluation

if TYPE_CHECKING:
    import torch

INITIAL_LEDGER = bytes(32)
"""The ledger before the first step."""
NO_STEP = -1
"""Code for 'no step' in messages between ranks."""
TOTALS = ("rows_seen", "real_tokens", "padded_tokens", "micro_batches")
"""Totals of an attempt, summed over its workers."""


@dataclass(frozen=True)
class Cadence:
    """When to evaluate and save, by the number of finished steps. Pure."""

    total_steps: int
    """Steps of the whole run."""
    end_step: int
    """Step at which this attempt ends. Pausing here saves, but adds no evaluation: the best weights must not depend on
    where a run paused."""
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
        """Report an event. Rank 0's is kept; the other ranks may call it too."""
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
    """Whether the attempt ends at a rung (a step where a search compares trials); if so, keep the predictions for the
    validation rows."""
    remote_copy: RemoteCopy | None = None
    random_step_interval: int = gradient_noise.DEFAULT_INTERVAL
    """Interval of steps with rows in random order (`rtrain.parallel.gradient_noise`); 0 for none."""
    measures_noise: bool = False
    """Whether these steps measure the gradient noise."""
    profile_path: Path | None = None
    """File for this worker's spans of each step (`rtrain.parallel.profiler`)."""
    selected_head: Head | None = None
    """The store's head with the choices made on the validation rows, once they are known."""

    @property
    def head(self) -> Head:
        return self.selected_head or self.store.manifest.head

    @property
    def run_id(self) -> str:
        """Digests of the planned rows of all steps and of the settings that change the weights. A checkpoint stores it,
        and only a run with the same value continues from it."""
        return f"{self.order.planned_digest}-{self.recipe.recipe_digest()}"

    @property
    def has_validation_rows(self) -> bool:
        """Whether there are validation rows. Without them the last weights are the run's."""
        return self.store.num_rows("valid") > 0


@dataclass(frozen=True)
class TrainingResult:
    is_finished: bool
    """False for an attempt that ended before the run's last step, unless `train.patience` ended the run."""
    best_step: int | None
    """None for an attempt that ended before the run's first evaluation."""
    ledger: str
    """Digest of the rows of the steps so far, in their order."""
    scores: dict[str, dict[str, float]]
    """Scores of the best checkpoint, or of the average, by split: `valid` (the score of `train.best_by` alone) if
    validation rows were evaluated, and `test` if the run is finished."""
    row_results: dict[str, RaggedArray] = field(default_factory=dict, compare=False)
    """Row results of a finished run's best weights by split: of the test rows, and of the validation rows if this
    attempt computed those weights."""
    averaged_steps: tuple[int, ...] = ()
    """Steps of the checkpoints whose mean the model holds (`train.average_best`); empty without an average."""


BatchSource = Callable[[int, int], Iterator[WorkerBatch]]
"""(first, last) -> this worker's steps from `first` up to, but not including, `last`."""


def train(
    context: TrainingContext, strategy: Strategy, batches: BatchSource, reporter: Reporter, clock: Clock
) -> TrainingResult:
    """Train from the newest checkpoint to `context.end_step`. At the end of a finished run the model holds the weights
    of the best checkpoint."""
    return Trainer(context, strategy, reporter, clock).fit(batches)


class Trainer(step.StepRunner, step.Observer):
    """One attempt of a run on one worker. All methods are collective: call them on every worker."""

    def __init__(self, context: TrainingContext, strategy: Strategy, reporter: Reporter, clock: Clock):
        super().__init__(
            strategy,
            optimizers.build_run_optimizer(strategy, context.recipe),
            context.loss,
            pad_id=context.pad_id,
            precision=context.precision,
            max_grad_norm=context.recipe.optim.max_grad_norm,
            observer=self,
        )
        self.context, self.reporter, self.clock = context, reporter, clock
        self.state = checkpoint_format.CheckpointState(
            step=0, ledger=INITIAL_LEDGER.hex(), best_step=None, best_score=None, run_id=context.run_id
        )
        self._evaluate_every = context.recipe.train.evaluate_every or context.order.steps_per_epoch
        self._totals = Counter[str]()
        self._steps_trained = 0
        """Steps of this attempt, the same on every worker."""
        self._evaluations: dict[int, Evaluation] = {}
        self._row_results: dict[str, RaggedArray] = {}
        """Row results by split, of the best weights of this attempt."""

    def stop_requested(self) -> bool:
        return self.reporter.stop_requested()

    def fit(self, batches: BatchSource) -> TrainingResult:
        context, strategy, recipe = self.context, self.strategy, self.context.recipe
        cadence = Cadence(
            total_steps=context.order.num_steps,
            end_step=context.end_step,
            evaluate_every=self._evaluate_every,
            save_every=recipe.train.save_every,
        )
        saver = CheckpointSaver(
            *(context.run.checkpoints, recipe.train.keep_checkpoints, context.remote_copy),
            *(self.reporter.event, strategy.watchdog),
        )
        with saver as self._saver:
            self._restore()
            self.reporter.event(
                "started",
                step=self.state.step,
                total_steps=context.order.num_steps,
                workers=strategy.num_workers,
                precision=context.precision,
                lr=recipe.peak_lr,
                device=device.device_name(dtensor_utils.module_device(strategy.module)),
                global_batch_size=recipe.global_batch_size,
            )
            strategy.module.train()
            self.warm_up()
            stream = batches(self.state.step, context.end_step)
            profile = StepProfiler(
                strategy.timeline, dtensor_utils.module_device(strategy.module), context.profile_path
            )
            while self.state.step < context.end_step and not self._is_patience_exhausted:
                with (
                    self.clock.section("input_wait" if "first_batch" in self.clock.seconds else "first_batch"),
                    strategy.timeline.span(profiler.GET_BATCH),
                ):
                    batch = next(stream)
                step_result = self.train_step(batch)
                steps_done = self.state.step
                if steps_done % recipe.train.log_every == 0 or steps_done == context.end_step:
                    self._report_progress(step_result)
                due_actions = cadence.due_actions(steps_done)
                with strategy.timeline.span(profiler.EVALUATE):
                    row_results = None
                    if "evaluate" in due_actions and context.has_validation_rows:
                        row_results = self.evaluate()
                    if context.is_rung and steps_done == context.end_step and context.has_validation_rows:
                        self._save_rung(row_results)
                if "save" in due_actions or step_result.stop_requested:
                    self.save()
                profile.end_step(
                    steps_done - 1,
                    rows=step_result.rows,
                    micro_batches=step_result.micro_batches,
                    real_tokens=step_result.real_tokens,
                )
                if step_result.stop_requested:
                    break
            return self._finish(profile)

    @property
    def _is_patience_exhausted(self) -> bool:
        return selection.is_patience_exhausted(self.state, self.context.recipe.train.patience, self._evaluate_every)

    def train_step(self, batch: WorkerBatch) -> step.StepResult:
        """Train one step at its place in the run: its learning rate, dropout and rows. fp16 only: on overflow the step
        is retried with a smaller loss scale and the same dropout seed; rows count once."""
        import torch

        context, step_number, scale = self.context, batch.step, self.state.scale
        with self.clock.section("train"):
            micro_batches, plan = self._prepare(batch)
            rate = optimizers.learning_rate(context.recipe, step_number, context.order.num_steps)
            optimizers.set_learning_rate(self.optimizer, rate)
            while True:
                seed = dropout.derive_seed(context.recipe.train.seed, step_number, self.strategy.replica_rank)
                torch.manual_seed(seed)
                try:
                    step_result = self.run_step(micro_batches, scale=None if scale is None else scale.value, **plan)
                except (step.NonFinite, step.WrongRows) as error:
                    raise type(error)(f"{self._describe_step(step_number)}: {error}") from None
                scale = None if scale is None else scale.next_scale(is_finite=not step_result.is_skipped)
                if scale is None or not step_result.is_skipped:
                    break
                self.reporter.event("step_skipped", step=step_number, scale=scale.value)
                if scale.is_exhausted:
                    raise step.NonFinite(
                        f"{self._describe_step(step_number)}: the gradient is not finite with any of "
                        f"{scale.overflow_steps} loss scales down to {2 * scale.value:g}: {step.NON_FINITE_FIX}"
                    )
        self._totals.update(
            rows_seen=step_result.rows,
            real_tokens=step_result.real_tokens,
            padded_tokens=step_result.padded_tokens,
            micro_batches=step_result.micro_batches,
        )
        self._steps_trained += 1
        if (measurement := step_result.noise_measurement) is not None:
            self.reporter.event(gradient_noise.EVENT_KIND, step=step_number + 1, **asdict(measurement))
        ledger = chain_digest(bytes.fromhex(self.state.ledger), batch.digest).hex()
        self.state = replace(self.state, scale=scale, step=step_number + 1, ledger=ledger)
        return step_result

    def _prepare(self, batch: WorkerBatch) -> tuple[list[TokenBatch], dict[str, Any]]:
        """Micro-batches with this epoch's masks, and keyword arguments of `run_step`: expected row sum, target counts,
        whether to measure noise."""
        context, store = self.context, self.context.store
        with self.strategy.timeline.span(profiler.GET_BATCH):
            positions = context.order.positions(batch.step)
            seed, epoch = context.recipe.train.seed, batch.step // context.order.steps_per_epoch
            micro_batches = [
                context.task.prepare(tokens, store.manifest.head, seed, epoch) for tokens in batch.micro_batches
            ]
            row_sum = step.sum_row_ids(store.column("train", "row_id")[positions])
            is_planned = self.strategy.num_replicas > 1
            targets = losses.plan_target_counts(self.loss, store, positions) if is_planned else None
        has_random_rows = gradient_noise.has_random_rows(batch.step, context.random_step_interval)
        measure_noise = context.measures_noise and has_random_rows
        plan = {"expected_row_sum": row_sum, "expected_targets": targets, "measure_noise": measure_noise}
        return micro_batches, plan

    def _describe_step(self, step_number: int) -> str:
        """Name a step (from 0) and its rows for a person, who counts steps from 1, as events do."""
        rows = self.context.store.describe_rows("train", self.context.order.positions(step_number))
        return f"step {step_number + 1} ({rows})"

    def _report_progress(self, step_result: step.StepResult) -> None:
        totals, state = self._sum_totals(), self.state
        self.reporter.event(
            "progress",
            step=state.step,
            total_steps=self.context.order.num_steps,
            loss=round(step_result.loss, 5),
            ledger=state.ledger,
            rows=totals["rows_seen"],
            real_tokens=totals["real_tokens"],
            padded_tokens=totals["padded_tokens"],
            train_s=self.clock.train_seconds,
        )

    def _sum_totals(self) -> dict[str, int]:
        """Totals over all workers. Called on every rank."""
        import torch

        # A CPU tensor works on GPUs too: the group always has a CPU backend.
        local_totals = torch.tensor([self._totals[name] for name in TOTALS], dtype=torch.int64)
        return dict(zip(TOTALS, self.strategy.sum_over_replicas(local_totals).tolist(), strict=True))

    # ------------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self) -> RaggedArray:
        """Score the validation rows, log the scores, and update the state if the weights are the best so far. Return
        the row results."""
        row_results = self._gather_row_results("valid")
        evaluation, is_best = self._compare_with_best(self.state.step, row_results)
        if is_best:
            self.state = evaluate.with_best(evaluation, self.state)
            self._row_results["valid"] = row_results
        if (num_kept := self.context.recipe.train.keep_best) > 1:
            self.state = evaluate.with_kept(evaluation, self.state, num_kept)
        percent = 100 * evaluation.step / self.context.order.num_steps
        self.reporter.score({"step": evaluation.step, "percent": percent, "score": evaluation.score})
        return row_results

    def _compare_with_best(
        self, step_number: int, row_results: RaggedArray, **event_fields: Any
    ) -> tuple[Evaluation, bool]:
        """Log the scores of the weights of `step_number` on the validation rows, and compare them with the best.

        Rank 0 alone computes the loss and compares: on another machine the sum over the rows may differ in its last
        bit, and the ranks must agree on the best.
        """
        context, scores = self.context, self._score("valid", row_results)
        evaluation, collapsed_answers = Evaluation(step_number, 0.0), list[dict[str, Any]]()

        def compare() -> int:
            nonlocal evaluation, scores, collapsed_answers
            task, head = context.task, context.store.manifest.head
            report = task.explain_rows(row_results, context.store.targets("valid"), head)
            loss = evaluate.mean_loss(report)
            scores = selection.add_score(context.recipe, scores, loss, row_results, context.store)
            evaluation = Evaluation(step_number, scores[self._score_name], loss)
            collapsed_answers = find_collapsed_answers(task.output, head, report.target, report.prediction)
            return evaluate.is_better(evaluation, evaluate.best_in(self.state))

        is_best = collectives.decide_on_rank_zero(self.strategy.watchdog, compare)
        evaluation = collectives.all_gather_object(evaluation)[0]
        event_data = {"scores": scores, "loss": evaluation.loss, "train_s": self.clock.train_seconds, **event_fields}
        self.reporter.event("evaluated", split="valid", step=step_number, **event_data)
        for answer in collapsed_answers:
            self.reporter.event("collapsed", split="valid", step=step_number, **answer)
        self._evaluations[step_number] = evaluation
        return evaluation, bool(is_best)

    def _save_rung(self, row_results: RaggedArray | None) -> None:
        """Keep the predictions on the validation rows before the checkpoint, so that a rung's checkpoint always has
        them. `row_results`: of the current weights, if they were just evaluated."""
        context, step_number = self.context, self.state.step
        if row_results is None:
            row_results = self._gather_row_results("valid")
        collectives.decide_on_rank_zero(
            self.strategy.watchdog, lambda: evaluate.write_rung(context.run, step_number, row_results)
        )
        self.reporter.event("rung", step=step_number)

    def _gather_row_results(self, split: str) -> RaggedArray:
        context = self.context
        with self.clock.section("evaluate"):
            return evaluate.gather_row_results(
                *(self.strategy, context.task, context.store, split), pad_id=self.pad_id, precision=self.precision
            )

    def _score(self, split: str, row_results: RaggedArray) -> dict[str, float]:
        with self.clock.section("evaluate"):
            return evaluate.score_rows(self.strategy, self.context.task, self.context.store, split, row_results)

    @property
    def _score_name(self) -> str:
        """Name of the score that selects the weights."""
        return selection.find_score_name(self.context.recipe.train.best_by, self.context.task.output)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Save a checkpoint; a thread writes it."""
        strategy = self.strategy
        with self.clock.section("checkpoint"), strategy.timeline.span(profiler.CHECKPOINT):
            # Wait for the writer here, with heartbeats, not inside the gather, which would time out.
            self._flush()
            with strategy.watchdog.extended_timeout():
                self._saver.save(strategy.module, self.optimizer, self.state, strategy.gather_full_tensors)

    def _flush(self) -> None:
        def flush() -> int:
            self._saver.flush()
            return self.state.step

        collectives.decide_on_rank_zero(self.strategy.watchdog, flush)

    def _restore(self) -> None:
        """Select the checkpoint on rank 0; the other ranks follow, so that all start from the same one."""
        folder, run_id = self._saver.folder, self.context.run_id

        def select() -> int:
            quarantined_before = checkpoint_format.list_quarantined(folder)
            selected = self._saver.select_checkpoint(run_id)
            for name, reason in checkpoint_format.list_quarantined(folder).items():
                if name not in quarantined_before:
                    self.reporter.event("quarantined", checkpoint=name, reason=reason)
            return NO_STEP if selected is None else selected

        step_number = collectives.decide_on_rank_zero(self.strategy.watchdog, select)
        if step_number != NO_STEP:
            self.state = self._load(step_number, optimizer=self.optimizer)
            # The best checkpoint is loaded at the end, so it must verify too; otherwise the search for the best
            # restarts here.
            if self._verify_best() is None:
                self.state = evaluate.with_best(None, self.state)
        self.state = replace(self.state, scale=self.state.scale or checkpoint_format.initial_scale(self.precision))
        logged_events = self.context.run.events("evaluated")
        self._evaluations = evaluate.read_evaluations(logged_events, self._score_name, self.state.step)

    def _load(self, *steps: int, optimizer: "torch.optim.Optimizer | None" = None) -> checkpoint_format.CheckpointState:
        """Load a checkpoint, or the mean of the weights of several, into the model on every rank. Each rank reads them
        itself; some are slower than others."""
        strategy = self.strategy
        paths = [checkpoint_format.checkpoint_path(self._saver.folder, step_number) for step_number in steps]

        @strategy.watchdog.extended_timeout()
        def load() -> checkpoint_format.CheckpointState:
            return checkpoint_format.load_checkpoint(paths[0], strategy.module, optimizer, average_with=paths[1:])

        return collectives.run_on_all_ranks(strategy.watchdog, load)

    def _verify_best(self) -> int | None:
        """Step of the best checkpoint, or None if none verifies. Rank 0 verifies it, and reports a lost checkpoint."""
        step_number = self.state.best_step
        return step_number if step_number is not None and self._verify(step_number) else None

    def _verify(self, step_number: int) -> bool:
        state, folder = self.state, self._saver.folder
        if step_number == state.step:  # verified when it was loaded, or the current weights
            return True
        if collectives.decide_on_rank_zero(
            self.strategy.watchdog, lambda: checkpoint_format.verify_or_quarantine(folder, step_number, state.run_id)
        ):
            return True
        self.reporter.event("best_lost", step=step_number)
        return False

    def _load_average(self) -> tuple[int, ...]:
        """Load the mean of the weights of the best checkpoints; return their steps. Empty, and nothing is loaded, if
        only one of them is left."""
        other_steps = [entry[0] for entry in self.state.best_evaluations if entry[0] != self.state.best_step]
        steps = (self.state.best_step or 0, *(number for number in other_steps if self._verify(number)))
        if len(steps) < 2:
            return ()
        self._load(*steps)
        return steps

    # ---------------------------------------------------------------------------------------------------------- the end

    def _finish(self, profile: StepProfiler) -> TrainingResult:
        """Restore the best weights and score them on the test rows (finished runs only); report the totals."""
        context, state = self.context, self.state
        is_finished = state.step == context.order.num_steps or self._is_patience_exhausted
        with self.clock.section("checkpoint"):
            self._flush()
            if not is_finished:  # immediately: the shutdown of the workers takes seconds and may come too late
                self.reporter.event("saved", step=state.step)
            # Only a finished run uses its best weights; a rung or a preempted attempt reads and hashes nothing for
            # them.
            best_step = self._verify_best() if is_finished else state.best_step
        best_evaluation = evaluate.best_in(state) if best_step is not None else None
        scores, averaged_steps = dict[str, dict[str, float]](), tuple[int, ...]()
        if is_finished:
            if state.step < context.order.num_steps:
                plan = {"total_steps": context.order.num_steps, "patience": context.recipe.train.patience}
                self.reporter.event("early_stop", step=state.step, best_step=best_step, **plan)
            if best_step is None:
                best_step = state.step
            elif best_step != state.step:
                self._load(best_step)
            if best_evaluation is None and context.has_validation_rows:  # the best weights are lost: score the last
                self._row_results["valid"] = self._gather_row_results("valid")
                best_evaluation, _ = self._compare_with_best(best_step, self._row_results["valid"])
            if best_evaluation is not None:
                event_data = evaluate.best_event(best_evaluation, self._evaluations)
                self.reporter.event("best", headline=self._score_name, **event_data)
        if best_evaluation is not None:
            scores["valid"] = {self._score_name: best_evaluation.score}
        if is_finished:
            if context.recipe.train.average_best and state.best_step is not None and best_step == state.best_step:
                averaged_steps = self._load_average()
            if averaged_steps:
                row_results = self._row_results["valid"] = self._gather_row_results("valid")
                choice = {"calibration": {"average_of": list(averaged_steps)}}
                average, _ = self._compare_with_best(averaged_steps[0], row_results, **choice)
                scores["valid"] = {self._score_name: average.score}
            self._row_results["test"] = self._gather_row_results("test")
            scores["test"] = self._score("test", self._row_results["test"])
            self.reporter.event("evaluated", split="test", step=best_step, scores=scores["test"])
        totals, strategy = self._sum_totals(), self.strategy
        self.reporter.event(
            "trained",
            steps=state.step,
            best_step=best_step,
            order_digest=state.ledger,  # of the rows trained on; `RowOrder.planned_digest` is another
            rows_seen=totals["rows_seen"],
            real_tokens=totals["real_tokens"],
            padded_tokens=totals["padded_tokens"],
            micro_batches_per_step=round(
                totals["micro_batches"] / strategy.num_replicas / max(1, self._steps_trained), 3
            ),
            seconds={name: round(value, 3) for name, value in self.clock.seconds.items()},
            finished=is_finished,
            gradient_sync=strategy.comm_cost(),
            stages=profile.event_fields(),
            **({} if state.scale is None else {"loss_scale": state.scale.value}),
        )
        return TrainingResult(is_finished, best_step, state.ledger, scores, self._row_results, averaged_steps)
