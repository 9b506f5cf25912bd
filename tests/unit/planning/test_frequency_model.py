"""Which aggregation frequency trains soonest, by the noise scale and the clock of a pilot."""

from dataclasses import replace
from typing import Any

import pytest

from rtrain.config import load_config
from rtrain.core.errors import UserError
from rtrain.parallel.gradient_noise import NoiseScale
from rtrain.planning.throughput import (
    SEARCH_FREQUENCIES,
    CalibrationRun,
    ComputeTime,
    FrequencyOption,
    batch_size_prior,
    best_option,
    calibration_from_log,
    evaluate_log,
    fit_compute_time,
    frequency_options,
    median_step_s,
)


def pilot(scale: float, exchange_s: float = 0.0, **more: Any) -> CalibrationRun:
    return CalibrationRun(NoiseScale(scale, scale / 2, more.get("high", 2 * scale), 20), 64, 4, 1.0, exchange_s)


def by_k(result: list[FrequencyOption]) -> dict[int, FrequencyOption]:
    return {option.aggregation_frequency: option for option in result}


def test_time_is_updates_by_their_seconds() -> None:
    """B_noise 100, 16 rows a pass, passes of 0.2 s and 0.1 s beside: (1 + 100/16) 0.3, (1 + 100/32) 0.5, ..."""
    result = by_k(frequency_options(pilot(100.0), ComputeTime(0.1, 0.2)))
    times = {k: (1 + 100 / (16 * k)) * (0.1 + 0.2 * k) for k in (1, 2, 4, 8)}
    assert {k: item.global_batch_size for k, item in result.items()} == {1: 16, 2: 32, 4: 64, 8: 128}
    for k, item in result.items():
        assert item.relative_time == pytest.approx(times[k] / min(times.values()))
    assert min(result.values(), key=lambda item: item.relative_time).aggregation_frequency == min(
        times, key=lambda k: times[k]
    )


@pytest.mark.parametrize(
    ("scale", "high", "overhead_s", "micro_batch_s", "k"),
    [
        # Noise asks for large updates where the step is dear.
        (1.0, 2.0, 0.5, 0.1, 1),
        (10_000.0, 20_000.0, 0.5, 0.1, 8),
        # A slow exchange asks for fewer of them.
        (200.0, 400.0, 0.0, 0.1, 1),
        (200.0, 400.0, 1.0, 0.1, 8),
        (1e9, 2e9, 0.0, 0.1, 1),  # nothing but noise: of equal times the smaller updates are taken
        # The noise scale of a beginning is taken for the upper end of its interval, if there is one.
        (150.0, 300.0, 0.08, 0.03, 8),
        (150.0, None, 0.08, 0.03, 4),
    ],
)
def test_the_frequency_that_trains_soonest(
    scale: float, high: float | None, overhead_s: float, micro_batch_s: float, k: int
) -> None:
    options = frequency_options(pilot(scale, high=high), ComputeTime(overhead_s, micro_batch_s))
    assert best_option(options).aggregation_frequency == k
    assert (None in {option.relative_time_high for option in options}) == (high is None)


def test_passes_are_what_is_forward_and_backward() -> None:
    compute_time = fit_compute_time(replace(pilot(100.0, exchange_s=0.2), compute_s=0.6), 180e6, 18e9)
    assert compute_time.overhead_s == pytest.approx(0.4)
    assert compute_time.micro_batch_s == pytest.approx(0.15)


def test_on_a_gpu_the_step_is_foretold_by_the_weights() -> None:
    """1 s of 4 passes: 0.2 s exchange, a step of 7 x 180 MB at 18 GB/s, and the passes have the rest."""
    compute_time = fit_compute_time(pilot(100.0, exchange_s=0.2), 180e6, 18e9)
    assert compute_time.overhead_s == pytest.approx(0.27)
    assert compute_time.micro_batch_s == pytest.approx((1.0 - 0.2 - 0.07) / 4)


def test_updates_of_another_frequency_tell_what_passes_take() -> None:
    compute_time = fit_compute_time(replace(pilot(100.0), compute_s=0.9), 1.0, 1.0, (1.0, 0.4))
    assert compute_time.overhead_s == pytest.approx(0.2)
    assert compute_time.micro_batch_s == pytest.approx(0.2)


LOG: list[dict[str, Any]] = [
    {"kind": "started", "step": 0, "global_batch_size": 64, "device": "cpu"},
    *({"kind": "noise", "step": 5 + 8 * n, "trace": 900.0 + 50 * (n % 3), "square": 9.0, "rows": 64} for n in range(9)),
    {
        "kind": "trained",
        "steps": 80,
        "finished": True,
        "seconds": {"train": 40.0},
        "gradient_sync": {"seconds": 0.1, "bytes": 1},
        "stages": (),
    },
]
STAGES = [{"forward": 0.12, "backward": 0.2}, {"forward": 0.1, "backward": 0.18}]
"""Seconds of an update of each worker."""


def test_a_pilot_s_update_is_the_median_of_those_that_measure_nothing() -> None:
    """The first step takes 3 s, steps that measure noise 1.5, the others 1."""
    clock, log = 0.0, [{"kind": "started", "step": 0}]
    for number in range(1, 9):
        clock += 3.0 if number == 1 else 1.5 if number % 2 == 0 else 1.0
        log.append({"kind": "progress", "step": number, "train_s": clock})
        if number % 2 == 0:
            log.append({"kind": "noise", "step": number})
    ended = {"kind": "trained", "steps": 8, "seconds": {"train": clock}}
    assert median_step_s([*log, ended]) == 1.0
    every_one_measures = [event for event in log if event.get("step") not in (3, 5, 7)]
    assert median_step_s([*every_one_measures, ended]) == pytest.approx(1.25)
    assert median_step_s([log[0], ended]) == clock / 8


def test_stages_tell_a_pilot_s_passes_but_not_on_a_gpu() -> None:
    ended = {**LOG[-1], "stages": STAGES}
    assert calibration_from_log([*LOG[:-1], ended], 4).compute_s == pytest.approx(0.3)
    assert calibration_from_log([{**LOG[0], "device": "gpu"}, *LOG[1:-1], ended], 4).compute_s is None


@pytest.mark.parametrize(
    ("device", "shifted"),
    [
        ("cpu", 20e9),
        ("NVIDIA H100 80GB HBM3", 0.8 * 3350e9),
        ("NVIDIA A100-SXM4-40GB", 0.8 * 1555e9),
        ("NVIDIA A10G", 0.8 * 600e9),
        ("NVIDIA GeForce RTX 5090", 0.8 * 600e9),
    ],
)
def test_a_pilot_s_step_is_foretold_by_the_memory_of_its_device(device: str, shifted: float) -> None:
    """440 MB of weights, moved seven times per step, and steps of 0.5 s with 0.1 s of all-reduce: the rest is
    micro-batch time, and k = 8 has twice as much. An unknown GPU counts as an A10G."""
    _, options = evaluate_log([{**LOG[0], "device": device}, *LOG[1:]], RECIPE, 440e6)
    assert by_k(options)[8].step_s == pytest.approx(0.5 + (0.5 - 0.1 - 7 * 440e6 / shifted))


def test_a_pilot_is_read_from_its_log() -> None:
    calibration = calibration_from_log(LOG, 4)
    assert calibration.noise_scale.rows == pytest.approx(950 / 9)
    assert (calibration.step_s, calibration.all_reduce_s, calibration.global_batch_size, calibration.micro_batches) == (
        0.5,
        0.1,
        64,
        4,
    )


def test_a_pilot_that_was_resumed_tells_the_pace_of_its_last_start() -> None:
    """Each attempt counts its own rows and seconds."""
    resumed = [*LOG[:-1], {"kind": "crashed"}, {**LOG[0], "step": 60}, {**LOG[-1], "seconds": {"train": 10.0}}]
    assert calibration_from_log(resumed, 4) == calibration_from_log(LOG, 4)


def test_what_began_after_a_pilot_has_ended_says_nothing_of_it() -> None:
    """Two later attempts reached step 90, and did not complete."""
    later = [{**LOG[0], "step": 80}, {"kind": "progress", "step": 90, "train_s": 0.1}, {"kind": "crashed"}]
    assert calibration_from_log([*LOG, *later, *later], 4) == calibration_from_log(LOG, 4)


def test_a_log_that_tells_too_little_is_refused() -> None:
    for log, code in (([LOG[0], *LOG[1:3], LOG[-1]], "not_measured"), (LOG[:-1], "not_finished")):
        with pytest.raises(UserError) as error:
            calibration_from_log(log, 4)
        assert error.value.code == code


# ------------------------------------------------------------------------------------------------- prior of a search


RECIPE = load_config(
    "intent", {"train.workers": 2, "train.micro_batch_size": 8, "train.aggregation_frequency": 4}
).recipe
MOST_ROWS = 110
"""The upper end of the log's noise scale, 900 to 1,000 over 9."""


def test_a_search_tries_no_update_that_costs_more_than_it_gains() -> None:
    """Noise of 106 rows; passes of 0.11 s, and 0.1 s beside them."""
    _, options = evaluate_log(LOG, RECIPE, 1.0, SEARCH_FREQUENCIES)
    prior = batch_size_prior(LOG, RECIPE, 1.0)
    assert prior is not None
    worth = [
        option.global_batch_size
        for option in options
        if option.relative_time_high is not None and option.relative_time_high <= 1.1
    ]
    assert prior.best_batch_size == best_option(options).global_batch_size
    assert prior.best_batch_size <= prior.max_batch_size
    assert prior.max_batch_size == min(max(worth), MOST_ROWS) < max(option.global_batch_size for option in options)


def test_a_cap_is_the_noise_scale_s_where_the_clock_asks_for_more() -> None:
    """The exchange is nearly all of an update."""
    slow = [*LOG[:-1], {**LOG[-1], "gradient_sync": {"seconds": 0.49, "bytes": 1}}]
    prior = batch_size_prior(slow, RECIPE, 1.0)
    assert prior is not None
    assert prior.max_batch_size == MOST_ROWS


def test_a_search_is_told_nothing_before_its_first_trial_tells_enough() -> None:
    assert batch_size_prior(LOG[:3], RECIPE, 1.0) is None
    assert batch_size_prior(LOG[:-1], RECIPE, 1.0) is None
