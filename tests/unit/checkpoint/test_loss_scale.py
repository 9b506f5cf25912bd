"""Loss scaling: its rules are torch's, the gradient is the one without it, and what is infinite trains nothing."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.format import INITIAL_SCALE, MAX_CONSECUTIVE_OVERFLOWS, MAX_SCALE, MIN_SCALE, LossScale
from rtrain.config import DistillConfig, OptimConfig
from rtrain.core.ragged import Head, TokenBatch
from rtrain.parallel.base import Strategy
from rtrain.parallel.ddp import DDPStrategy
from rtrain.report import event_messages
from rtrain.trainer import losses, optimizers, step
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import (
    LOSS,
    TASK,
    cut,
    distance,
    gradients,
    make_network,
    make_rows,
    make_still_encoder,
    norm,
)
from tests.unit.trainer.test_step_workers import on_workers
from tests.unit.trainer.test_trainer import UPDATES, fingerprint, start, weights_digest

ground = test_trainer.ground  # a fixture
GROWS = 4


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


# --------------------------------------------------------------------------------------------------------------- rules


def test_the_rules_are_those_of_torch_s_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_format, "GROWTH_INTERVAL", GROWS)
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, growth_interval=GROWS)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, found, draw = torch.optim.SGD([weight], lr=1.0), LossScale(), random.Random(0)
    seen = set()
    for _ in range(300):
        finite = draw.random() < 0.84
        value = 1.0 if finite else draw.choice([float("inf"), float("nan")])
        optimizer.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found = found.next_scale(is_finite=finite)
        assert (found.value, found.finite_steps) == (scaler.get_scale(), scaler._get_growth_tracker())
        seen.add(found.value)
    assert len(seen) > 5
    assert MIN_SCALE < min(seen) < max(seen) < MAX_SCALE


def test_a_scale_is_given_up_after_so_many_infinite_gradients_or_so_small_a_one() -> None:
    scale = LossScale()
    for _ in range(MAX_CONSECUTIVE_OVERFLOWS - 1):
        scale = scale.next_scale(is_finite=False)
    assert not scale.is_exhausted
    assert scale.next_scale(is_finite=False).is_exhausted
    assert not scale.next_scale(is_finite=True).next_scale(is_finite=False).is_exhausted  # counted in a row
    assert not LossScale(MIN_SCALE).is_exhausted
    assert LossScale(MIN_SCALE).next_scale(is_finite=False).is_exhausted


# ---------------------------------------------------------------------------------------------------------------- step


def scaled(
    network: torch.nn.Module, scale: float | None, clip_norm: float | None = None, precision: str = "fp32"
) -> tuple[step.StepResult, dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    passes, seen = cut(make_rows(13), [5, 1, 4, 3]), {}

    class Looks(step.Observer):
        def on_gradient(self, exchange: Strategy) -> None:
            seen.update(gradients(exchange.module))

    done = step.StepRunner(
        DDPStrategy(network), optimizer, LOSS, pad_id=0, precision=precision, max_grad_norm=clip_norm, observer=Looks()
    ).run_step(passes, scale=scale)
    assert clip_norm or distance(gradients(network), seen) == 0.0
    return done, gradients(network)


def test_a_scale_is_not_seen_in_the_gradient_its_norm_or_the_loss(encoder: Path) -> None:
    network = make_network(encoder)
    plain, expected = scaled(network, None)
    for clip_norm in (None, plain.gradient_norm / 4):
        _, whole = scaled(network, None, clip_norm)
        done, found = scaled(network, 2.0**16, clip_norm)
        assert (done.loss, done.gradient_norm, done.is_skipped) == (plain.loss, plain.gradient_norm, False)
        assert distance(found, whole) == 0.0  # of a power of two, bit for bit
    assert norm(whole) < norm(expected) / 2


class Tiny(losses.RunLoss):
    """A loss whose gradient at the logits is below what fp16 can say, 6e-8."""

    def __call__(self, logits: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        return super().__call__(logits, tokens) * 1e-8


def test_without_a_scale_small_gradients_would_vanish_in_fp16(encoder: Path) -> None:
    network = make_network(encoder).float()
    lengths = []
    for scale in (None, INITIAL_SCALE):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        loss = Tiny(TASK, DistillConfig(), Head())
        done = step.StepRunner(DDPStrategy(network), optimizer, loss, pad_id=0, precision="fp16").run_step(
            [make_rows(13)], scale=scale
        )
        lengths.append(done.gradient_norm)
    exact = norm(scaled(network, None)[1]) * 1e-8
    assert lengths[0] == 0.0
    assert lengths[1] == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_an_infinite_gradient_trains_nothing(encoder: Path, name: Any) -> None:
    """With an optimizer that has begun, and one that has not; the gradient after it is right again."""
    network = make_network(encoder).float()
    optimizer, exchange = optimizers.build_optimizer(network, OptimConfig(name=name, lr=1e-2)), DDPStrategy(network)
    rows = [make_rows(7)]

    def update(scale: float) -> step.StepResult:
        return step.StepRunner(exchange, optimizer, LOSS, pad_id=0, precision="fp16", max_grad_norm=1.0).run_step(
            rows, scale=scale
        )

    def everything() -> list[torch.Tensor]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [value.clone() for value in (*network.state_dict().values(), *moments)]

    for _ in range(2):
        before = everything()
        skipped = update(2.0**40)
        assert (skipped.is_skipped, skipped.rows) == (True, 7)
        assert all(torch.equal(one, other) for one, other in zip(everything(), before, strict=True))
        done = update(INITIAL_SCALE)
        assert not done.is_skipped
        assert 0 < done.gradient_norm < 100
    assert all(bool(torch.isfinite(value).all()) for value in everything())


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_infinite_on_one_worker_is_skipped_on_all(world: int) -> None:
    results, _ = on_workers()
    found = [results[world, rank]["infinite"] for rank in range(world)]
    assert [one["skipped"] for one in found] == [[False, True, False]] * world
    assert [one["scales"] for one in found] == [[2.0**10, 2.0**9, 2.0**9]] * world
    assert [one["local"] for one in found] == [rank == world - 1 for rank in range(world)]
    assert len({one["weights"][1] for one in found}) == 1
    for one in found:
        assert one["weights"][1] == one["weights"][0] != one["weights"][2]
    assert len({one["weights"][2] for one in found}) == 1


# ---------------------------------------------------------------------------------------------------------------- loop


def overflowing(monkeypatch: pytest.MonkeyPatch, *updates: int, most: float = 2.0**14) -> None:
    """In these updates (by the order of their first tries in a process) a scale above `most` is too large."""
    whole, seen = step.StepRunner.run_step, list[int]()

    def run_update(
        runner: step.StepRunner, *rest: Any, scale: float, expected_row_sum: int, **named: Any
    ) -> step.StepResult:
        if expected_row_sum not in seen:
            seen.append(expected_row_sum)
        if seen.index(expected_row_sum) in updates and scale > most:
            scale *= 2.0**60
        return whole(runner, *rest, scale=scale, expected_row_sum=expected_row_sum, **named)

    monkeypatch.setattr(step.StepRunner, "run_step", run_update)


def test_an_update_is_done_again_with_half_the_scale(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = start(ground, tmp_path / "straight", precision="fp16", log_every=1)
    overflowing(monkeypatch, 2)
    ran = start(ground, tmp_path / "again", precision="fp16", log_every=1)
    assert ran.recorder.of("step_skipped") == [{"step": 2, "scale": 2.0**15}, {"step": 2, "scale": 2.0**14}]
    assert event_messages.FORMATTERS["step_skipped"](ran.recorder.of("step_skipped")[0]) == (
        "step 3: the gradient is infinite in fp16; once more with loss scale 32768"
    )
    assert straight.recorder.of("step_skipped") == []
    for name in ("rows_seen", "real_tokens", "micro_batches_per_step", "order_digest", "steps"):
        assert ran.recorder.of("trained")[0][name] == straight.recorder.of("trained")[0][name]
    assert ran.recorder.of("trained")[0]["loss_scale"] == 2.0**14
    # The same masks of dropout and the same rows: the loss is that of the run in which nothing was infinite.
    losses_of = [[event["loss"] for event in one.recorder.of("progress")] for one in (straight, ran)]
    assert losses_of[1] == pytest.approx(losses_of[0], rel=1e-2)
    assert losses_of[1][:3] == losses_of[0][:3]


def test_a_killed_run_in_fp16_resumes_to_the_undisturbed_run_bit_for_bit(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_format, "GROWTH_INTERVAL", 3)
    with monkeypatch.context() as during:
        overflowing(during, 1)
        straight = start(ground, tmp_path / "straight", precision="fp16", save_every=1)
    with monkeypatch.context() as during:
        overflowing(during, 1)
        assert start(ground, tmp_path / "killed", precision="fp16", save_every=1, kill=3).outcome is None
    resumed = start(ground, tmp_path / "killed", precision="fp16", save_every=1)
    assert resumed.recorder.of("started")[0]["step"] == 3
    assert weights_digest(resumed.network) == weights_digest(straight.network)
    assert fingerprint(tmp_path / "killed", UPDATES) == fingerprint(tmp_path / "straight", UPDATES)
    states = [
        checkpoint_format.read_state(checkpoint_format.checkpoint_path(tmp_path / "straight" / "checkpoints", n))
        for n in (5, 6)
    ]
    # 2^14 from the second update on, in which it was halved twice; doubled after the fourth.
    assert [state.scale for state in states] == [LossScale(2.0**15, 1), LossScale(2.0**15, 2)]


def test_a_gradient_that_no_scale_helps_names_the_update(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, 1, most=0.0)
    with pytest.raises(step.NonFinite, match=r"^step 2 \("):
        start(ground, tmp_path, precision="fp16")
