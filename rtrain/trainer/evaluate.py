"""Exact distributed metrics: every row of a split is counted once, on any number of workers.

Each worker reduces its rows to compact results. All workers gather all results and compute the same metric over the
whole split, so a metric need not be a sum over rows.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from rtrain.core.ragged import Floats, Ints, RaggedArray, TokenBatch, iter_batches
from rtrain.data.store.store import Store
from rtrain.metrics.registry import get_metric
from rtrain.models import builder
from rtrain.parallel import collectives
from rtrain.tasks.base import Task
from rtrain.trainer.step import forward, idle_micro_batch

if TYPE_CHECKING:
    from rtrain.parallel.base import Strategy

MAX_ROWS_PER_MICRO_BATCH = 64
MAX_TOKENS_PER_MICRO_BATCH = 1 << 13
"""Largest number of tokens in a micro-batch; rows with many windows go in smaller groups."""
SEED = 0
"""Random seed of a task in evaluations, the same for all compared models."""


def evaluate(
    strategy: "Strategy",
    task: Task,
    store: Store,
    split: str,
    *,
    pad_id: int,
    precision: str,
    results_by_split: dict[str, RaggedArray] | None = None,
) -> dict[str, float]:
    """Compute the scores over all rows of `split`, the same on every worker. `results_by_split` receives the row
    results."""
    row_results = gather_row_results(strategy, task, store, split, pad_id=pad_id, precision=precision)
    if results_by_split is not None:
        results_by_split[split] = row_results

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
    task: Task,
    store: Store,
    split: str,
    order: Ints,
    compute_logits: Callable[[TokenBatch], Floats],
    max_rows: int | None = None,
) -> RaggedArray:
    """Results of the rows at the positions `order`, in that order. `compute_logits` computes the logits of a
    micro-batch."""
    head = store.manifest.head
    parts = [RaggedArray(np.empty(0, dtype=np.float64), np.empty(0, dtype=np.int32))]
    for positions in split_micro_batches(store, split, order, max_rows):
        tokens = task.prepare(store.read_tokens(split, positions), head, SEED, 0)
        parts.append(task.row_results(task.row_outputs(compute_logits(tokens), tokens, head), tokens, head))
    return RaggedArray(np.concatenate([part.values for part in parts]), np.concatenate([part.counts for part in parts]))


def split_micro_batches(store: Store, split: str, order: Ints, max_rows: int | None = None) -> Iterable[Ints]:
    return iter_batches(
        store.column(split, "length"), order, max_rows or MAX_ROWS_PER_MICRO_BATCH, MAX_TOKENS_PER_MICRO_BATCH
    )


def restore_order(row_results: RaggedArray, positions: Ints, num_rows: int) -> RaggedArray:
    """Reorder results of rows at `positions` to index order; each of `num_rows` rows must occur once."""
    if not np.array_equal(np.sort(positions), np.arange(num_rows)):
        raise RuntimeError(
            f"evaluated {len(positions)} rows of {num_rows}, {len(np.unique(positions))} of them distinct"
        )
    return row_results.take(np.argsort(positions))
