"""What the workers of a run decide once."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import events
from rtrain.exchange import noise
from rtrain.exchange.alive import Watch
from rtrain.run import Run
from rtrain.runs import decisions, driver, preparing
from tests import trained


@pytest.mark.parametrize(
    ("begun", "decided", "told", "expected"),
    [
        (False, None, True, 3),
        (False, None, False, 0),
        (True, None, True, 0),  # by the version that measured nothing
        (True, 1, True, 1),  # by the one that dealt at random whatever the layout
        (True, 1, False, 1),
        (True, 2, True, 2),  # by the one that may have one pass of a worker that is alone
        (True, 2, False, 0),
    ],
)
def test_noise_is_measured_where_the_layout_tells_it_and_old_runs_go_on_as_they_began(
    tmp_path: Path, begun: bool, decided: int | None, told: bool, expected: int
) -> None:
    run = Run(tmp_path)
    if begun:
        events.append(run.folder, "started", update=0)
    if decided is not None:
        run.decide("noise", decided)
    assert [decisions.measures(Watch(), run, told) for _ in range(2)] == [expected] * 2
    resumed = decisions.measures(Watch(), run, True)  # in another layout
    assert resumed == (decided or (0 if begun else noise.RULE))


def test_speeds_are_measured_once_for_a_number_of_workers(tmp_path: Path) -> None:
    run, asked = Run(tmp_path), list[int]()

    def timed() -> float:
        asked.append(1)
        return 2.0

    assert [decisions.speeds(Watch(), run, timed) for _ in range(2)] == [(1.0,)] * 2
    assert len(asked) == 1
    assert run.decisions == {"speeds of 1": [1.0]}
    assert [event["speeds"] for event in run.events("speeds")] == [[1.0]]


def test_a_run_keeps_the_threads_of_its_first_start_and_says_where_a_machine_has_fewer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [decisions.threads(Watch(), run, available) for available in (2, 4, 2)] == [2, 2, 2]
    assert run.events("threads") == []
    assert decisions.threads(Watch(), run, 1) == 1
    [event] = run.events("threads")
    assert (event["kept"], event["available"], event["short"]) == ([2], [1], [0])


def weights(folder: Path) -> bytes:
    return (folder / "artifact" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_whose_rows_are_dealt_by_speed_is_resumed_bit_for_bit(ray_session: Path) -> None:
    """The speeds are given to both runs: measured, they could differ. A third one measures its own."""
    folder, told = ray_session / "balanced", list[dict[str, Any]]()
    config = trained.settings(folder, **{"train.workers": 2, "train.balance": "auto"})
    for name, ends in (("whole", [None]), ("stopped", [5, None]), ("measured", [2])):
        for number, until in enumerate(ends):
            prepared = preparing.prepare(config, folder / name, reuse="resume" if number else "refuse")
            if name != "measured":
                prepared.run.decide("speeds of 2", [1.0, 0.25])
            driver.fit(prepared, until=until, on_event=told.append)
    assert weights(folder / "whole") == weights(folder / "stopped")
    digests = {event["order_digest"] for event in told if event["kind"] == "trained" and event["finished"]}
    assert len(digests) == 1
    measured = Run(folder / "measured")
    assert max(measured.decisions["speeds of 2"]) == 1.0
    assert [event["speeds"] for event in told if event["kind"] == "speeds"] == [measured.decisions["speeds of 2"]]
