"""A delay in one stage of training is attributed to that stage, within 10 %, by the trainer's own profiler.

The delay is minutes of the worker's clock only: the noise of a busy machine is negligible.
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

from rtrain.checkpoint.saver import CheckpointSaver
from rtrain.config import TrainConfig
from rtrain.data.stream import plan_worker_batch
from rtrain.parallel import data_parallel, factory
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.timeline import Timeline
from rtrain.parallel.transport import ProcessGroupTransport
from rtrain.profiling import measurements
from rtrain.trainer import step, step_timing, trainer
from rtrain.trainer.evaluate import evaluate
from rtrain.trainer.profiler import StepProfiler
from rtrain.trainer.step_timing import STEP_PARTS
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import LOSS, make_network, make_rows, make_still_encoder, pick
from tests.unit.trainer.test_trainer import UPDATES, make_ground, start

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
        def late(*arguments: Any, **keywords: Any) -> Any:
            self.by, self.delays = self.by + DELAY, self.delays + 1
            return work(*arguments, **keywords)

        return late


def delay(stage: str, clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that the stage does its work, its clock goes ahead."""
    if stage == step_timing.GET_BATCH:
        monkeypatch.setattr(test_trainer, "plan_worker_batch", clock.delayed(plan_worker_batch))
    elif stage == step_timing.FORWARD:
        monkeypatch.setattr(step, "forward", clock.delayed(step.forward))
    elif stage == step_timing.BACKWARD:
        monkeypatch.setattr(torch.Tensor, "backward", clock.delayed(torch.Tensor.backward))
    elif stage == step_timing.OPTIMIZER:
        monkeypatch.setattr(torch.optim.AdamW, "step", clock.delayed(torch.optim.AdamW.step))
    elif stage == step_timing.EVALUATE:
        monkeypatch.setattr(trainer, "evaluate", clock.delayed(evaluate))
    else:
        monkeypatch.setattr(CheckpointSaver, "save", clock.delayed(CheckpointSaver.save))


@pytest.mark.parametrize("stage", step_timing.STAGES)
def test_a_delay_in_a_stage_is_that_stages_and_no_others(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    clock, saved = Ahead(), tmp_path / "profile.json"
    monkeypatch.setattr(data_parallel, "Timeline", partial(Timeline, clock))
    monkeypatch.setattr(trainer, "StepProfiler", lambda exchange, path: StepProfiler(exchange, saved))
    delay(stage, clock, monkeypatch)
    ran = start(ground, tmp_path / "run", save_every=2)
    injected = clock.delays * DELAY
    assert clock.delays >= UPDATES // 2
    worker = measurements.read_worker(saved)
    assert [step.window.step_number for step in worker.steps] == list(range(UPDATES))
    result = dict.fromkeys(STEP_PARTS, 0)
    for update in worker.steps:
        own_part = step_timing.break_down(update.window).nanoseconds
        assert sum(own_part.values()) == update.window.wall
        result = {name: result[name] + own_part[name] for name in STEP_PARTS}
    outside = (stage == step_timing.EVALUATE) * DELAY  # the test rows are scored after the last update
    expected = {name: injected - outside if name == stage else 0 for name in STEP_PARTS}
    assert {name: result[name] / injected for name in STEP_PARTS} == pytest.approx(
        {name: value / injected for name, value in expected.items()}, abs=WITHIN
    )
    (output,) = ran.recorder.of("trained")
    (mean,) = output["stages"]
    share = {name: mean[name] / sum(mean[part] for part in STEP_PARTS) for name in STEP_PARTS}
    assert share == pytest.approx({name: float(name == stage) for name in STEP_PARTS}, abs=WITHIN)


def test_updates_follow_each_other_without_a_gap(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the updates of a start add up to its time, whatever is done between two steps."""
    monkeypatch.setattr(
        trainer, "StepProfiler", lambda exchange, path: StepProfiler(exchange, tmp_path / "profile.json")
    )
    start(ground, tmp_path / "run")
    windows = [step.window for step in measurements.read_worker(tmp_path / "profile.json").steps]
    assert [window.stop for window in windows[:-1]] == [window.start for window in windows[1:]]
    assert all(window.start <= span.start <= span.stop <= window.stop for window in windows for span in window.spans)


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
    monkeypatch.setattr(ProcessGroupTransport, "start_mean", clock.delayed(ProcessGroupTransport.start_mean))


def arrives_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The all-reduce takes long, and no computation is left."""
    start = ProcessGroupTransport.start_mean
    late = clock.delayed(lambda done: done.value())
    monkeypatch.setattr(ProcessGroupTransport, "start_mean", lambda by, flat: start(by, flat).then(late))


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
    exchange = DDPStrategy(network, touched_rows=False)
    exchange.timeline.now = clock
    inject(clock, monkeypatch)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    rows = make_rows(8)
    exchange.timeline.pop_spans()
    started_at = clock()
    step.run_step(exchange, optimizer, LOSS, [pick(rows, [0, 1, 2]), pick(rows, [3, 4])], pad_id=0)
    window = step_timing.StepWindow(0, started_at, clock(), tuple(exchange.timeline.pop_spans()))
    assert clock.delays > 0
    assert {span.kind for span in window.spans} >= {"forward", "backward", "optimizer", "comm_wait", "comm_async"}
    result = {
        name: value / (clock.delays * DELAY) for name, value in step_timing.break_down(window).nanoseconds.items()
    }
    assert result == pytest.approx({name: float(name == "gradient_sync") for name in STEP_PARTS}, abs=WITHIN)


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
    ("train", "inject", "minimum"),
    [
        ({"zero_stage": 3}, gathers_late, 10),  # two micro-batches: each gathers two layers twice, and the rest
        ({"zero_stage": 2}, shares_late, 6),
        ({"zero_stage": 3}, shares_late, 6),
        ({"tensor_parallel_size": 2}, sums_late, 16),  # two passes with four sums of each of two layers
    ],
)
def test_a_delay_in_what_parts_of_a_model_send_is_the_exchanges(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_workers: None,
    train: dict[str, int],
    inject: Callable[[Ahead, pytest.MonkeyPatch], None],
    minimum: int,
) -> None:
    """It happens inside of forward and backward passes."""
    clock, network = Ahead(), make_network(make_still_encoder(tmp_path))
    exchange = factory.build_strategy(network, TrainConfig(workers=2, **train))  # type: ignore[arg-type]
    exchange.timeline.now = clock
    inject(clock, monkeypatch)
    optimizer, rows = torch.optim.SGD(network.parameters(), lr=0.0), make_rows(8)
    exchange.timeline.pop_spans()
    started_at = clock()
    step.run_step(exchange, optimizer, LOSS, [pick(rows, [0, 1, 2]), pick(rows, [3, 4])], pad_id=0)
    window = step_timing.StepWindow(0, started_at, clock(), tuple(exchange.timeline.pop_spans()))
    assert clock.delays >= minimum
    result = {
        name: value / (clock.delays * DELAY) for name, value in step_timing.break_down(window).nanoseconds.items()
    }
    assert result == pytest.approx({name: float(name == "gradient_sync") for name in STEP_PARTS}, abs=WITHIN)
