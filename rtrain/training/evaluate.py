"""Exact distributed metrics: every row of a split is counted once, on any number of workers."""

from typing import TYPE_CHECKING

import numpy as np

from rtrain.data.store import Store
from rtrain.tasks.base import Floats, Task
from rtrain.tasks.metrics import Metric, metric_for
from rtrain.training.step import forward

if TYPE_CHECKING:
    from rtrain.training.exchange import Exchange

ROWS_PER_PASS = 64


def evaluate(
    exchange: "Exchange", task: Task, store: Store, split: str, *, pad_id: int, precision: str
) -> dict[str, float]:
    """Scores over all rows of `split`; the same on every worker."""
    import torch

    metric = metric_for(task.output, len(store.manifest.labels))
    model = exchange.module
    model.eval()
    # Neighbours in length share a pass, and the workers take turns, so that they end together.
    order = np.argsort(store.column(split, "length"), kind="stable")[exchange.rank :: exchange.world]
    with torch.inference_mode():
        for start in range(0, len(order), ROWS_PER_PASS):
            exchange.alive()
            tokens = store.read(split, order[start : start + ROWS_PER_PASS])
            logits: Floats = forward(model, tokens, pad_id, precision).float().cpu().numpy()
            metric.add(logits, tokens.targets)
    model.train()
    return _scores(exchange, metric, store.rows(split))


def _scores(exchange: "Exchange", metric: Metric, expected: int) -> dict[str, float]:
    import torch

    exchange.sum(torch.from_numpy(metric.state))
    scores = metric.scores()
    if scores["rows"] != expected:
        raise RuntimeError(f"evaluated {scores['rows']} rows of {expected}")
    return scores
