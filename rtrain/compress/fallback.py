"""Operations of an int8 graph that are reverted to float, so that few enough answers differ from the float model's.

The graph is calibrated once. Reverting an operation removes its quantizers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rtrain.core.ragged import Floats, Head, RaggedArray
from rtrain.inference.score import PredictedRows
from rtrain.tasks.base import Task

MIN_NUMBER_CHANGE = 0.05
"""Least difference of a numeric answer that counts as a change, in standard deviations of the targets."""


@dataclass(frozen=True)
class AnswerDifference:
    """Difference of a graph's answers from the float model's, on the same rows."""

    changed_share: float
    """Share of changed answers (see the function `changed_share`)."""
    distance: float
    """Root mean square difference of the logits."""


@dataclass(frozen=True)
class FallbackResult:
    reverted: tuple[str, ...]
    """Operations in float, the most sensitive first."""
    original_difference: AnswerDifference
    final_difference: AnswerDifference
    sensitivity: dict[str, float]
    """Operation -> remaining distance with this operation alone in float; the most sensitive first. Empty if no
    operation had to be reverted."""


OperationMeasure = Callable[[frozenset[str]], AnswerDifference]
"""Measures the graph with the given operations in float."""


def search_operations(operations: Sequence[str], measure: OperationMeasure, max_changed_share: float) -> FallbackResult:
    """Find a small set of float operations with at most `max_changed_share` changed answers.

    Each operation is tried alone in float and ranked by the remaining distance. Bisection finds the shortest sufficient
    prefix of the ranking. Operations that this prefix does not need are removed again. If all operations in float are
    not sufficient, all are returned.
    """
    cached_measure = cache(measure)
    original_difference = cached_measure(frozenset())
    if original_difference.changed_share <= max_changed_share or not operations:
        return FallbackResult((), original_difference, original_difference, {})
    distances = {name: cached_measure(frozenset({name})).distance for name in operations}
    ranking = sorted(operations, key=lambda name: distances[name])

    def is_sufficient(names: Sequence[str]) -> bool:
        return cached_measure(frozenset(names)).changed_share <= max_changed_share

    reverted = ranking[: _find_shortest(len(ranking), lambda count: is_sufficient(ranking[:count]))]
    for name in reversed(reverted):
        smaller_set = [operation for operation in reverted if operation != name]
        if smaller_set and is_sufficient(smaller_set):
            reverted = smaller_set
    final_difference = cached_measure(frozenset(reverted))
    return FallbackResult(
        tuple(reverted), original_difference, final_difference, {name: distances[name] for name in ranking}
    )


def _find_shortest(max_count: int, is_sufficient: Callable[[int], bool]) -> int:
    """Find the least sufficient count from 1 to `max_count`; `is_sufficient` is monotone, `max_count` is not tested.

    Counts are doubled first: small counts are common, so this needs fewer measurements than bisection of the range.
    """
    low, high = 0, 1
    while high < max_count and not is_sufficient(high):
        low, high = high, min(2 * high, max_count)
    while high - low > 1:
        midpoint = (low + high) // 2
        low, high = (low, midpoint) if is_sufficient(midpoint) else (midpoint, high)
    return high


@dataclass(frozen=True)
class GraphAnswers:
    """A graph's answers to rows."""

    outputs: Sequence[Floats]
    answers: Sequence[Any]
    """Decoded outputs, comparable between graphs; numbers are in standard deviations of the targets."""


def collect_graph_answers(task: Task, head: Head, answered: PredictedRows, targets: RaggedArray) -> GraphAnswers:
    """Decode a graph's outputs with the head's thresholds: one answer per row, per word (tags) or per masked token."""
    outputs, kind = answered.outputs, task.output
    if kind == "number":
        return GraphAnswers(outputs, [float(output.item()) for output in outputs])
    if kind == "tokens":
        return GraphAnswers(outputs, [int(guess) for output in outputs for guess in output.argmax(-1)])
    predictions = task.explain_rows(answered.row_results, targets, head).prediction
    return GraphAnswers(outputs, [tag for row in predictions for tag in row] if kind == "tags" else predictions)


def measure_difference(actual: GraphAnswers, expected_answers: GraphAnswers) -> AnswerDifference:
    """Compare two graphs' answers to the same rows."""
    squares = [
        np.square(actual_logits - expected_logits).ravel()
        for actual_logits, expected_logits in zip(actual.outputs, expected_answers.outputs, strict=True)
    ]
    distance = float(np.sqrt(np.concatenate(squares).mean())) if squares else 0.0
    return AnswerDifference(changed_share(actual.answers, expected_answers.answers), distance)


def changed_share(left: Sequence[Any], right: Sequence[Any]) -> float:
    """Share of answers that differ; numbers differ from `MIN_NUMBER_CHANGE` on."""
    is_changed = [
        not abs(left_answer - right_answer) <= MIN_NUMBER_CHANGE
        if isinstance(left_answer, float)
        else left_answer != right_answer
        for left_answer, right_answer in zip(left, right, strict=True)
    ]
    return float(np.mean(is_changed)) if is_changed else 0.0
