"""The memory of a pipeline's workers: each has the weights of its own layers, and keeps as many passes as its schedule
has it begin before the first of them goes back. Pure, but for the traces that it asks for."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice, repeat

from rtrain.config import Train
from rtrain.doctor.forecast.trace import Stage, Traced
from rtrain.strategies.pipeline import FILLING
from rtrain.strategies.schedules import SCHEDULES
from rtrain.training import pass_size

TRACED = 2
"""Most passes of a part that are traced as kept: each further one takes as much as the last of them."""


def lengths(train: Train, given: tuple[int, ...], tokens_of_update: float) -> tuple[int, ...]:
    """The windows of a pass of a pipeline, where those `given` would fill one on a worker that is alone: fewer, unless
    the settings say how large passes are."""
    of_replica = tokens_of_update / (train.workers // train.pipeline)
    return given[: max(1, tokens(train, sum(given), of_replica) // max(given))]


def tokens(train: Train, most: int, of_replica: float) -> int:
    """Tokens of a pass of a pipeline, where a worker that is alone has `most`; `of_replica`: those of its update."""
    return most if train.tokens_per_pass else pass_size.dealt(most, of_replica, FILLING * train.pipeline)


def kept(train: Train, stage: int, passes: int) -> tuple[int, ...]:
    """The part of each forward pass that a stage has made when its first backward pass begins, of an update of so many
    passes: by the schedules of torch's pipelining, whose warm-up is Megatron's (Narayanan et al. 2021,
    arXiv:2104.04473)."""
    stages, schedule = train.pipeline, SCHEDULES[train.schedule]
    passes, own = schedule.passes(passes, stages), own_parts(train, stage)
    if not schedule.fills:
        return own * passes
    if schedule.parts == 1:
        return own * min(passes, stages - stage)
    before = (schedule.parts - 1) * stages + 2 * (stages - 1 - stage)
    # The parts take turns, each with as many passes as there are stages.
    turns = (part for each in cycle(own) for part in repeat(each, stages))
    return tuple(islice(turns, min(passes * schedule.parts, before + 1)))


def own_parts(train: Train, stage: int) -> tuple[int, ...]:
    """The parts of the network that a stage has."""
    return tuple(range(stage, train.pipeline * SCHEDULES[train.schedule].parts, train.pipeline))


def of_stage(train: Train, stage: int, passes: int, of_pass: Callable[..., Traced]) -> Traced:
    """What a stage has when it has most. `of_pass`: `trace.of_pass`, which is told the `stage` and `more_passes`."""
    parts, own = train.pipeline * SCHEDULES[train.schedule].parts, own_parts(train, stage)
    every = kept(train, stage, passes)
    number = {part: every.count(part) for part in own}
    # Where passes go back before all have begun, their gradients are there while others are kept.
    more = len(every) < SCHEDULES[train.schedule].passes(passes, train.pipeline) * len(own)

    def traced(most: int) -> Traced:
        few = tuple(part for part in own for _ in range(min(most, number[part])))
        return of_pass(stage=Stage(parts, own, few), more_passes=more)

    some = traced(TRACED)
    further = sum(max(0, count - TRACED) for count in number.values())
    if not further:
        return some
    # The last pass of those parts that have so many; a part with fewer is the same in both traces.
    last = some.activations - traced(TRACED - 1).activations
    each = last / sum(count >= TRACED for count in number.values())
    return replace(some, activations=some.activations + math.ceil(further * each))
