"""Loss scaling: its rules are torch's, the gradient is the one without it, and what is infinite trains nothing."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.checkpoint import format as checkpoint_format, loss_scale
from rtrain.checkpoint.loss_scale import Scale
from rtrain.config import Distill, Optim
from rtrain.core.ragged import Head, Tokens
from rtrain.parallel.base import Exchange
from rtrain.parallel.ddp import Replicated
from rtrain.trainer import losses, optimizers, step
from tests import test_training_loop
from tests.test_training_loop import UPDATES, fingerprint, start, weights_digest
from tests.test_training_step import (
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
from tests.test_training_step_workers import on_workers

ground = test_training_loop.ground  # a fixture
GROWS = 4


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


# --------------------------------------------------------------------------------------------------------------- rules


def test_the_rules_are_those_of_torch_s_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", GROWS)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale.FIRST, growth_interval=GROWS)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, found, draw = torch.optim.SGD([weight], lr=1.0), Scale(), random.Random(0)
    seen = set()
    for _ in range(300):
        finite = draw.random() < 0.84
        value = 1.0 if finite else draw.choice([float("inf"), float("nan")])
        optimizer.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found = found.after(finite=finite)
        assert (found.value, found.finite) == (scaler.get_scale(), scaler._get_growth_tracker())
        seen.add(found.value)
    assert len(seen) > 5
    assert loss_scale.LEAST < min(seen) < max(seen) < loss_scale.MOST


def test_a_scale_is_given_up_after_so_many_infinite_gradients_or_so_small_a_one() -> None:
    scale = Scale()
    for _ in range(loss_scale.TRIES - 1):
        scale = scale.after(finite=False)
    assert not scale.hopeless
    assert scale.after(finite=False).hopeless
    assert not scale.after(finite=True).after(finite=False).hopeless  # counted in a row
    assert not Scale(loss_scale.LEAST).hopeless
    assert Scale(loss_scale.LEAST).after(finite=False).hopeless


# ---------------------------------------------------------------------------------------------------------------- step


def scaled(
    network: torch.nn.Module, scale: float | None, clip_norm: float | None = None, precision: str = "fp32"
) -> tuple[step.Done, dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    passes, seen = cut(make_rows(13), [5, 1, 4, 3]), {}

    class Looks(step.Observer):
        def gradient(self, exchange: Exchange) -> None:
            seen.update(gradients(exchange.module))

    done = step.run_update(
        Replicated(network),
        optimizer,
        LOSS,
        passes,
        pad_id=0,
        precision=precision,
        scale=scale,
        clip_norm=clip_norm,
        observer=Looks(),
    )
    assert clip_norm or distance(gradients(network), seen) == 0.0
    return done, gradients(network)


def test_a_scale_is_not_seen_in_the_gradient_its_norm_or_the_loss(encoder: Path) -> None:
    network = make_network(encoder)
    plain, expected = scaled(network, None)
    for clip_norm in (None, plain.gradient_norm / 4):
        _, whole = scaled(network, None, clip_norm)
        done, found = scaled(network, 2.0**16, clip_norm)
        assert (done.loss, done.gradient_norm, done.skipped) == (plain.loss, plain.gradient_norm, False)
        assert distance(found, whole) == 0.0  # of a power of two, bit for bit
    assert norm(whole) < norm(expected) / 2


class Tiny(losses.RunLoss):
    """A loss whose gradient at the logits is below what fp16 can say, 6e-8."""

    def __call__(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return super().__call__(logits, tokens) * 1e-8


def test_without_a_scale_small_gradients_would_vanish_in_fp16(encoder: Path) -> None:
    network = make_network(encoder).float()
    lengths = []
    for scale in (None, loss_scale.FIRST):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        loss = Tiny(TASK, Distill(), Head())
        done = step.run_update(
            Replicated(network), optimizer, loss, [make_rows(13)], pad_id=0, precision="fp16", scale=scale
        )
        lengths.append(done.gradient_norm)
    exact = norm(scaled(network, None)[1]) * 1e-8
    assert lengths[0] == 0.0
    assert lengths[1] == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_an_infinite_gradient_trains_nothing(encoder: Path, name: Any) -> None:
    """With an optimizer that has begun, and one that has not; the gradient after it is right again."""
    network = make_network(encoder).float()
    optimizer, exchange = optimizers.build(network, Optim(name=name, lr=1e-2)), Replicated(network)
    rows = [make_rows(7)]

    def update(scale: float) -> step.Done:
        return step.run_update(exchange, optimizer, LOSS, rows, pad_id=0, precision="fp16", scale=scale, clip_norm=1.0)

    def everything() -> list[torch.Tensor]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [value.clone() for value in (*network.state_dict().values(), *moments)]

    for _ in range(2):
        before = everything()
        skipped = update(2.0**40)
        assert (skipped.skipped, skipped.rows) == (True, 7)
        assert all(torch.equal(one, other) for one, other in zip(everything(), before, strict=True))
        done = update(loss_scale.FIRST)
        assert not done.skipped
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
    whole, seen = step.run_update, list[int]()

    def run_update(exchange: Replicated, *rest: Any, scale: float, rows: int, **named: Any) -> step.Done:
        if rows not in seen:
            seen.append(rows)
        if seen.index(rows) in updates and scale > most:
            scale *= 2.0**60
        return whole(exchange, *rest, scale=scale, rows=rows, **named)

    monkeypatch.setattr(step, "run_update", run_update)


def test_an_update_is_done_again_with_half_the_scale(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = start(ground, tmp_path / "straight", precision="fp16", log_every=1)
    overflowing(monkeypatch, 2)
    ran = start(ground, tmp_path / "again", precision="fp16", log_every=1)
    assert ran.recorder.of("skipped") == [{"update": 2, "scale": 2.0**15}, {"update": 2, "scale": 2.0**14}]
    assert straight.recorder.of("skipped") == []
    for name in ("rows_seen", "real_tokens", "passes_per_update", "order_digest", "updates"):
        assert ran.recorder.of("trained")[0][name] == straight.recorder.of("trained")[0][name]
    assert ran.recorder.of("trained")[0]["loss_scale"] == 2.0**14
    # The same masks of dropout and the same rows: the loss is that of the run in which nothing was infinite.
    losses_of = [[event["loss"] for event in one.recorder.of("progress")] for one in (straight, ran)]
    assert losses_of[1] == pytest.approx(losses_of[0], rel=1e-2)
    assert losses_of[1][:3] == losses_of[0][:3]


def test_a_killed_run_in_fp16_resumes_to_the_undisturbed_run_bit_for_bit(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    with monkeypatch.context() as during:
        overflowing(during, 1)
        straight = start(ground, tmp_path / "straight", precision="fp16", save_every=1)
    with monkeypatch.context() as during:
        overflowing(during, 1)
        assert start(ground, tmp_path / "killed", precision="fp16", save_every=1, kill=3).outcome is None
    resumed = start(ground, tmp_path / "killed", precision="fp16", save_every=1)
    assert resumed.recorder.of("started")[0]["update"] == 3
    assert weights_digest(resumed.network) == weights_digest(straight.network)
    assert fingerprint(tmp_path / "killed", UPDATES) == fingerprint(tmp_path / "straight", UPDATES)
    states = [
        checkpoint_format.read_state(checkpoint_format.path_of(tmp_path / "straight" / "checkpoints", n))
        for n in (5, 6)
    ]
    # 2^14 from the second update on, in which it was halved twice; doubled after the fourth.
    assert [state.scale for state in states] == [Scale(2.0**15, 1), Scale(2.0**15, 2)]


def test_a_gradient_that_no_scale_helps_names_the_update(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, 1, most=0.0)
    with pytest.raises(step.NonFinite, match=r"^update 1 \("):
        start(ground, tmp_path, precision="fp16")
