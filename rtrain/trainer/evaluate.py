"""Exact distributed metrics: every row of a split is counted once, on any number of workers.

Each worker reduces its rows to compact outcomes; all workers gather all outcomes and compute the same metric over the
whole split. A metric need not be a sum over rows.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from rtrain.core.ragged import Floats, Ints, Ragged, Tokens, batches
from rtrain.data.store.store import Store
from rtrain.metrics.registry import metric_for
from rtrain.models import builder
from rtrain.parallel import collectives
from rtrain.tasks.base import Task
from rtrain.trainer.step import forward, idle

if TYPE_CHECKING:
    from rtrain.parallel.base import Exchange

ROWS_PER_PASS = 64
TOKENS_PER_PASS = 1 << 13
"""Most tokens of a pass: rows of many windows go in smaller groups."""
SEED = 0
"""The seed of what a task draws for an evaluation: every model that is compared gets the same draw."""


def evaluate(
    exchange: "Exchange",
    task: Task,
    store: Store,
    split: str,
    *,
    pad_id: int,
    precision: str,
    keep: dict[str, Ragged] | None = None,
) -> dict[str, float]:
    """Scores over all rows of `split`; the same on every worker. The rows' outcomes go into `keep` by split."""
    outcomes = gathered(exchange, task, store, split, pad_id=pad_id, precision=precision)
    if keep is not None:
        keep[split] = outcomes

    @exchange.watch.busy()
    def score() -> dict[str, float]:
        return metric_for(task.output).scores(outcomes, store.targets(split), store.manifest.head)

    return collectives.together(exchange.watch, score)


def gathered(exchange: "Exchange", task: Task, store: Store, split: str, *, pad_id: int, precision: str) -> Ragged:
    """Outcomes of all rows of `split`, in index order, on every worker."""
    import torch

    network = exchange.module
    network.eval()
    builder.attend(network, training=False)
    # Neighbours in length share a pass, and the workers take turns, so that they end together.
    order = np.argsort(store.column(split, "length"), kind="stable")[exchange.rank :: exchange.world]
    own_passes = sum(1 for _ in passes(store, split, order))

    with exchange.answering(own_passes) as missing:
        asked = answered = 0

        def answer(tokens: Tokens) -> Floats:
            nonlocal asked, answered
            exchange.watch.passes()
            asked += 1
            if exchange.stops(failed=False):
                raise collectives.Elsewhere(collectives.OTHERS)
            wanted = None if tokens is filling else task.wanted(tokens, store.manifest.head)
            found: Floats = forward(network, tokens, pad_id, precision, wanted).float().cpu().numpy()
            answered += 1
            return found

        def answers() -> Ragged:
            with torch.no_grad():
                try:
                    found = outcomes_of(task, store, split, order, answer)
                    for _ in range(missing):
                        answer(filling)
                    return found
                except Exception:
                    if asked == answered < own_passes + missing:  # others are about to exchange with this worker
                        exchange.stops(failed=True)
                    raise

        filling = idle(pad_id)
        own = collectives.together(exchange.watch, answers)
    network.train()
    builder.attend(network, training=True)
    positions = np.concatenate(exchange.gather(order))
    counts = np.concatenate(exchange.gather(own.counts.astype(np.int64)))
    values = np.concatenate(exchange.gather(own.values))
    return in_order(Ragged(values, counts.astype(np.int32)), positions, store.rows(split))


def outcomes_of(
    task: Task, store: Store, split: str, order: Ints, answer: Callable[[Tokens], Floats], most_rows: int | None = None
) -> Ragged:
    """Outcomes of the rows at the positions `order`, in that order; `answer` gives a pass's logits."""
    head = store.manifest.head
    found = [Ragged(np.empty(0, dtype=np.float64), np.empty(0, dtype=np.int32))]
    for chosen in passes(store, split, order, most_rows):
        tokens = task.prepare(store.read(split, chosen), head, SEED, 0)
        found.append(task.outcomes(task.outputs(answer(tokens), tokens, head), tokens, head))
    return Ragged(np.concatenate([part.values for part in found]), np.concatenate([part.counts for part in found]))


def passes(store: Store, split: str, order: Ints, most_rows: int | None = None) -> Iterable[Ints]:
    return batches(store.column(split, "length"), order, most_rows or ROWS_PER_PASS, TOKENS_PER_PASS)


def in_order(outcomes: Ragged, positions: Ints, rows: int) -> Ragged:
    """The outcomes of rows at `positions`, in index order; each of `rows` rows must be there once."""
    if not np.array_equal(np.sort(positions), np.arange(rows)):
        raise RuntimeError(f"evaluated {len(positions)} rows of {rows}, {len(np.unique(positions))} of them distinct")
    return outcomes.take(np.argsort(positions))
