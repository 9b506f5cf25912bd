"""Where the time of an update went: the arithmetic of intervals, and the parts that add up to the update."""

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from rtrain.parallel.timeline import SENDS, WAITS, Span, Timeline
from rtrain.trainer import step_timing
from rtrain.trainer.step_timing import PARTS, Interval, Window, exposed, parts

ENDS = st.integers(0, 40)
SPANS = st.lists(
    st.builds(Span, st.sampled_from([*step_timing.STAGES, WAITS, SENDS, "other"]), ENDS, ENDS), max_size=12
)


def moments(intervals: list[Interval]) -> set[int]:
    """The nanoseconds that lie in some interval, one by one."""
    return {moment for start, stop in intervals for moment in range(start, stop)}


@given(SPANS, ENDS, ENDS)
def test_parts_add_up_to_the_update_whatever_the_spans(spans: list[Span], start: int, stop: int) -> None:
    window = Window(0, min(start, stop), max(start, stop), tuple(spans))
    found = parts(window)
    assert tuple(found.of) == PARTS
    assert sum(found.of.values()) == window.wall
    assert min(found.of.values()) >= 0
    sent = moments([(one.start, one.stop) for one in spans if one.kind == SENDS])
    inside = sent & set(range(window.start, window.stop))
    assert found.hidden == len(inside - moments(exposed(spans)))


def test_an_exchange_counts_once_whatever_stage_it_is_in() -> None:
    spans = (
        Span(step_timing.GET_BATCH, 0, 10),
        Span(step_timing.FORWARD, 10, 30),
        # Two parts are sent. The worker stands still to start them (50 to 52, 60 to 62); the second one is the last,
        # so that from 60 on nothing is left to compute but to wait for both.
        Span(WAITS, 50, 52),
        Span(WAITS, 60, 62),
        Span(SENDS, 50, 58),
        Span(SENDS, 60, 78),
        Span(step_timing.BACKWARD, 30, 80),
        Span(WAITS, 85, 90),  # weights are spread inside the optimizer's step
        Span(step_timing.OPTIMIZER, 80, 95),
    )
    found = parts(Window(0, 0, 100, spans))
    assert found.of == {
        "get_batch": 10,
        "forward": 20,
        "backward": 50 - 2 - 18,
        "exchange": 2 + 18 + 5,
        "optimizer": 10,
        "evaluate": 0,
        "checkpoint": 0,
        "idle": 5,
    }
    assert found.hidden == 6


def test_what_is_sent_before_the_last_part_is_hidden_only_while_the_worker_computes() -> None:
    """The first part arrives when the last one has long been sent: the wait for it is no computation."""
    spans = (Span(step_timing.BACKWARD, 0, 100), Span(SENDS, 10, 90), Span(SENDS, 40, 60))
    found = parts(Window(0, 0, 100, spans))
    assert (found.of["backward"], found.of["exchange"], found.hidden) == (50, 50, 30)


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        return self.at


@pytest.mark.parametrize("stage", step_timing.STAGES)
def test_a_delay_in_one_stage_is_that_stages(stage: str) -> None:
    def update(delay: int) -> dict[str, int]:
        clock = Hands()
        timeline = Timeline(clock)
        for one in step_timing.STAGES:
            with timeline.during(one):
                clock.at += 7 + (delay if one == stage else 0)
            clock.at += 1
        return dict(parts(Window(0, 0, clock.at, tuple(timeline.take()))).of)

    before, after = update(0), update(1000)
    assert {name: after[name] - before[name] for name in PARTS} == {name: 1000 * (name == stage) for name in PARTS}


def test_spans_end_when_the_device_has_settled_and_are_taken_once() -> None:
    clock = Hands()
    timeline = Timeline(clock)

    def settled(by: int) -> Callable[[], None]:
        return lambda: setattr(clock, "at", clock.at + by)

    timeline.settle = settled(30)
    with timeline.during(step_timing.FORWARD):
        clock.at += 2
    assert timeline.take() == [Span(step_timing.FORWARD, 0, 32)]
    assert timeline.take() == []


def test_sums_over_updates_are_told_in_seconds_by_worker() -> None:
    sums = step_timing.Sums()
    for wall in (1_000_000, 3_000_000):
        sums.add(parts(Window(0, 0, wall, (Span(step_timing.FORWARD, 0, wall // 2),))))
    found = step_timing.told(sums.vector())
    assert found == {**dict.fromkeys(PARTS, 0.0), "forward": 0.001, "idle": 0.001, "hidden": 0.0}
