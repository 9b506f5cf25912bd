"""AdamW and RAdam on the fused kernel, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rtrain.config import ADAM_BETAS, OptimConfig, Recipe
from rtrain.models import layerwise_lr
from rtrain.parallel import dtensor_utils
from rtrain.parallel.base import Strategy
from rtrain.trainer import radam

if TYPE_CHECKING:
    import torch

FACTOR_KEY = "lr_factor"
"""Key of a parameter group's learning-rate factor (`optim.layerwise_lr_decay`)."""


def build_optimizer(
    model: "torch.nn.Module",
    optim: OptimConfig,
    wrap_class: "Callable[[type[torch.optim.Optimizer]], type[torch.optim.Optimizer]]" = lambda kind: kind,
    *,
    beta2: float = ADAM_BETAS[1],
) -> "torch.optim.Optimizer":
    """Build AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) or RAdam over all trained parameters.

    Weight decay is decoupled; one-dimensional parameters, biases and normalizations have none. A group holds the
    parameters with the same learning-rate factor, decay and sharding. Checkpoints hold no groups, since the model and
    the settings determine them.

    Args:
        wrap_class: Returns the class to use in place of torch's or radam's.
        beta2: `Recipe.beta2` of the recipe of `optim`.
    """
    import torch

    parameters_by_group: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for parameter, factor in layerwise_lr.lr_factors(model, optim.layerwise_lr_decay).items():
        if parameter.requires_grad:
            decay = optim.weight_decay if parameter.dim() > 1 else 0.0
            parameters_by_group.setdefault((factor, decay), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": alike, "weight_decay": decay, "lr": optim.lr * factor, FACTOR_KEY: factor}
        for factor, decay in sorted(parameters_by_group, reverse=True)
        for alike in dtensor_utils.group_by_placement(parameters_by_group[factor, decay])
    ]
    optimizer_class: Any = wrap_class(radam.optimizer_class() if optim.name == "radam" else torch.optim.AdamW)
    return optimizer_class(groups, lr=optim.lr, betas=(ADAM_BETAS[0], beta2), fused=True)  # type: ignore[no-any-return]


def build_run_optimizer(strategy: Strategy, recipe: Recipe) -> "torch.optim.Optimizer":
    """Build the optimizer of a run on one of its workers."""
    return strategy.make_optimizer(
        lambda made: build_optimizer(strategy.module, recipe.optim, made, beta2=recipe.beta2)
    )


def set_learning_rate(optimizer: "torch.optim.Optimizer", rate: float) -> None:
    """Set the learning rate of each group to `rate` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[FACTOR_KEY]


def learning_rate(recipe: Recipe, step: int, total_steps: int) -> float:
    """Learning rate of `step` (from 0) of `total_steps`: linear warm-up to the peak, then the schedule.

    The peak is `recipe.peak_lr`: `optim.lr`, scaled to the run's global_batch_size.
    """
    optim, peak = recipe.optim, recipe.peak_lr
    warmup_steps = math.ceil(optim.warmup * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if optim.schedule == "constant":
        return peak
    remaining_steps, decay_steps = total_steps - step, max(1, total_steps - warmup_steps)
    if optim.schedule == "cosine":
        # (1 + cos(pi (1 - share left))) / 2, without the difference of two numbers that are nearly the same at the end
        return peak * math.sin(math.pi / 2 * remaining_steps / decay_steps) ** 2
    return peak * remaining_steps / decay_steps
