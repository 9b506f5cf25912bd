"""Decisions that the workers of a run make once."""

from pathlib import Path
from typing import Any

import pytest

from rtrain.core.run_folder import Run
from rtrain.parallel import gradient_noise
from rtrain.parallel.watchdog import Watchdog
from rtrain.runs import controller, prepare, worker
from tests.support import trained


@pytest.mark.parametrize(
    ("decided", "tells", "expected"),
    [
        (None, True, (gradient_noise.DEFAULT_INTERVAL, False)),
        (None, False, (0, False)),
        (gradient_noise.CALIBRATION_INTERVAL, True, (gradient_noise.CALIBRATION_INTERVAL, True)),
        (gradient_noise.CALIBRATION_INTERVAL, False, (0, False)),
    ],
)
def test_noise_is_measured_where_it_was_asked_for_and_the_layout_tells_it(
    tmp_path: Path, decided: int | None, tells: bool, expected: tuple[int, bool]
) -> None:
    run = Run(tmp_path)
    if decided is not None:
        run.decide_once("noise", decided)
    assert [worker.decide_noise_measurement(Watchdog(), run, tells) for _ in range(2)] == [expected] * 2


def test_speeds_are_measured_once_for_a_number_of_workers(tmp_path: Path) -> None:
    run, overrides = Run(tmp_path), list[int]()

    def timed() -> float:
        overrides.append(1)
        return 2.0

    assert [worker.decide_speeds(Watchdog(), run, timed) for _ in range(2)] == [(1.0,)] * 2
    assert len(overrides) == 1
    assert run.decisions == {"speeds_1": [1.0]}
    assert [event["speeds"] for event in run.events("speeds")] == [[1.0]]


def test_a_run_keeps_the_threads_of_its_first_start_and_says_where_a_machine_has_fewer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [worker.decide_threads(Watchdog(), run, available) for available in (2, 4, 2)] == [2, 2, 2]
    assert run.events("threads") == []
    assert worker.decide_threads(Watchdog(), run, 1) == 1
    [event] = run.events("threads")
    assert (event["threads_by_rank"], event["available"], event["short_ranks"]) == ([2], [1], [0])


def weights(folder: Path) -> bytes:
    return (folder / "artifact" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_whose_rows_are_dealt_by_speed_is_resumed_bit_for_bit(ray_session: Path) -> None:
    """The speeds are given to both runs: measured, they could differ. A third one measures its own."""
    folder, messages = ray_session / "balanced", list[dict[str, Any]]()
    config = trained.settings(folder, **{"train.workers": 2, "train.load_balancing": "auto"})
    for name, ends in (("whole", [None]), ("stopped", [5, None]), ("measured", [2])):
        for number, until in enumerate(ends):
            prepared = prepare.prepare_run(config, folder / name, reuse="resume" if number else "refuse")
            if name != "measured":
                prepared.run.decide_once("speeds_2", [1.0, 0.25])
            controller.fit(prepared, end_step=until, on_event=messages.append)
    assert weights(folder / "whole") == weights(folder / "stopped")
    digests = {event["order_digest"] for event in messages if event["kind"] == "trained" and event["finished"]}
    assert len(digests) == 1
    measured = Run(folder / "measured")
    assert max(measured.decisions["speeds_2"]) == 1.0
    assert [event["speeds"] for event in messages if event["kind"] == "speeds"] == [measured.decisions["speeds_2"]]
