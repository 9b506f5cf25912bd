"""RAdam on AdamW's kernel: torch's own RAdam is the reference, in both of its phases."""

from typing import Any

import pytest
import torch

from rtrain.config import OptimConfig
from rtrain.trainer import optimizers
from tests.unit.checkpoint.test_format import make_network, train

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

    ours = optimizers.optimizer_class()(groups(), betas=(0.9, beta2), fused=True)
    return ours, torch.optim.RAdam(groups(), betas=(0.9, beta2), decoupled_weight_decay=True)


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """In the order of `pair`'s `start`."""
    even, odd = (group["params"] for group in optimizer.param_groups)
    return [parameter for two in zip(even, odd, strict=True) for parameter in two]


def follow(both: Pair, updates: int, scales: tuple[float, ...] = SCALES) -> None:
    """The same gradients and learning rates for both, another one of each in every update."""
    draw = torch.Generator().manual_seed(7)
    for number in range(updates):
        for item, two, scale in zip(*map(weights, both), scales, strict=True):
            item.grad = scale * torch.randn(item.shape, generator=draw, dtype=torch.float64).to(item.dtype)
            two.grad = item.grad.clone()
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
    two = pair(start, weight_decay)
    follow(two, updates)
    ours, theirs = map(weights, two)
    for actual, requested, first, scale in zip(ours, theirs, start, SCALES, strict=True):
        if scale == 0:
            assert torch.equal(actual, requested)
            continue
        # In float64 exactly, to rounding, but where gradients of 1e8 are left beside PLAIN: 1e8 / 2^60 = 1e-10.
        within = 1e-6 if dtype == torch.float32 else 1e-9 if scale == 1e8 else 1e-14
        assert apart(actual, requested) < within, scale
        if zero or scale >= 1:
            assert not torch.equal(actual, first)
    assert torch.equal(ours[-1], start[-1])  # no gradient, no decay


def test_a_parameter_without_a_gradient_has_updates_of_its_own() -> None:
    """Torch counts the updates of each parameter: one that misses some adapts later than the others of its group."""
    both = pair([torch.ones(4, 2, dtype=torch.float64)] * 4, 0.1)
    draw = torch.Generator().manual_seed(1)
    for number in range(12):
        for place, (item, two) in enumerate(zip(*map(weights, both), strict=True)):
            item.grad = torch.randn(4, 2, generator=draw, dtype=torch.float64) if number % (place + 1) == 0 else None
            two.grad = None if item.grad is None else item.grad.clone()
        for optimizer in both:
            optimizer.step()
    steps = [[int(optimizer.state[value]["step"]) for value in weights(optimizer)] for optimizer in both]
    assert steps == [[12, 6, 4, 3]] * 2
    assert max(map(apart, *map(weights, both))) < 1e-14


# ------------------------------------------------------------------------------------------------------------ the step


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def test_groups_keep_what_they_were_given() -> None:
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig(name="radam", lr=0.25, weight_decay=0.125))
    groups, before = list(optimizer.param_groups), settings_of(optimizer)
    assert [(group["lr"], group["weight_decay"], group["eps"]) for group in before] == [
        (0.25, 0.125, 1e-8),
        (0.25, 0.0, 1e-8),
    ]
    for _ in range(8):
        train(network, optimizer, 1)
        assert settings_of(optimizer) == before
        assert all(item is two for item, two in zip(optimizer.param_groups, groups, strict=True))
