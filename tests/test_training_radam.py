"""RAdam on AdamW's kernel: torch's own RAdam is the reference, in both of its phases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rtrain.checkpoints import checkpoint
from rtrain.checkpoints.checkpoint import State
from rtrain.config import Optim, Recipe
from rtrain.training import optim, radam
from tests.test_checkpoints_checkpoint import equal, make_network, train

SCALES = (1.0, 1e-3, 1e3, 1e8, 1e-20, 0.0)
"""Scales of gradients, a tensor each. A weight of 1 hides 1e-20, so those weights start at 0."""
PHASES = (5, 6, 50)
"""Updates: the last one that does not adapt, the first that does, and many."""
Pair = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def pair(start: list[torch.Tensor], weight_decay: float, beta2: float = 0.999) -> Pair:
    """Ours and torch's, each with its own copy of the weights, of which those of even number are decayed."""

    def groups() -> list[dict[str, Any]]:
        parts = [[torch.nn.Parameter(value.clone()) for value in start[first::2]] for first in (0, 1)]
        return [{"params": parts[0], "weight_decay": weight_decay}, {"params": parts[1], "weight_decay": 0.0}]

    ours = radam.optimizer_class()(groups(), betas=(0.9, beta2), fused=True)
    return ours, torch.optim.RAdam(groups(), betas=(0.9, beta2), decoupled_weight_decay=True)


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """In the order of `pair`'s `start`."""
    even, odd = (group["params"] for group in optimizer.param_groups)
    return [parameter for both in zip(even, odd, strict=True) for parameter in both]


def follow(both: Pair, updates: int, scales: tuple[float, ...] = SCALES) -> None:
    """The same gradients and learning rates for both, another one of each in every update."""
    draw = torch.Generator().manual_seed(7)
    for number in range(updates):
        for one, two, scale in zip(*map(weights, both), scales, strict=True):
            one.grad = scale * torch.randn(one.shape, generator=draw, dtype=torch.float64).to(one.dtype)
            two.grad = one.grad.clone()
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 - number / 60)
            optimizer.step()


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far one tensor is off: |difference| / |wanted|, in float64, whose squares of 1e-24 are not 0 yet."""
    assert found.dtype == wanted.dtype
    norm = wanted.detach().double().norm()
    assert norm > 0
    return float((found.detach().double() - wanted.detach().double()).norm() / norm)


# ----------------------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("updates", PHASES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zero", [False, True], ids=["drawn", "from zero"])
def test_the_weights_are_those_of_torch(zero: bool, dtype: torch.dtype, weight_decay: float, updates: int) -> None:
    draw = torch.Generator().manual_seed(3)
    start = [(0.0 if zero else 1.0) * torch.randn(40, 3, generator=draw, dtype=dtype) for _ in SCALES]
    both = pair(start, weight_decay)
    follow(both, updates)
    ours, theirs = map(weights, both)
    for found, wanted, first, scale in zip(ours, theirs, start, SCALES, strict=True):
        if scale == 0:
            assert torch.equal(found, wanted)
            continue
        # In float64 exactly, to rounding, but where gradients of 1e8 are left beside PLAIN: 1e8 / 2^60 = 1e-10.
        within = 1e-6 if dtype == torch.float32 else 1e-9 if scale == 1e8 else 1e-14
        assert apart(found, wanted) < within, scale
        if zero or scale >= 1:
            assert not torch.equal(found, first)
    assert torch.equal(ours[-1], start[-1])  # no gradient, no decay


def test_adamw_and_radam_are_apart() -> None:
    """What the figures above would be, were rectification forgotten, or the first updates adapted."""
    start = [torch.zeros(40, 3, dtype=torch.float64), torch.zeros(40, 3, dtype=torch.float64)]
    for updates in PHASES:
        both = pair(start, 0.0)
        plain = torch.optim.AdamW([{"params": group["params"]} for group in both[0].param_groups])
        follow((plain, both[1]), updates, (1.0, 1e-3))
        assert min(map(apart, weights(plain), weights(both[1]))) > 0.1


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.9999])
def test_the_length_of_the_average_is_heeded(beta2: float) -> None:
    both = pair([torch.zeros(9, 2, dtype=torch.float64)] * 2, 0.1, beta2)
    follow(both, 30, (1.0, 10.0))
    assert max(map(apart, *map(weights, both))) < 1e-14


def test_a_parameter_without_a_gradient_has_updates_of_its_own() -> None:
    """Torch counts the updates of each parameter: one that misses some adapts later than the others of its group."""
    both = pair([torch.ones(4, 2, dtype=torch.float64)] * 4, 0.1)
    draw = torch.Generator().manual_seed(1)
    for number in range(12):
        for place, (one, two) in enumerate(zip(*map(weights, both), strict=True)):
            one.grad = torch.randn(4, 2, generator=draw, dtype=torch.float64) if number % (place + 1) == 0 else None
            two.grad = None if one.grad is None else one.grad.clone()
        for optimizer in both:
            optimizer.step()
    steps = [[int(optimizer.state[value]["step"]) for value in weights(optimizer)] for optimizer in both]
    assert steps == [[12, 6, 4, 3]] * 2
    assert max(map(apart, *map(weights, both))) < 1e-14


def test_the_rectification_is_that_of_the_beta2_that_follows_the_rows() -> None:
    """Built from a recipe of 8 times the rows that beta2 is meant for: torch's RAdam with 0.999^8 is the reference."""
    made = Recipe.model_validate(
        {
            "name": "x",
            "task": "classification",
            "optim": {"name": "radam", "lr": 0.01, "beta2_scaling": "rows", "lr_rows": 8},
            "train": {"rows_per_update": 64},
        }
    )
    ours = make_network()
    train(ours, optim.build(ours, made.optim, beta2=made.beta2), 12)
    found = {}
    for beta2 in (0.999**8, 0.999):
        other = make_network()
        decays = [parameter.dim() > 1 for parameter in other.parameters()]
        groups = [
            {"params": [parameter], "weight_decay": made.optim.weight_decay * decayed}
            for parameter, decayed in zip(other.parameters(), decays, strict=True)
        ]
        train(other, torch.optim.RAdam(groups, 0.01, (0.9, beta2), decoupled_weight_decay=True), 12)
        found[beta2] = max(map(apart, ours.parameters(), other.parameters()))
    assert found[0.999**8] < 1e-5
    assert found[0.999] > 1e-3


# ------------------------------------------------------------------------------------------------------------- numbers


def test_the_rectification_as_worked_out_by_hand() -> None:
    assert [radam.rectified(update, 0.999) for update in range(1, 6)] == [None] * 5
    # Liu et al., section 4: rho_inf = 1999; at t = 6, rho = 1999 - 12 x 0.999^6 / (1 - 0.999^6) = 5.9941...
    kept = 0.999**6
    rho = 1999 - 12 * kept / (1 - kept)
    assert rho == pytest.approx(5.994, abs=1e-3)
    wanted = ((rho - 4) * (rho - 2) * 1999 / (1995 * 1997 * rho)) ** 0.5
    assert radam.rectified(6, 0.999) == pytest.approx(wanted, rel=1e-12)
    assert radam.rectified(100_000, 0.999) == pytest.approx(1.0, abs=1e-9)


@given(st.integers(1, 10_000), st.floats(0.9, 0.9999))
@settings(max_examples=200, deadline=None)
def test_a_step_is_never_longer_than_adamws_once_it_adapts(update: int, beta2: float) -> None:
    factor, later = radam.rectified(update, beta2), radam.rectified(update + 1, beta2)
    if factor is not None:
        assert later is not None
        assert 0 < factor <= later <= 1 + 1e-9


@given(st.integers(1, 10_000), st.floats(1e-9, 1.0), st.just(0.0) | st.floats(1e-12, 1.0))
@settings(max_examples=200, deadline=None)
def test_decay_is_that_of_the_learning_rate_as_it_was_set(update: int, lr: float, weight_decay: float) -> None:
    given_ = radam.numbers(update, lr, weight_decay, 1e-8, 0.999)
    assert given_.lr * given_.weight_decay == pytest.approx(lr * weight_decay, rel=1e-15, abs=0)


# ------------------------------------------------------------------------------------------------------------ the step


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def test_groups_keep_what_they_were_given() -> None:
    network = make_network()
    optimizer = optim.build(network, Optim(name="radam", lr=0.25, weight_decay=0.125))
    groups, before = list(optimizer.param_groups), settings_of(optimizer)
    assert [(group["lr"], group["weight_decay"], group["eps"]) for group in before] == [
        (0.25, 0.125, 1e-8),
        (0.25, 0.0, 1e-8),
    ]
    for _ in range(8):
        train(network, optimizer, 1)
        assert settings_of(optimizer) == before
        assert all(one is two for one, two in zip(optimizer.param_groups, groups, strict=True))


def test_groups_keep_what_they_were_given_also_where_a_step_fails() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = radam.optimizer_class()([weight], lr=0.5, fused=True)
    weight.grad = torch.ones(3, 2).to_sparse()
    before = settings_of(optimizer)
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert settings_of(optimizer) == before
    assert optimizer.param_groups[0]["params"] == [weight]


def test_a_closure_is_asked_for_the_gradients_of_this_update() -> None:
    network, other = make_network(), make_network()
    asked, plain = (optim.build(each, Optim(name="radam")) for each in (network, other))

    def closure() -> float:
        asked.zero_grad()
        loss = network(torch.arange(6.0).reshape(2, 3)).square().sum()
        loss.backward()
        return float(loss.detach())

    loss = asked.step(closure)
    train(other, plain, 1)
    assert loss > 0
    assert equal(network.state_dict(), other.state_dict())


def test_an_update_that_a_gradient_scaler_leaves_out_is_not_counted() -> None:
    ours, theirs = pair([torch.ones(3, 2), torch.ones(3, 2)], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for number in range(9):
        whole = number not in (2, 5)
        for one, two in zip(weights(ours), weights(theirs), strict=True):
            scaler.scale(one.sum() * (number + 1.0 if whole else float("inf"))).backward()
            two.grad = torch.full_like(two, number + 1.0)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        if whole:
            theirs.step()
    assert [int(ours.state[value]["step"]) for value in weights(ours)] == [7, 7]
    assert max(map(apart, weights(ours), weights(theirs))) < 1e-6


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("updates", [3, 5, 9])
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, updates: int) -> None:
    """From a moment of either phase, and from the last update of the first."""
    chosen = Optim(name="radam", lr=0.01)
    network = make_network()
    optimizer = optim.build(network, chosen)
    train(network, optimizer, updates)
    path = checkpoint.save(tmp_path, network, optimizer, State(updates, "00", None, None))
    other = make_network(seed=9)
    resumed = optim.build(other, chosen)
    checkpoint.load(path, other, resumed)
    forgetful = make_network(seed=9)
    checkpoint.load(path, forgetful)  # the weights alone: the phase would start anew
    train(network, optimizer, 6)
    train(other, resumed, 6)
    train(forgetful, optim.build(forgetful, chosen), 6)
    assert equal(other.state_dict(), network.state_dict())
    assert not equal(forgetful.state_dict(), network.state_dict())
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert equal(optimizer.state[one], resumed.state[two])
