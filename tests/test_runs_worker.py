"""What a worker decides before it trains."""

from pathlib import Path

import pytest

from rtrain import events
from rtrain.exchange.alive import Watch
from rtrain.run import Run
from rtrain.runs import worker


@pytest.mark.parametrize(
    ("begun", "decided", "told", "expected"),
    [
        (False, None, True, True),
        (False, None, False, False),
        (True, None, True, False),  # by the version that measured nothing
        (True, 1, True, True),  # by the one that dealt at random whatever the layout
        (True, 1, False, True),
    ],
)
def test_noise_is_measured_where_the_layout_tells_it_and_old_runs_go_on_as_they_began(
    tmp_path: Path, begun: bool, decided: int | None, told: bool, expected: bool
) -> None:
    run = Run(tmp_path)
    if begun:
        events.append(run.folder, "started", update=0)
    if decided is not None:
        run.decide("noise", decided)
    assert [worker._measures(Watch(), run, told) for _ in range(2)] == [expected] * 2
    assert worker._measures(Watch(), run, True) is (expected or not begun)  # resumed in another layout
