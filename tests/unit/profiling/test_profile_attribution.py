"""A delay in one stage of training is attributed to that stage, within 10 %, by the trainer's own profiler.

The delay is minutes of the worker's clock only: the noise of a busy machine is negligible.
"""

import time
from collections.abc import Callable, Iterator
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
from rtrain.parallel import layout, profiler
from rtrain.parallel.base import Strategy
from rtrain.parallel.collectives import ProcessGroupTransport
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.profiler import STEP_PARTS
from rtrain.profiling import profile
from rtrain.trainer import evaluate, step
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

    def delay(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Set the clock ahead at each call of the function `name` of `owner`."""
        monkeypatch.setattr(owner, name, self.delayed(getattr(owner, name)))


WORK: dict[str, tuple[Any, str]] = {
    profiler.FORWARD: (step, "forward"),
    profiler.BACKWARD: (torch.Tensor, "backward"),
    profiler.OPTIMIZER: (torch.optim.AdamW, "step"),
    profiler.EVALUATE: (evaluate, "score_rows"),
    profiler.CHECKPOINT: (CheckpointSaver, "save"),
}
"""The function that does a stage's work, by its owner; batches come from the test itself."""


@pytest.mark.parametrize("stage", profiler.STAGES)
def test_a_delay_in_a_stage_is_that_stages_and_no_others(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Each time that the stage does its work, its clock goes ahead."""
    clock, saved, plan = Ahead(), tmp_path / "profile.json", plan_worker_batch
    if stage == profiler.GET_BATCH:
        plan = clock.delayed(plan)
    else:
        clock.delay(monkeypatch, *WORK[stage])
    ran = start(ground, tmp_path / "run", save_every=2, now=clock, plan=plan, profile=saved)
    injected = clock.delays * DELAY
    assert clock.delays >= UPDATES // 2
    worker = profile.read_worker(saved)
    windows = [update.window for update in worker.steps]
    assert [window.step_number for window in windows] == list(range(UPDATES))
    # Updates follow each other without a gap, whatever is done between two steps.
    assert [window.stop for window in windows[:-1]] == [window.start for window in windows[1:]]
    assert all(window.start <= span.start <= span.stop <= window.stop for window in windows for span in window.spans)
    result = dict.fromkeys(STEP_PARTS, 0)
    for window in windows:
        own_part = profiler.break_down(window).nanoseconds
        assert sum(own_part.values()) == window.wall
        result = {name: result[name] + own_part[name] for name in STEP_PARTS}
    outside = (stage == profiler.EVALUATE) * DELAY  # the test rows are scored after the last update
    expected = {name: injected - outside if name == stage else 0 for name in STEP_PARTS}
    assert {name: result[name] / injected for name in STEP_PARTS} == pytest.approx(
        {name: value / injected for name, value in expected.items()}, abs=WITHIN
    )
    (output,) = ran.recorder.of("trained")
    (mean,) = output["stages"]
    share = {name: mean[name] / sum(mean[part] for part in STEP_PARTS) for name in STEP_PARTS}
    assert share == pytest.approx({name: float(name == stage) for name in STEP_PARTS}, abs=WITHIN)


# --------------------------------------------------------------------------------------------------------- an exchange


@pytest.fixture
def two_workers() -> Iterator[None]:
    """This process is the first of two workers, by torch's process group for tests: the other one is as fast."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def arrives_late(clock: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The all-reduce takes long, and no computation is left."""
    start = ProcessGroupTransport.start_mean
    late = clock.delayed(lambda done: done.value())
    monkeypatch.setattr(ProcessGroupTransport, "start_mean", lambda by, flat: start(by, flat).then(late))


def delayed_step(exchange: Strategy, clock: Ahead) -> tuple[profiler.StepWindow, dict[str, float]]:
    """A step of two micro-batches: its window, and its parts over all delays."""
    exchange.timeline.now = clock
    optimizer, rows = torch.optim.SGD(exchange.module.parameters(), lr=0.0), make_rows(8)
    exchange.timeline.pop_spans()
    started_at = clock()
    step.StepRunner(exchange, optimizer, LOSS, pad_id=0).run_step([pick(rows, [0, 1, 2]), pick(rows, [3, 4])])
    window = profiler.StepWindow(0, started_at, clock(), tuple(exchange.timeline.pop_spans()))
    parts = profiler.break_down(window).nanoseconds
    return window, {name: value / (clock.delays * DELAY) for name, value in parts.items()}


SYNC_ALONE = {name: float(name == profiler.GRADIENT_SYNC) for name in STEP_PARTS}


@pytest.mark.parametrize(
    "inject",
    [
        lambda clock, patch: clock.delay(patch, ProcessGroupTransport, "start_mean"),  # the worker waits to start it
        arrives_late,
        lambda clock, patch: clock.delay(patch, dist, "all_reduce"),  # another worker is late with its counts
    ],
    ids=["starts late", "arrives late", "counts late"],
)
def test_a_delay_in_an_exchange_is_the_exchanges(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_workers: None,
    inject: Callable[[Ahead, pytest.MonkeyPatch], None],
) -> None:
    clock = Ahead()
    exchange = DDPStrategy(make_network(make_still_encoder(tmp_path)), touched_rows=False)
    inject(clock, monkeypatch)
    window, result = delayed_step(exchange, clock)
    assert clock.delays > 0
    assert {span.kind for span in window.spans} >= {"forward", "backward", "optimizer", "comm_wait", "comm_async"}
    assert result == pytest.approx(SYNC_ALONE, abs=WITHIN)


@pytest.mark.parametrize(
    ("train", "owner", "name", "minimum"),
    [
        # A layer's weights are late. Two micro-batches: each gathers two layers twice, and the rest.
        ({"zero_stage": 3}, dist, "all_gather_single", 10),
        ({"zero_stage": 2}, dist, "reduce_scatter_single", 6),  # a layer's gradient is late
        ({"zero_stage": 3}, dist, "reduce_scatter_single", 6),
        ({"tensor_parallel_size": 2}, collectives, "wait_tensor", 16),  # two passes, four sums of each of two layers
    ],
)
def test_a_delay_in_what_parts_of_a_model_send_is_the_exchanges(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_workers: None,
    train: dict[str, Any],
    owner: Any,
    name: str,
    minimum: int,
) -> None:
    """It happens inside of forward and backward passes."""
    clock, network = Ahead(), make_network(make_still_encoder(tmp_path))
    clock.delay(monkeypatch, owner, name)
    exchange = layout.build_strategy(network, TrainConfig(workers=2, **train))
    _, result = delayed_step(exchange, clock)
    assert clock.delays >= minimum
    assert result == pytest.approx(SYNC_ALONE, abs=WITHIN)
