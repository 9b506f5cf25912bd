"""The optimizer's groups, and the learning rate as a table."""

from math import cos, log, pi, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rtrain.config import OptimConfig, Recipe
from rtrain.trainer import optimizers


def recipe(rows: int = 64, **chosen: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "x", "task": "classification", "optim": {"lr": 0.02, **chosen}, "train": {"global_batch_size": rows}}
    )


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
        # Loshchilov and Hutter 2017 (arXiv:1608.03983), one half period over the updates after the warm-up.
        (
            {"warmup": 0.3, "schedule": "cosine"},
            10,
            [1 / 3, 2 / 3, 1, *((1 + cos(pi * (u - 3) / 7)) / 2 for u in range(3, 10))],
        ),
        ({"warmup": 0.0, "schedule": "cosine"}, 4, [1, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2]),
        ({"warmup": 1.0, "schedule": "cosine"}, 4, [1 / 4, 2 / 4, 3 / 4, 1]),
        ({"warmup": 0.1, "schedule": "cosine"}, 1, [1]),
    ],
)
def test_learning_rate_rises_and_falls(settings: dict[str, Any], updates: int, expected: list[float]) -> None:
    instance = recipe(**settings)
    actual = [optimizers.learning_rate(instance, update, updates) / 0.02 for update in range(updates)]
    assert actual == pytest.approx(expected, rel=1e-12)


@given(
    st.sampled_from(["linear", "cosine", "constant"]),
    st.floats(0, 1),
    st.sampled_from(["none", "linear", "sqrt"]),
    st.integers(1, 4096),
    st.integers(1, 300),
)
@settings(max_examples=100, deadline=None)
def test_a_schedule_rises_to_the_scaled_peak_and_never_again(
    schedule: str, warmup: float, scaling: str, rows: int, updates: int
) -> None:
    instance = recipe(rows, schedule=schedule, warmup=warmup, lr_scaling=scaling, lr_reference_batch_size=32)
    ratio = rows / 32
    peak = 0.02 * {"none": 1.0, "linear": ratio, "sqrt": sqrt(ratio)}[scaling]
    rates = [optimizers.learning_rate(instance, update, updates) for update in range(updates)]
    assert max(rates) == pytest.approx(peak, rel=1e-12)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.frozen = torch.nn.Linear(2, 2)
        self.frozen.requires_grad_(False)


def test_only_matrices_are_decayed_and_frozen_weights_left_out() -> None:
    network = Network()
    decayed, plain = optimizers.build_optimizer(network, OptimConfig(lr=0.5, weight_decay=0.25)).param_groups
    assert [id(p) for p in decayed["params"]] == [id(network.linear.weight)]
    assert [id(p) for p in plain["params"]] == [id(network.linear.bias), id(network.norm.weight), id(network.norm.bias)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert decayed["lr"] == plain["lr"] == 0.5
    assert decayed["fused"]


@pytest.mark.parametrize("rows", [16, 128])
def test_squares_are_forgotten_after_as_many_rows_whatever_the_rows_of_an_update(rows: int) -> None:
    """k = 1 and k = 8 at 16 rows a pass: an eighth of the updates, and the same number of rows to the half."""
    instance = recipe(rows, beta2_scaling="rows", lr_reference_batch_size=16)
    assert rows * log(0.5) / log(instance.beta2) == pytest.approx(16 * log(0.5) / log(0.999), rel=1e-12)  # 11,084 rows
    assert recipe(rows).beta2 == recipe(rows, lr_reference_batch_size=16).beta2 == 0.999
    # 0.999^(1,600 / 16) = 0.905 and 0.999^(1,700 / 16) = 0.899: squares are never forgotten before the gradients.
    assert recipe(1600, beta2_scaling="rows", lr_reference_batch_size=16).beta2 == pytest.approx(0.9048, abs=1e-4)
    assert recipe(1700, beta2_scaling="rows", lr_reference_batch_size=16).beta2 == 0.9
