"""The optimizer's groups, and the learning rate as a table."""

import pytest
import torch

from rtrain.config import Optim
from rtrain.training import optim


@pytest.mark.parametrize(
    ("settings", "updates", "expected"),
    [
        # ceil(0.3 x 10) = 3 updates of warm-up; then 1 - (u - 3) / 7 of the peak.
        ({"warmup": 0.3}, 10, [1 / 3, 2 / 3, 1, *((10 - u) / 7 for u in range(3, 10))]),
        ({"warmup": 0.3, "schedule": "constant"}, 10, [1 / 3, 2 / 3, *([1] * 8)]),
        ({"warmup": 0.0}, 4, [1, 3 / 4, 2 / 4, 1 / 4]),
        ({"warmup": 0.0, "schedule": "constant"}, 3, [1, 1, 1]),
        ({"warmup": 1.0}, 4, [1 / 4, 2 / 4, 3 / 4, 1]),
        ({"warmup": 0.01}, 10, [1, *((10 - u) / 9 for u in range(1, 10))]),  # a single update of warm-up
        ({"warmup": 0.1}, 1, [1]),
    ],
)
def test_learning_rate_rises_and_falls(settings: dict[str, object], updates: int, expected: list[float]) -> None:
    made = Optim.model_validate({"lr": 0.02, **settings})
    found = [optim.learning_rate(made, update, updates) / 0.02 for update in range(updates)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_learning_rate_is_never_zero_or_above_its_peak() -> None:
    for updates in (1, 2, 3, 10, 97):
        for warmup in (0.0, 0.1, 0.5, 1.0):
            made = Optim(lr=0.02, warmup=warmup)
            rates = [optim.learning_rate(made, update, updates) for update in range(updates)]
            assert min(rates) > 0
            assert max(rates) == pytest.approx(0.02)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.frozen = torch.nn.Linear(2, 2)
        self.frozen.requires_grad_(False)


def test_only_matrices_are_decayed_and_frozen_weights_left_out() -> None:
    network = Network()
    decayed, plain = optim.build(network, Optim(lr=0.5, weight_decay=0.25)).param_groups
    assert [id(p) for p in decayed["params"]] == [id(network.linear.weight)]
    assert [id(p) for p in plain["params"]] == [id(network.linear.bias), id(network.norm.weight), id(network.norm.bias)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert decayed["lr"] == plain["lr"] == 0.5
    assert decayed["fused"]


def test_a_step_without_gradient_only_decays() -> None:
    network = Network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = optim.build(network, Optim(lr=0.5, weight_decay=0.25))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # AdamW: w - lr x decay x w = w x (1 - 0.125), and no step where the gradient is 0.
    for name, value in network.state_dict().items():
        factor = 0.875 if name == "linear.weight" else 1.0
        assert torch.allclose(value, before[name] * factor, rtol=1e-6, atol=0), name


def test_the_first_step_is_as_long_as_the_learning_rate() -> None:
    network = Network()
    before = network.linear.weight.detach().clone()
    optimizer = optim.build(network, Optim(lr=1e-3, weight_decay=0.0))
    network.linear.weight.grad = torch.tensor([[5.0, -0.2, 1e3], [1e-2, -7.0, 3.0]])
    optimizer.step()
    # AdamW's first moments are g and g^2 after bias correction: every weight moves by lr x sign(g).
    moved = network.linear.weight.detach() - before
    assert torch.allclose(moved, -1e-3 * torch.sign(network.linear.weight.grad), rtol=1e-3, atol=0)
