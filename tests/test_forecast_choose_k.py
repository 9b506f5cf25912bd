"""Which aggregation frequency trains soonest, by the noise scale and the clock of a pilot."""

from dataclasses import replace
from typing import Any

import pytest

from rtrain.config import load
from rtrain.core.errors import UserError
from rtrain.parallel.gradient_noise import Scale
from rtrain.planning import frequency_model
from rtrain.planning.frequency_model import Option, Pilot, chosen, of_run, options
from rtrain.planning.throughput import Compute


def pilot(scale: float, exchange_s: float = 0.0, **more: Any) -> Pilot:
    return Pilot(Scale(scale, scale / 2, more.get("high", 2 * scale), 20), 64, 4, 1.0, exchange_s)


def by_k(found: list[Option]) -> dict[int, Option]:
    return {one.k: one for one in found}


def test_time_is_updates_by_their_seconds() -> None:
    """B_noise 100, 16 rows a pass, passes of 0.2 s and 0.1 s beside: (1 + 100/16) 0.3, (1 + 100/32) 0.5, ..."""
    found = by_k(options(pilot(100.0), Compute(0.1, 0.2)))
    times = {k: (1 + 100 / (16 * k)) * (0.1 + 0.2 * k) for k in (1, 2, 4, 8)}
    assert {k: one.rows_per_update for k, one in found.items()} == {1: 16, 2: 32, 4: 64, 8: 128}
    for k, one in found.items():
        assert one.relative == pytest.approx(times[k] / min(times.values()))
    assert min(found.values(), key=lambda one: one.relative).k == min(times, key=lambda k: times[k])


def test_noise_asks_for_large_updates_where_the_step_is_dear() -> None:
    compute = Compute(0.5, 0.1)
    chosen_by = [chosen(options(pilot(scale), compute)).k for scale in (1.0, 100.0, 10_000.0)]
    assert chosen_by == sorted(chosen_by)
    assert (chosen_by[0], chosen_by[-1]) == (1, 8)


def test_a_slow_exchange_asks_for_fewer_of_them() -> None:
    quick, slow = (chosen(options(pilot(200.0), Compute(seconds, 0.1))).k for seconds in (0.0, 1.0))
    assert quick < slow


def test_of_equal_times_the_smaller_updates_are_taken() -> None:
    """Nothing but noise: all frequencies take as long to a hundredth."""
    assert chosen(options(pilot(1e9), Compute(0.0, 0.1))).k == 1


def test_the_noise_scale_of_a_beginning_is_taken_for_the_upper_end_of_its_interval() -> None:
    """Noise of 150 rows, up to 300: passes of 0.03 s, and 0.08 s beside them."""
    compute = Compute(0.08, 0.03)
    assert chosen(options(pilot(150.0, high=300.0), compute)).k == 8
    assert chosen(options(pilot(150.0, high=None), compute)).k == 4


def test_an_open_interval_has_no_upper_time() -> None:
    assert {one.high for one in options(pilot(100.0, high=None), Compute(0.1, 0.2))} == {None}


def test_passes_are_what_is_forward_and_backward() -> None:
    found = frequency_model.work(replace(pilot(100.0, exchange_s=0.2), passes_s=0.6), 180e6, 18e9)
    assert found.step_s == pytest.approx(0.4)
    assert found.pass_s == pytest.approx(0.15)


def test_on_a_gpu_the_step_is_foretold_by_the_weights() -> None:
    """1 s of 4 passes: 0.2 s exchange, a step of 7 x 180 MB at 18 GB/s, and the passes have the rest."""
    found = frequency_model.work(pilot(100.0, exchange_s=0.2), 180e6, 18e9)
    assert found.step_s == pytest.approx(0.27)
    assert found.pass_s == pytest.approx((1.0 - 0.2 - 0.07) / 4)


def test_updates_of_another_frequency_tell_what_passes_take() -> None:
    found = frequency_model.work(replace(pilot(100.0), passes_s=0.9), 1.0, 1.0, (1.0, 0.4))
    assert found.step_s == pytest.approx(0.2)
    assert found.pass_s == pytest.approx(0.2)


LOG: list[dict[str, Any]] = [
    {"kind": "started", "update": 0, "rows_per_update": 64, "device": "cpu"},
    *(
        {"kind": "noise", "update": 5 + 8 * n, "trace": 900.0 + 50 * (n % 3), "square": 9.0, "rows": 64}
        for n in range(9)
    ),
    {
        "kind": "trained",
        "updates": 80,
        "finished": True,
        "seconds": {"train": 40.0},
        "exchange": {"seconds": 0.1, "bytes": 1},
        "stages": (),
    },
]
STAGES = [{"forward": 0.12, "backward": 0.2}, {"forward": 0.1, "backward": 0.18}]
"""Seconds of an update of each worker."""


def test_a_pilot_s_update_is_the_median_of_those_that_measure_nothing() -> None:
    """The first one takes 3 s, those that measure 1.5, the others 1."""
    clock, log = 0.0, [{"kind": "started", "update": 0}]
    for number in range(1, 9):
        clock += 3.0 if number == 1 else 1.5 if number % 2 == 0 else 1.0
        log.append({"kind": "progress", "update": number, "train_s": clock})
        if number % 2 == 0:
            log.append({"kind": "noise", "update": number})
    ended = {"kind": "trained", "updates": 8, "seconds": {"train": clock}}
    assert frequency_model.update_s([*log, ended]) == 1.0
    every_one_measures = [event for event in log if event.get("update") not in (3, 5, 7)]
    assert frequency_model.update_s([*every_one_measures, ended]) == pytest.approx(1.25)
    assert frequency_model.update_s([log[0], ended]) == clock / 8


def test_stages_tell_a_pilot_s_passes_but_not_on_a_gpu() -> None:
    ended = {**LOG[-1], "stages": STAGES}
    assert of_run([*LOG[:-1], ended], 4).passes_s == pytest.approx(0.3)
    assert of_run([{**LOG[0], "device": "gpu"}, *LOG[1:-1], ended], 4).passes_s is None


@pytest.mark.parametrize(
    ("device", "moved"),
    [
        ("cpu", 20e9),
        ("NVIDIA H100 80GB HBM3", 0.8 * 3350e9),
        ("NVIDIA A100-SXM4-40GB", 0.8 * 1555e9),
        ("NVIDIA A10G", 0.8 * 600e9),
        ("NVIDIA GeForce RTX 5090", 0.8 * 600e9),
    ],
)
def test_a_pilot_s_step_is_foretold_by_the_memory_of_its_device(device: str, moved: float) -> None:
    """440 MB of weights, of which a step moves seven times as much, and updates of 0.5 s with 0.1 s of exchange: what
    the step leaves are the passes, of which k = 8 has as many again. A GPU that is not in the table is taken for an
    A10G."""
    _, found = frequency_model.of_log([{**LOG[0], "device": device}, *LOG[1:]], RECIPE, 440e6)
    assert by_k(found)[8].update_s == pytest.approx(0.5 + (0.5 - 0.1 - 7 * 440e6 / moved))


def test_a_pilot_is_read_from_its_log() -> None:
    found = of_run(LOG, 4)
    assert found.scale.rows == pytest.approx(950 / 9)
    assert (found.update_s, found.exchange_s, found.rows_per_update, found.passes) == (0.5, 0.1, 64, 4)


def test_a_pilot_that_was_resumed_tells_the_pace_of_its_last_start() -> None:
    """What is counted is counted by each start for itself."""
    resumed = [*LOG[:-1], {"kind": "crashed"}, {**LOG[0], "update": 60}, {**LOG[-1], "seconds": {"train": 10.0}}]
    assert of_run(resumed, 4) == of_run(LOG, 4)


def test_what_began_after_a_pilot_has_ended_says_nothing_of_it() -> None:
    """Two starts later on both came to update 90, and to no end."""
    later = [{**LOG[0], "update": 80}, {"kind": "progress", "update": 90, "train_s": 0.1}, {"kind": "crashed"}]
    assert of_run([*LOG, *later, *later], 4) == of_run(LOG, 4)


def test_a_log_that_tells_too_little_is_refused() -> None:
    for log, code in (([LOG[0], *LOG[1:3], LOG[-1]], "not_measured"), (LOG[:-1], "not_finished")):
        with pytest.raises(UserError) as error:
            of_run(log, 4)
        assert error.value.code == code


# ------------------------------------------------------------------------------------------------ what a search is told


RECIPE = load("intent", {"train.workers": 2, "train.micro_batch": 8, "train.aggregation_frequency": 4}).recipe
MOST_ROWS = 110
"""The upper end of the log's noise scale, 900 to 1,000 over 9."""


def test_a_search_tries_no_update_that_costs_more_than_it_gains() -> None:
    """Noise of 106 rows; passes of 0.11 s, and 0.1 s beside them."""
    _, found = frequency_model.of_log(LOG, RECIPE, 1.0, frequency_model.SEARCHED)
    told = frequency_model.prior(LOG, RECIPE, 1.0)
    assert told is not None
    worth = [one.rows_per_update for one in found if one.high is not None and one.high <= 1.1]
    assert told.rows == frequency_model.chosen(found).rows_per_update
    assert told.rows <= told.most_rows
    assert told.most_rows == min(max(worth), MOST_ROWS) < max(one.rows_per_update for one in found)


def test_a_cap_is_the_noise_scale_s_where_the_clock_asks_for_more() -> None:
    """The exchange is nearly all of an update."""
    slow = [*LOG[:-1], {**LOG[-1], "exchange": {"seconds": 0.49, "bytes": 1}}]
    told = frequency_model.prior(slow, RECIPE, 1.0)
    assert told is not None
    assert told.most_rows == MOST_ROWS


def test_a_search_is_told_nothing_before_its_first_trial_tells_enough() -> None:
    assert frequency_model.prior(LOG[:3], RECIPE, 1.0) is None
    assert frequency_model.prior(LOG[:-1], RECIPE, 1.0) is None
