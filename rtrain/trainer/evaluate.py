"""Exact distributed metrics: every row of a split is counted once, on any number of workers.

Each worker reduces its rows to compact results. All workers gather all results and compute the same metric over the
whole split, so a metric need not be a sum over rows.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rtrain.checkpoint.format import CheckpointState
from rtrain.core import atomic_write
from rtrain.core.ragged import Floats, Ints, RaggedArray, TokenBatch, iter_batches
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.metrics.registry import get_metric
from rtrain.models import builder
from rtrain.parallel import collectives
from rtrain.tasks.base import RowReport, Task
from rtrain.trainer.step import forward, idle_micro_batch

if TYPE_CHECKING:
    from rtrain.parallel.base import Strategy

MAX_ROWS_PER_MICRO_BATCH = 64
MAX_TOKENS_PER_MICRO_BATCH = 1 << 13
"""Largest number of tokens in a micro-batch; rows with many windows go in smaller groups."""
SEED = 0
"""Random seed of a task in evaluations, the same for all compared models."""


def evaluate(
    strategy: "Strategy", task: Task, store: Store, split: str, *, pad_id: int, precision: str
) -> dict[str, float]:
    """Compute the scores over all rows of `split`, the same on every worker."""
    row_results = gather_row_results(strategy, task, store, split, pad_id=pad_id, precision=precision)
    return score_rows(strategy, task, store, split, row_results)


def score_rows(
    strategy: "Strategy", task: Task, store: Store, split: str, row_results: RaggedArray
) -> dict[str, float]:
    """Compute the scores of the results of all rows of `split`, the same on every worker."""

    @strategy.watchdog.extended_timeout()
    def score() -> dict[str, float]:
        return get_metric(task.output).main_scores(row_results, store.targets(split), store.manifest.head)

    return collectives.run_on_all_ranks(strategy.watchdog, score)


def gather_row_results(
    strategy: "Strategy", task: Task, store: Store, split: str, *, pad_id: int, precision: str
) -> RaggedArray:
    """Results of all rows of `split`, in index order, on every worker."""
    import torch

    network = strategy.module
    network.eval()
    builder.select_attention(network, training=False)
    # Rows of similar length share a micro-batch, and workers take alternate rows, so that they finish together.
    order = np.argsort(store.column(split, "length"), kind="stable")[strategy.replica_rank :: strategy.num_replicas]
    num_micro_batches = sum(1 for _ in split_micro_batches(store, split, order))

    with strategy.evaluation_micro_batches(num_micro_batches) as num_idle:
        num_started = num_finished = 0

        def compute_logits(tokens: TokenBatch) -> Floats:
            nonlocal num_started, num_finished
            strategy.watchdog.start_micro_batch()
            num_started += 1
            if strategy.any_failed(has_failed=False):
                raise collectives.OtherRankFailed(collectives.OTHER_RANK_FAILED)
            positions = None if tokens is idle_tokens else task.logit_positions(tokens, store.manifest.head)
            logits: Floats = forward(network, tokens, pad_id, precision, positions).float().cpu().numpy()
            num_finished += 1
            return logits

        def compute_results() -> RaggedArray:
            with torch.no_grad():
                try:
                    row_results = compute_row_results(task, store, split, order, compute_logits)
                    for _ in range(num_idle):
                        compute_logits(idle_tokens)
                    return row_results
                except Exception:
                    # The other ranks are about to start a collective with this one.
                    if num_started == num_finished < num_micro_batches + num_idle:
                        strategy.any_failed(has_failed=True)
                    raise

        idle_tokens = idle_micro_batch(pad_id)
        local_results = collectives.run_on_all_ranks(strategy.watchdog, compute_results)
    network.train()
    builder.select_attention(network, training=True)
    positions = np.concatenate(strategy.gather_over_replicas(order))
    counts = np.concatenate(strategy.gather_over_replicas(local_results.counts.astype(np.int64)))
    values = np.concatenate(strategy.gather_over_replicas(local_results.values))
    return restore_order(RaggedArray(values, counts.astype(np.int32)), positions, store.num_rows(split))


def compute_row_results(
    task: Task, store: Store, split: str, order: Ints, compute_logits: Callable[[TokenBatch], Floats]
) -> RaggedArray:
    """Results of the rows at the positions `order`, in that order. `compute_logits` computes the logits of a
    micro-batch."""
    head = store.manifest.head
    parts = [RaggedArray(np.empty(0, dtype=np.float64), np.empty(0, dtype=np.int32))]
    for positions in split_micro_batches(store, split, order):
        tokens = task.prepare(store.read_tokens(split, positions), head, SEED, 0)
        parts.append(task.row_results(task.row_outputs(compute_logits(tokens), tokens, head), tokens, head))
    return RaggedArray(np.concatenate([part.values for part in parts]), np.concatenate([part.counts for part in parts]))


def split_micro_batches(store: Store, split: str, order: Ints) -> Iterable[Ints]:
    return iter_batches(store.column(split, "length"), order, MAX_ROWS_PER_MICRO_BATCH, MAX_TOKENS_PER_MICRO_BATCH)


def restore_order(row_results: RaggedArray, positions: Ints, num_rows: int) -> RaggedArray:
    """Reorder results of rows at `positions` to index order; each of `num_rows` rows must occur once."""
    if not np.array_equal(np.sort(positions), np.arange(num_rows)):
        num_distinct = len(np.unique(positions))
        raise RuntimeError(f"evaluated {len(positions)} rows of {num_rows}, {num_distinct} of them distinct")
    return row_results.take(np.argsort(positions))


INFINITE_LOSS = float(-np.log(np.finfo(np.float64).tiny))
"""Replacement for an infinite loss of a row, so that the losses of the other rows remain comparable. About 708, the log
loss of the smallest probability in float64."""


class Evaluation(NamedTuple):
    """An evaluation on the validation rows."""

    step: int
    score: float
    """The score of `train.best_by`; larger is better."""
    loss: float | None = None
    """Mean over the rows; None if an earlier version of rtrain did not record it."""


def is_better(candidate: Evaluation, best: Evaluation | None) -> bool:
    """Whether `candidate`, of a later step than `best`, replaces it.

    The larger score wins; of equal scores the lower validation loss; of equal or unknown losses the earlier step. A
    small validation split gives many steps the same score, and the first of them is often the least trained: as
    accurate as later ones, and far less certain.
    """
    if best is None or candidate.score != best.score:
        return best is None or candidate.score > best.score
    return candidate.loss is not None and best.loss is not None and candidate.loss < best.loss


def best_in(state: CheckpointState) -> Evaluation | None:
    """The best evaluation in a checkpoint's state."""
    if state.best_step is None or state.best_score is None:
        return None
    return Evaluation(state.best_step, state.best_score, state.best_loss)


def with_best(best: Evaluation | None, state: CheckpointState) -> CheckpointState:
    """The state with the best evaluation replaced; None removes it."""
    fields = best or (None, None, None)
    evaluations = state.best_evaluations if best else ()
    return replace(state, best_step=fields[0], best_score=fields[1], best_loss=fields[2], best_evaluations=evaluations)


def with_kept(evaluation: Evaluation, state: CheckpointState, num_kept: int) -> CheckpointState:
    """The state with an evaluation of a later step among the `num_kept` best, where it belongs there."""
    evaluations = [Evaluation(*entry) for entry in state.best_evaluations]
    place = next((place for place, other in enumerate(evaluations) if is_better(evaluation, other)), len(evaluations))
    evaluations.insert(place, evaluation)
    return replace(state, best_evaluations=tuple(evaluations[:num_kept]))


BestReason = Literal["score", "loss", "first"]
"""Reason for the best evaluation: its score alone, the lowest loss of equal scores, or the first of equal ones."""


def best_event(best: Evaluation, evaluations: Mapping[int, Evaluation]) -> dict[str, Any]:
    """Fields of the `best` event: the evaluation, `num_evaluations` (how many were compared, `evaluations` by step) and
    `reason`.

    Evaluations with a higher score are not counted: their checkpoints were lost.
    """
    not_better = [other for other in evaluations.values() if other.step != best.step and other.score <= best.score]
    same_score = [other for other in not_better if other.score == best.score]
    has_lowest_loss = all(is_better(best, other) for other in same_score)
    reason: BestReason = "score" if not same_score else "loss" if has_lowest_loss else "first"
    return {**best._asdict(), "num_evaluations": len(not_better) + 1, "reason": reason}


def read_evaluations(events: Iterable[dict[str, Any]], headline: str, last_step: int) -> dict[int, Evaluation]:
    """Evaluations in a run's log by step, up to `last_step`: a restart repeats those after its checkpoint."""
    return {
        event["step"]: Evaluation(event["step"], event["scores"][headline], event.get("loss"))
        for event in events
        if event["split"] == "valid" and "calibration" not in event and event["step"] <= last_step
    }


def mean_row_loss(task: Task, row_results: RaggedArray, store: Store, positions: Ints | None = None) -> float | None:
    """Mean loss of the validation rows (`RowReport.loss`), over all rows or those at `positions`; None if no row has a
    loss.

    It is computed from the results of an evaluation, without another forward pass: log loss of a label; mean log loss
    of each label's yes or no; mean log loss of a row's heads, words, sentences or masked tokens; half of the log losses
    of a span's two ends; squared error of a number in squared standard deviations.
    """
    return mean_loss(task.explain_rows(row_results, store.targets("valid", positions), store.manifest.head))


def mean_loss(report: RowReport) -> float | None:
    """`mean_row_loss` of the rows of a report."""
    losses = report.loss
    finite_losses = losses[~np.isnan(losses)]
    return float(np.where(np.isinf(finite_losses), INFINITE_LOSS, finite_losses).mean()) if len(finite_losses) else None


def write_rung(run: Run, step: int, row_results: RaggedArray) -> int:
    """Write the results of the validation rows by the weights after `step` steps, in index order; return their number.

    A rung of a search does not change the run, since it is no evaluation for the selection of the best weights. So a
    pause at a rung does not change the end of a run.
    """
    from safetensors.numpy import save_file

    path = run.rung_predictions(step)
    path.parent.mkdir(exist_ok=True)
    with atomic_write.replace_file(path) as draft:
        save_file({"values": row_results.values, "counts": row_results.counts}, draft)
    return len(row_results)


def read_rung(run: Run, step: int) -> RaggedArray | None:
    """Read the results of `write_rung`; None if the run has not reached the rung."""
    from safetensors.numpy import load_file

    path = run.rung_predictions(step)
    if not path.is_file():
        return None
    arrays = load_file(path)
    return RaggedArray(arrays["values"], arrays["counts"])
