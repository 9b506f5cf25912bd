"""Selection of the evaluation with the best weights. Pure.

The larger score wins; of equal scores the lower validation loss; of equal or unknown losses the earlier step. A small
validation split gives many steps the same score, and the first of them is often the least trained: as accurate as later
ones, and far less certain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rtrain.checkpoint.format import CheckpointState
from rtrain.core.ragged import Ints, RaggedArray
from rtrain.data.store.store import Store
from rtrain.tasks.base import Task

INFINITE_LOSS = float(-np.log(np.finfo(np.float64).tiny))
"""Replacement for an infinite loss of a row, so that the losses of the other rows remain comparable. About 708, the log
loss of the smallest probability in float64."""


class Evaluation(NamedTuple):
    """An evaluation on the validation rows."""

    step: int
    score: float
    """The headline metric; larger is better."""
    loss: float | None = None
    """Mean over the rows; None if an earlier version of rtrain did not record it."""


def is_better(candidate: Evaluation, best: Evaluation | None) -> bool:
    """Whether `candidate`, of a later step than `best`, replaces it."""
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
    return replace(state, best_step=fields[0], best_score=fields[1], best_loss=fields[2])


BestReason = Literal["score", "loss", "first"]
"""Reason for the best evaluation: its score alone, the lowest loss of equal scores, or the first of equal ones."""


def best_event(best: Evaluation, evaluations: Mapping[int, Evaluation]) -> dict[str, Any]:
    """Fields of the `best` event: the evaluation, `num_evaluations` (how many were compared, `evaluations` by step) and
    `reason`.

    Evaluations with a higher score are not counted: their checkpoints were lost.
    """
    not_better = [
        evaluation
        for evaluation in evaluations.values()
        if evaluation.step != best.step and evaluation.score <= best.score
    ]
    same_score = [evaluation for evaluation in not_better if evaluation.score == best.score]
    has_lowest_loss = all(is_better(best, evaluation) for evaluation in same_score)
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
    targets = store.targets("valid", positions)
    losses = task.explain_rows(row_results, targets, store.manifest.head).loss
    finite_losses = losses[~np.isnan(losses)]
    return float(np.where(np.isinf(finite_losses), INFINITE_LOSS, finite_losses).mean()) if len(finite_losses) else None
