"""Which of a run's evaluations has the best weights: a pure rule, and what it rests on.

The larger score wins; of equal scores the lower validation loss; of equal losses too, or where one of them is not
known, the earlier update. A small validation split gives the same score to many updates, and the first of them is often
the least trained: its answers are as right as later ones, and far less sure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rtrain.checkpoint.format import State
from rtrain.core.ragged import Ints, Ragged
from rtrain.data.store.store import Store
from rtrain.tasks.base import Task

ENDLESS = float(-np.log(np.finfo(np.float64).tiny))
"""Stands for the endless loss of an answer that gave its target no chance at all: such a row counts as very wrong, and
the losses of the other rows can still be compared. About 708, the log loss of the smallest chance in float64."""


class Evaluated(NamedTuple):
    """An evaluation on the validation rows."""

    update: int
    score: float
    """The headline; larger is better."""
    loss: float | None = None
    """Mean over the rows; None where an earlier version of rtrain did not write it down."""


def better(new: Evaluated, best: Evaluated | None) -> bool:
    """Whether `new`, of a later update than `best`, takes its place."""
    if best is None or new.score != best.score:
        return best is None or new.score > best.score
    return new.loss is not None and best.loss is not None and new.loss < best.loss


def of(state: State) -> Evaluated | None:
    """The best evaluation that a checkpoint knows of."""
    if state.best_update is None or state.best_score is None:
        return None
    return Evaluated(state.best_update, state.best_score, state.best_loss)


def kept(best: Evaluated | None, state: State) -> State:
    """The state with that best evaluation, or with none."""
    found = best or (None, None, None)
    return replace(state, best_update=found[0], best_score=found[1], best_loss=found[2])


Reason = Literal["score", "loss", "first"]
"""Why an evaluation is the best: its score alone, the lowest loss of equal scores, or the first of what is equal."""


def said(best: Evaluated, every: Mapping[int, Evaluated]) -> dict[str, Any]:
    """The best evaluation for the log: `of` how many, by update in `every`, and `why`.

    A better one is not counted: its checkpoint was lost, or else it would be the best.
    """
    others = [one for one in every.values() if one.update != best.update and one.score <= best.score]
    tied = [one for one in others if one.score == best.score]
    lower = all(better(best, one) for one in tied)
    why: Reason = "score" if not tied else "loss" if lower else "first"
    return {**best._asdict(), "of": len(others) + 1, "why": why}


def evaluations(events: Iterable[dict[str, Any]], headline: str, until: int) -> dict[int, Evaluated]:
    """The evaluations of a run's log by their update, up to `until`: a restart repeats those since its checkpoint."""
    return {
        event["update"]: Evaluated(event["update"], event["scores"][headline], event.get("loss"))
        for event in events
        if event["split"] == "valid" and "chosen" not in event and event["update"] <= until
    }


def mean_loss(task: Task, outcomes: Ragged, store: Store, positions: Ints | None = None) -> float | None:
    """Mean of each validation row's own loss (`Described.loss`), over all rows or those at `positions`; None where no
    row has one.

    Computed from the outcomes of an evaluation, without another pass. It is the log loss of a label, the mean log loss
    of the yes or no of each label, the mean log loss of a row's heads, words, sentences or masked tokens, half of the
    log losses of an answer's two ends, and the squared error of a number in squared standard deviations.
    """
    targets = store.targets("valid", positions)
    rows = task.describe(outcomes, targets, store.manifest.head).loss
    known = rows[~np.isnan(rows)]
    return float(np.where(np.isinf(known), ENDLESS, known).mean()) if len(known) else None
