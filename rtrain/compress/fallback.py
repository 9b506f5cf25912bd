"""Which operations of an int8 graph go back to float, so that few enough of its answers differ from the float model's.

Quantization is not done again: the graph is calibrated once, and quantizers are taken out of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rtrain.core.ragged import Floats, Head, Ragged
from rtrain.inference.score import Answered
from rtrain.tasks.base import Task

NUMBER_FLIPS = 0.05
"""Standard deviations of the targets by which an answer that is a single number must differ to count as another one."""


@dataclass(frozen=True)
class Apart:
    """How far a graph's answers are from those of the float model, on the same rows."""

    flips: float
    """Share of answers that are others (see `flips`)."""
    distance: float
    """Root of the mean square of the logits' differences."""


@dataclass(frozen=True)
class Found:
    reverted: tuple[str, ...]
    """Operations that compute in float; the most sensitive first."""
    before: Apart
    after: Apart
    sensitivity: dict[str, float]
    """Operation -> the distance that is left when it alone is float; the most sensitive first. Empty where nothing had
    to go back."""


Measure = Callable[[frozenset[str]], Apart]
"""Measures the graph with these operations in float."""


def search(operations: Sequence[str], measure: Measure, most_flips: float) -> Found:
    """The smallest set of operations, as far as a ranking finds it, with which at most `most_flips` answers differ.

    Each operation is tried in float alone, which ranks them by the distance that is left. The shortest beginning of
    that ranking that suffices is found by bisection, and operations that it does not need are then left out again.
    Where not even all operations in float suffice, all are returned.
    """
    known = cache(measure)
    before = known(frozenset())
    if before.flips <= most_flips or not operations:
        return Found((), before, before, {})
    left = {name: known(frozenset({name})).distance for name in operations}
    ranking = sorted(operations, key=lambda name: left[name])

    def suffices(names: Sequence[str]) -> bool:
        return known(frozenset(names)).flips <= most_flips

    chosen = ranking[: _shortest(len(ranking), lambda count: suffices(ranking[:count]))]
    for name in reversed(chosen):
        fewer = [one for one in chosen if one != name]
        if fewer and suffices(fewer):
            chosen = fewer
    after = known(frozenset(chosen))
    return Found(tuple(chosen), before, after, {name: left[name] for name in ranking})


def _shortest(most: int, suffices: Callable[[int], bool]) -> int:
    """The least count from 1 to `most` that suffices, where more never suffice less; `most` is taken on trust.

    Counts are doubled first: few are the rule, and fewer are tried than by halving all of them.
    """
    low, high = 0, 1
    while high < most and not suffices(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Decided:
    """What a graph answers to rows."""

    outputs: Sequence[Floats]
    answers: Sequence[Any]
    """What is made of the outputs in the end, each comparable with another graph's; numbers are in standard deviations
    of the targets."""


def decided(task: Task, head: Head, answered: Answered, targets: Ragged) -> Decided:
    """An answer is a row's class, its labels, those of its heads, its words or its sentences, by the head's thresholds;
    of tags it is each word's, of masked tokens each one's."""
    outputs, kind = answered.outputs, task.output
    if kind == "number":
        return Decided(outputs, [float(one.item()) for one in outputs])
    if kind == "tokens":
        return Decided(outputs, [int(guess) for one in outputs for guess in one.argmax(-1)])
    found = task.describe(answered.outcomes, targets, head).prediction
    return Decided(outputs, [tag for row in found for tag in row] if kind == "tags" else found)


def apart(found: Decided, expected: Decided) -> Apart:
    """Two graphs' answers to the same rows, beside each other."""
    squares = [np.square(one - other).ravel() for one, other in zip(found.outputs, expected.outputs, strict=True)]
    distance = float(np.sqrt(np.concatenate(squares).mean())) if squares else 0.0
    return Apart(flips(found.answers, expected.answers), distance)


def flips(left: Sequence[Any], right: Sequence[Any]) -> float:
    """The share of answers that are others; numbers are where they differ by more than `NUMBER_FLIPS`."""
    others = [
        not abs(one - other) <= NUMBER_FLIPS if isinstance(one, float) else one != other
        for one, other in zip(left, right, strict=True)
    ]
    return float(np.mean(others)) if others else 0.0
