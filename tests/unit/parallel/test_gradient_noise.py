"""The noise scale of gradients, against the gradients of single rows."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain.config import OptimConfig
from rtrain.core import events
from rtrain.core.ragged import TokenBatch, single_window_batch
from rtrain.data.order import assign_micro_batches
from rtrain.parallel import gradient_noise
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.gradient_noise import NoiseMeasurement
from rtrain.trainer import optimizers, step
from tests.support.reports import make_run, page_of
from tests.support.tiny import VOCABULARY
from tests.unit.trainer.test_step import LOSS, by_hand, make_network, make_still_encoder, norm, pick
from tests.unit.trainer.test_step_workers import on_workers

UPDATE, PASS = 16, 8
"""Rows of an update, and of a pass at most."""
UPDATES = 120


def make_alike(count: int = 120) -> TokenBatch:
    """Rows whose label and words follow from their length, but for some."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 21, count).astype(np.int32)
    long = np.where(random.random(count) < 0.1, random.integers(0, 2, count), lengths > 10)
    half = VOCABULARY // 2
    ids = [
        random.integers(half if item else 5, VOCABULARY if item else half, n)
        for item, n in zip(long, lengths, strict=True)
    ]
    return single_window_batch(
        ids=np.concatenate(ids).astype(np.int32),
        window_lengths=lengths,
        pair_start=lengths,
        targets=long.astype(np.int64),
        row_ids=np.arange(count, dtype=np.uint64),
        teacher_logits=np.empty((count, 0), dtype=np.float32),
    )


@lru_cache(maxsize=1)
def direct(encoder: Path) -> float:
    """The noise scale by the gradients of all single rows."""
    network, rows = make_network(encoder), make_alike()
    mean = norm(by_hand(network, rows)[1]) ** 2
    entry = [norm(by_hand(network, pick(rows, [row]))[1]) ** 2 for row in range(len(rows))]
    return (float(np.mean(entry)) - mean) / mean


def measured(network: torch.nn.Module, rows: TokenBatch, world: int, rank: int, **dealt: Any) -> list[NoiseMeasurement]:
    """What updates of random rows tell; the weights stay."""
    exchange, optimizer = DDPStrategy(network), torch.optim.SGD(network.parameters(), lr=0.0)
    random, actual = np.random.default_rng(1), list[NoiseMeasurement]()
    for _ in range(UPDATES):
        sample = pick(rows, random.integers(0, len(rows), UPDATE).tolist())
        passes = [
            pick(sample, item.tolist())
            for item in assign_micro_batches(sample.window_lengths, world, rank, PASS, **dealt)
        ]
        done = step.StepRunner(exchange, optimizer, LOSS, pad_id=0).run_step(passes, measure_noise=True)
        assert done.noise_measurement is not None
        actual.append(done.noise_measurement)
    return actual


def on_a_worker(world: int, rank: int, encoder: Path) -> dict[str, float]:
    """Measured over exact noise scale: with random rows, and, for one worker, with rows grouped by length."""
    actual, rows = {}, make_alike()
    for name, is_random in (("random", True), *([("length", False)] if world == 1 else [])):
        scale = gradient_noise.estimate_scale(measured(make_network(encoder), rows, world, rank, is_random=is_random))
        actual[name] = 0.0 if scale is None else scale.rows / direct(encoder)
    return actual


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_that_of_single_rows_also_where_labels_follow_from_lengths(world: int) -> None:
    results, _ = on_workers()
    for rank in range(world):
        assert results[world, rank]["noise"]["random"] == pytest.approx(1.0, abs=0.2)


def test_passes_that_are_cut_by_length_would_not_tell_it() -> None:
    results, _ = on_workers()
    assert abs(results[1, 0]["noise"]["length"] - 1.0) > 0.25


def test_every_worker_measures_the_same() -> None:
    results, _ = on_workers()
    assert len({results[3, rank]["noise"]["random"] for rank in range(3)}) == 1


def test_an_update_that_is_not_to_measure_tells_nothing_and_trains_the_same(tmp_path: Path) -> None:
    rows, actual = make_alike(13), []
    for measures in (False, True):
        network = make_network(make_still_encoder(tmp_path / str(measures)))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        passes = [
            pick(rows, item.tolist()) for item in assign_micro_batches(rows.window_lengths, 1, 0, PASS, is_random=True)
        ]
        done = step.StepRunner(DDPStrategy(network), optimizer, LOSS, pad_id=0).run_step(passes, measure_noise=measures)
        actual.append(
            (done.noise_measurement is not None, [item.detach().numpy().tobytes() for item in network.parameters()])
        )
    assert [output for output, _ in actual] == [False, True]
    assert actual[0][1] == actual[1][1]


def test_a_single_pass_of_a_single_worker_has_nothing_to_compare(tmp_path: Path) -> None:
    network, rows = make_network(make_still_encoder(tmp_path)), make_alike(8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    done = step.StepRunner(DDPStrategy(network), optimizer, LOSS, pad_id=0).run_step([rows], measure_noise=True)
    assert done.noise_measurement is None


def test_an_update_with_room_in_one_pass_is_measured_by_a_worker_that_is_alone(tmp_path: Path) -> None:
    network, rows = make_network(make_still_encoder(tmp_path)), make_alike(8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    passes = [
        pick(rows, item.tolist()) for item in assign_micro_batches(rows.window_lengths, 1, 0, None, is_random=True)
    ]
    done = step.StepRunner(DDPStrategy(network), optimizer, LOSS, pad_id=0).run_step(passes, measure_noise=True)
    assert [len(item) for item in passes] == [4, 4]
    assert done.noise_measurement is not None


def test_what_an_update_makes_is_made_where_the_model_is(tmp_path: Path) -> None:
    """Whatever is made without saying where is on `meta` here, as it is on the processor beside a GPU: it mixes with
    nothing of the model's device. (The noise's sums once did that, and ended every training on a GPU.)"""
    network, rows = make_network(make_still_encoder(tmp_path)), make_alike(16)
    exchange, optimizer = DDPStrategy(network), optimizers.build_optimizer(network, OptimConfig())
    passes = [
        pick(rows, item.tolist()) for item in assign_micro_batches(rows.window_lengths, 1, 0, PASS, is_random=True)
    ]
    with torch.device("meta"):
        done = step.StepRunner(exchange, optimizer, LOSS, pad_id=0, max_grad_norm=1.0).run_step(
            passes, measure_noise=True
        )
    assert done.noise_measurement is not None
    assert np.isfinite(done.loss)


# ------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("sizes", [(8, 8), (3, 13), (1, 5, 10), (16, 0, 16)])
def test_the_measurements_are_right_on_average_whatever_the_shares(sizes: tuple[int, ...]) -> None:
    random, requested = np.random.default_rng(2), (4.0, 1.0)  # the variance of a row's gradient, and |G|^2
    dims, total, actual = 50, sum(sizes), list[NoiseMeasurement]()
    signal = np.full(dims, np.sqrt(requested[1] / dims))
    for _ in range(4000):
        rows = signal + random.normal(size=(total, dims)) * np.sqrt(requested[0] / dims)
        parts = [item.sum(axis=0) / total for item in np.split(rows, np.cumsum(sizes)[:-1])]
        complete = float(np.square(sum(parts)).sum())
        terms = sum(
            float(np.square(part).sum()) / (size / total) for part, size in zip(parts, sizes, strict=True) if size
        )
        item = gradient_noise.measure_between_replicas(terms, sum(size > 0 for size in sizes), complete, total)
        assert item is not None
        actual.append(item)
        if 0 < sizes[0] < total:
            reference = gradient_noise.measure_within_replica(
                float(np.square(parts[0]).sum()), sizes[0] / total, complete, total
            )
            assert reference is not None
            actual.append(reference)
    trace, square = (np.mean([getattr(item, name) for item in actual]) for name in ("trace", "square"))
    assert (trace, square) == pytest.approx(requested, rel=0.06)


@pytest.mark.parametrize("terms", [float("inf"), float("nan")])
def test_what_is_not_finite_is_no_measurement(terms: float) -> None:
    assert gradient_noise.measure_between_replicas(terms, 2, 1.0, 16) is None
    assert gradient_noise.measure_between_replicas(1.0, 1, 1.0, 16) is None
    assert gradient_noise.measure_within_replica(1.0, 0.0, 1.0, 16) is None
    assert gradient_noise.measure_within_replica(1.0, 1.0, 1.0, 16) is None


def test_the_interval_has_the_true_ratio_as_often_as_it_says() -> None:
    random, hits, endless = np.random.default_rng(3), 0, 0
    for _ in range(1000):
        shared = random.normal(size=20)
        draws = [
            NoiseMeasurement(40 + 8 * a, 2 + b - 0.3 * a, 64)
            for a, b in zip(shared, random.normal(size=20), strict=True)
        ]
        actual = gradient_noise.estimate_scale(draws)
        assert actual is not None
        endless += actual.high is None
        hits += actual.low <= 20 <= (actual.high or float("inf"))
    assert 0.93 <= hits / 1000 <= 0.97
    assert endless < 20


def test_a_signal_that_cannot_be_told_from_none_has_no_upper_end_or_no_scale() -> None:
    weak = [NoiseMeasurement(40.0, square, 64) for square in (3.0, -2.0, 2.5, -1.0, 0.5)]
    actual = gradient_noise.estimate_scale(weak)
    assert actual is not None
    assert actual.high is None
    assert 0 <= actual.low <= actual.rows
    assert gradient_noise.estimate_scale([NoiseMeasurement(40.0, -1.0, 64)] * 5) is None
    assert gradient_noise.estimate_scale(weak[:2]) is None


def test_a_run_s_noise_scale_is_that_of_its_latest_measurements_each_counted_once() -> None:
    log = [
        {"kind": gradient_noise.EVENT_KIND, "step": number, "trace": 10.0 * number, "square": 1.0, "rows": 64}
        for number in [*range(100), *range(90, 100)]  # a resumed run measures some updates again
    ]
    actual = gradient_noise.estimate_from_log([*log, {"kind": "progress", "step": 3}])
    assert actual is not None
    assert actual.rows == pytest.approx(10 * 87.0)
    assert actual.measurements == gradient_noise.MAX_MEASUREMENTS


@pytest.mark.parametrize(
    ("every", "updates"),
    [
        (gradient_noise.DEFAULT_INTERVAL, [4, 12, 20]),
        (gradient_noise.CALIBRATION_INTERVAL, list(range(1, 24, 2))),
        (0, []),
    ],
)
def test_the_first_update_never_measures(every: int, updates: list[int]) -> None:
    assert [number for number in range(24) if gradient_noise.has_random_rows(number, every)] == updates


def test_a_run_s_page_draws_the_noise_scale_beside_the_rows_of_an_update(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert gradient_noise.MEASURE_HINT in page_of(run).text
    for number in range(4, 44, 8):
        events.append_event(run, gradient_noise.EVENT_KIND, step=number, trace=400.0 + number, square=2.0, rows=24)
    shown = page_of(run)
    assert "noise scale was 210 rows" in shown.text
    assert gradient_noise.MEASURE_HINT not in shown.text
