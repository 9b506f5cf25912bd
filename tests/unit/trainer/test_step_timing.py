"""Where the time of an update went: the arithmetic of intervals, and the parts that add up to the update."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st

from rtrain.parallel import profiler
from rtrain.parallel.profiler import (
    COMM_ASYNC,
    COMM_WAIT,
    STEP_PARTS,
    Interval,
    StepWindow,
    Timeline,
    TimeSpan,
    break_down,
    exposed_comm,
)

ENDS = st.integers(0, 40)
SPANS = st.lists(
    st.builds(TimeSpan, st.sampled_from([*profiler.STAGES, COMM_WAIT, COMM_ASYNC, "other"]), ENDS, ENDS), max_size=12
)


def moments(intervals: list[Interval]) -> set[int]:
    """The nanoseconds that lie in some interval, one by one."""
    return {moment for start, stop in intervals for moment in range(start, stop)}


@given(SPANS, ENDS, ENDS)
def test_parts_add_up_to_the_update_whatever_the_spans(spans: list[TimeSpan], start: int, stop: int) -> None:
    window = StepWindow(0, min(start, stop), max(start, stop), tuple(spans))
    actual = break_down(window)
    assert tuple(actual.nanoseconds) == STEP_PARTS
    assert sum(actual.nanoseconds.values()) == window.wall
    assert min(actual.nanoseconds.values()) >= 0
    sent = moments([(item.start, item.stop) for item in spans if item.kind == COMM_ASYNC])
    inside = sent & set(range(window.start, window.stop))
    assert actual.hidden == len(inside - moments(exposed_comm(spans)))


def test_an_exchange_counts_once_whatever_stage_it_is_in() -> None:
    spans = (
        TimeSpan(profiler.GET_BATCH, 0, 10),
        TimeSpan(profiler.FORWARD, 10, 30),
        # Two parts are sent. The worker stands still to start them (50 to 52, 60 to 62); the second one is the last,
        # so that from 60 on nothing is left to compute but to wait for both.
        TimeSpan(COMM_WAIT, 50, 52),
        TimeSpan(COMM_WAIT, 60, 62),
        TimeSpan(COMM_ASYNC, 50, 58),
        TimeSpan(COMM_ASYNC, 60, 78),
        TimeSpan(profiler.BACKWARD, 30, 80),
        TimeSpan(COMM_WAIT, 85, 90),  # weights are spread inside the optimizer's step
        TimeSpan(profiler.OPTIMIZER, 80, 95),
    )
    actual = break_down(StepWindow(0, 0, 100, spans))
    assert actual.nanoseconds == {
        "get_batch": 10,
        "forward": 20,
        "backward": 50 - 2 - 18,
        "gradient_sync": 2 + 18 + 5,
        "optimizer": 10,
        "evaluate": 0,
        "checkpoint": 0,
        "idle": 5,
    }
    assert actual.hidden == 6


def test_what_is_sent_before_the_last_part_is_hidden_only_while_the_worker_computes() -> None:
    """The first part arrives when the last one has long been sent: the wait for it is no computation."""
    spans = (TimeSpan(profiler.BACKWARD, 0, 100), TimeSpan(COMM_ASYNC, 10, 90), TimeSpan(COMM_ASYNC, 40, 60))
    actual = break_down(StepWindow(0, 0, 100, spans))
    assert (actual.nanoseconds["backward"], actual.nanoseconds["gradient_sync"], actual.hidden) == (50, 50, 30)


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        return self.at


@pytest.mark.parametrize("stage", profiler.STAGES)
def test_a_delay_in_one_stage_is_that_stages(stage: str) -> None:
    def update(delay: int) -> dict[str, int]:
        clock = Hands()
        timeline = Timeline(clock)
        for item in profiler.STAGES:
            with timeline.span(item):
                clock.at += 7 + (delay if item == stage else 0)
            clock.at += 1
        return dict(break_down(StepWindow(0, 0, clock.at, tuple(timeline.pop_spans()))).nanoseconds)

    before, after = update(0), update(1000)
    assert {name: after[name] - before[name] for name in STEP_PARTS} == {
        name: 1000 * (name == stage) for name in STEP_PARTS
    }


def test_spans_end_when_the_device_has_settled_and_are_taken_once() -> None:
    clock = Hands()
    timeline = Timeline(clock)

    def settled(by: int) -> Callable[[], None]:
        return lambda: setattr(clock, "at", clock.at + by)

    timeline.synchronize = settled(30)
    with timeline.span(profiler.FORWARD):
        clock.at += 2
    assert timeline.pop_spans() == [TimeSpan(profiler.FORWARD, 0, 32)]
    assert timeline.pop_spans() == []


def test_sums_over_updates_are_told_in_seconds_by_worker() -> None:
    """The first update is left out."""
    clock = Hands()
    timeline = Timeline(clock)
    profile = profiler.StepProfiler(timeline, torch.device("cpu"))
    for number, wall in enumerate((500_000, 1_000_000, 3_000_000)):
        with timeline.span(profiler.FORWARD):
            clock.at += wall // 2
        clock.at += wall // 2
        profile.end_step(number)
    [actual] = profile.event_fields()
    del actual["cores_busy"]
    assert actual == {**dict.fromkeys(STEP_PARTS, 0.0), "forward": 0.001, "idle": 0.001, "hidden": 0.0}
