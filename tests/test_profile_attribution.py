"""A delay in one stage of training is attributed to that stage, within 10 %: by the loop as every run has it.

The delay is one of the worker's clock alone, of minutes: what a busy machine adds to a stage is nothing beside it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from rtrain.checkpoint.saver import Saver
from rtrain.config import Train
from rtrain.data.stream import plan_update
from rtrain.parallel import data_parallel, factory
from rtrain.parallel.ddp import Replicated
from rtrain.parallel.timeline import Timeline
from rtrain.parallel.transport import Stock
from rtrain.profiling import measurements
from rtrain.trainer import step, step_timing, trainer
from rtrain.trainer.evaluate import evaluate
from rtrain.trainer.profiler import Watched
from rtrain.trainer.step_timing import PARTS
from tests import test_training_loop
from tests.test_training_loop import UPDATES, make_ground, start
from tests.test_training_step import LOSS, make_network, make_rows, make_still_encoder, pick

DELAY = 120_000_000_000
"""Nanoseconds of a delay on the clock; a training of six updates takes some seconds."""
WITHIN = 0.1


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ground")
    make_ground(folder)
    return folder


class Ahead:
    """The monotonic clock, which a delay sets ahead."""

    def __init__(self) -> None:
        self.by = self.delays = 0

    def __call__(self) -> int:
        return time.perf_counter_ns() + self.by

    def delayed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def late(*given: Any, **named: Any) -> Any:
            self.by, self.delays = self.by + DELAY, self.delays + 1
            return work(*given, **named)

        return late


def delay(stage: str, clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that the stage does its work, its clock goes ahead."""
    if stage == step_timing.GET_BATCH:
        monkeypatch.setattr(test_training_loop, "plan_update", clock.delayed(plan_update))
    elif stage == step_timing.FORWARD:
        monkeypatch.setattr(step, "forward", clock.delayed(step.forward))
    elif stage == step_timing.BACKWARD:
        monkeypatch.setattr(torch.Tensor, "backward", clock.delayed(torch.Tensor.backward))
    elif stage == step_timing.OPTIMIZER:
        monkeypatch.setattr(torch.optim.AdamW, "step", clock.delayed(torch.optim.AdamW.step))
    elif stage == step_timing.EVALUATE:
        monkeypatch.setattr(trainer, "evaluate", clock.delayed(evaluate))
    else:
        monkeypatch.setattr(Saver, "save", clock.delayed(Saver.save))


@pytest.mark.parametrize("stage", step_timing.STAGES)
def test_a_delay_in_a_stage_is_that_stages_and_no_others(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    clock, kept = Ahead(), tmp_path / "profile.json"
    monkeypatch.setattr(data_parallel, "Timeline", partial(Timeline, clock))
    monkeypatch.setattr(trainer, "Watched", lambda exchange, path: Watched(exchange, kept))
    delay(stage, clock, monkeypatch)
    ran = start(ground, tmp_path / "run", save_every=2)
    injected = clock.delays * DELAY
    assert clock.delays >= UPDATES // 2
    worker = measurements.read_worker(kept)
    assert [one.window.number for one in worker.updates] == list(range(UPDATES))
    found = dict.fromkeys(PARTS, 0)
    for update in worker.updates:
        own = step_timing.parts(update.window).of
        assert sum(own.values()) == update.window.wall
        found = {name: found[name] + own[name] for name in PARTS}
    outside = (stage == step_timing.EVALUATE) * DELAY  # the test rows are scored after the last update
    expected = {name: injected - outside if name == stage else 0 for name in PARTS}
    assert {name: found[name] / injected for name in PARTS} == pytest.approx(
        {name: value / injected for name, value in expected.items()}, abs=WITHIN
    )
    (told,) = ran.recorder.of("trained")
    (mean,) = told["stages"]
    share = {name: mean[name] / sum(mean[part] for part in PARTS) for name in PARTS}
    assert share == pytest.approx({name: float(name == stage) for name in PARTS}, abs=WITHIN)


def test_updates_follow_each_other_without_a_gap(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the updates of a start add up to its time, whatever is done between two steps."""
    monkeypatch.setattr(trainer, "Watched", lambda exchange, path: Watched(exchange, tmp_path / "profile.json"))
    start(ground, tmp_path / "run")
    windows = [one.window for one in measurements.read_worker(tmp_path / "profile.json").updates]
    assert [one.stop for one in windows[:-1]] == [one.start for one in windows[1:]]
    assert all(window.start <= one.start <= one.stop <= window.stop for window in windows for one in window.spans)


# --------------------------------------------------------------------------------------------------------- an exchange


@pytest.fixture
def two_workers() -> Iterator[None]:
    """This process is the first of two workers, by torch's process group for tests: the other one is as fast."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def starts_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker stands still to start sending."""
    monkeypatch.setattr(Stock, "start", clock.delayed(Stock.start))


def arrives_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is long under way, when nothing is left to compute."""
    start = Stock.start
    late = clock.delayed(lambda done: done.value())
    monkeypatch.setattr(Stock, "start", lambda by, flat: start(by, flat).then(late))


def counts_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers add their counts, and another one is late."""
    monkeypatch.setattr(dist, "all_reduce", clock.delayed(dist.all_reduce))


@pytest.mark.parametrize("inject", [starts_late, arrives_late, counts_late])
def test_a_delay_in_an_exchange_is_the_exchanges(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_workers: None,
    inject: Callable[[Ahead, pytest.MonkeyPatch], None],
) -> None:
    clock = Ahead()
    network = make_network(make_still_encoder(tmp_path))
    exchange = Replicated(network, touched_rows=False)
    exchange.timeline.now = clock
    inject(clock, monkeypatch)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    rows = make_rows(8)
    exchange.timeline.take()
    begun = clock()
    step.run_update(exchange, optimizer, LOSS, [pick(rows, [0, 1, 2]), pick(rows, [3, 4])], pad_id=0)
    window = step_timing.Window(0, begun, clock(), tuple(exchange.timeline.take()))
    assert clock.delays > 0
    assert {one.kind for one in window.spans} >= {"forward", "backward", "optimizer", "exchange", "sending"}
    found = {name: value / (clock.delays * DELAY) for name, value in step_timing.parts(window).of.items()}
    assert found == pytest.approx({name: float(name == "exchange") for name in PARTS}, abs=WITHIN)


def gathers_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker is late with its share of a layer's weights."""
    monkeypatch.setattr(dist, "all_gather_single", clock.delayed(dist.all_gather_single))


def shares_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker is late with its gradient of a layer."""
    monkeypatch.setattr(dist, "reduce_scatter_single", clock.delayed(dist.reduce_scatter_single))


def sums_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker of the replica is late with its part of a layer's answer."""
    monkeypatch.setattr(collectives, "wait_tensor", clock.delayed(collectives.wait_tensor))


@pytest.mark.parametrize(
    ("train", "inject", "least"),
    [
        ({"shard": 3}, gathers_late, 10),  # two passes, of which each gathers two layers twice, and the rest
        ({"shard": 2}, shares_late, 6),
        ({"shard": 3}, shares_late, 6),
        ({"tensor": 2}, sums_late, 16),  # two passes with four sums of each of two layers
    ],
)
def test_a_delay_in_what_parts_of_a_model_send_is_the_exchanges(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_workers: None,
    train: dict[str, int],
    inject: Callable[[Ahead, pytest.MonkeyPatch], None],
    least: int,
) -> None:
    """It happens inside of forward and backward passes."""
    clock, network = Ahead(), make_network(make_still_encoder(tmp_path))
    exchange = factory.build(network, Train(workers=2, **train))  # type: ignore[arg-type]
    exchange.timeline.now = clock
    inject(clock, monkeypatch)
    optimizer, rows = torch.optim.SGD(network.parameters(), lr=0.0), make_rows(8)
    exchange.timeline.take()
    begun = clock()
    step.run_update(exchange, optimizer, LOSS, [pick(rows, [0, 1, 2]), pick(rows, [3, 4])], pad_id=0)
    window = step_timing.Window(0, begun, clock(), tuple(exchange.timeline.take()))
    assert clock.delays >= least
    found = {name: value / (clock.delays * DELAY) for name, value in step_timing.parts(window).of.items()}
    assert found == pytest.approx({name: float(name == "exchange") for name in PARTS}, abs=WITHIN)
