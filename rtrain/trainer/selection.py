"""Which evaluation gives the artifact's weights (`train.best_by`), and when the training ends early
(`train.patience`)."""

from collections.abc import Iterator

import numpy as np

from rtrain.checkpoint.format import CheckpointState
from rtrain.config import Recipe
from rtrain.config.selection import parse_best_by
from rtrain.core.errors import Problem
from rtrain.core.ragged import Head, RaggedArray
from rtrain.data.store.store import Store
from rtrain.metrics.operating_points import LABEL_OUTPUTS, find_label_problem, list_labels, select_label
from rtrain.metrics.registry import get_metric
from rtrain.tasks import base

LOWER_IS_BETTER = ("loss", "rmse", "mae", "perplexity")
"""Scores whose negative is compared, under the name `neg_SCORE`."""
REFERENCE_PREFIX = "lead_"
"""Prefix of scores of a reference, which no weights change."""


def find_score_name(best_by: str | None, output: str) -> str:
    """The name of the score in the log's evaluations; larger is better."""
    if best_by is None:
        return get_metric(output).headline
    return f"neg_{best_by}" if best_by in LOWER_IS_BETTER else best_by


def add_score(
    recipe: Recipe, scores: dict[str, float], loss: float | None, row_results: RaggedArray, store: Store
) -> dict[str, float]:
    """The scores of the validation rows with that of `train.best_by`."""
    best_by, output = recipe.train.best_by, base.get_task(recipe.task).output
    name = find_score_name(best_by, output)
    if name in scores:
        return scores
    assert best_by is not None
    parsed = parse_best_by(best_by)
    if not parsed.label:
        value = -(float("inf") if loss is None else loss) if best_by == "loss" else -scores[best_by]
    else:
        rows = select_label(output, row_results, store.targets("valid"), store.manifest.head, parsed.label)
        fixed = parsed.fixed_value
        value = rows.score(parsed.score) if fixed is None else rows.score_at(parsed.score, fixed)
    return {**scores, name: value}


def is_patience_exhausted(state: CheckpointState, patience: int | None, evaluate_every: int) -> bool:
    """Whether `patience` evaluations have followed the best one. A function of the checkpoint: all ranks and each
    attempt end at the same step."""
    if patience is None or state.best_step is None:
        return False
    return state.step // evaluate_every - state.best_step // evaluate_every >= patience


def check_selection(recipe: Recipe, store: Store | None = None) -> Iterator[Problem]:
    """Check the settings about scores and single labels against the task and, once they are known, its labels."""
    output = base.get_task(recipe.task).output
    if recipe.train.best_by is not None:
        yield from _check_best_by(recipe.train.best_by, output, store)
    points = recipe.metrics.operating_point or ()
    requests = [("metrics.operating_point", point.label, True) for point in points]
    requests += [("gate.min_recall", label, False) for label in recipe.gate.min_recall]
    requests += [("gate.min_precision", label, False) for label in recipe.gate.min_precision]
    for field, label, needs_rows in requests:
        yield from _check_label(field, label, output, store, needs_rows)


def _check_best_by(best_by: str, output: str, store: Store | None) -> Iterator[Problem]:
    parsed, field = parse_best_by(best_by), "train.best_by"
    if parsed.label:
        yield from _check_label(field, parsed.label, output, store, needs_rows=True)
    elif store is not None or output != "heads":  # the scores of heads have the heads' names
        head = Head(("a", "b")) if store is None else store.manifest.head
        empty = RaggedArray(np.empty(0), np.empty(0, dtype=np.int32))
        scores = get_metric(output).main_scores(empty, empty, head)
        names = [name for name in scores if name != "rows" and not name.startswith(("neg_", REFERENCE_PREFIX))]
        if parsed.score not in ("loss", *names):
            forms = ["loss", *names, *(("recall:LABEL", "precision:LABEL") if output in LABEL_OUTPUTS else ())]
            fix = f"write one of: {', '.join(forms)}"
            yield Problem(field, best_by, "this task has no score of that name", fix, code="unknown_name")


def _check_label(field: str, label: str, output: str, store: Store | None, needs_rows: bool) -> Iterator[Problem]:
    """`needs_rows`: validation rows must have the label."""
    if store is None and output in LABEL_OUTPUTS:
        return
    head = Head() if store is None else store.manifest.head
    problem = find_label_problem(field, label, list_labels(output, head))
    if problem is not None:
        yield problem
    elif needs_rows and store is not None and store.num_rows("valid"):
        zeros = RaggedArray.from_matrix(np.zeros((store.num_rows("valid"), len(head.labels))))
        if not select_label(output, zeros, store.targets("valid"), head, label).is_true.any():
            reason, fix = "no validation row has this label", "give more rows of it, or a larger data.valid_share"
            yield Problem(field, label, reason, fix, code="no_rows")
