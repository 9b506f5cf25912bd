"""AdamW and RAdam on the fused kernel, and the learning rate as a pure function of the update number."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rtrain.config import BETAS, Optim, Recipe
from rtrain.models import layerwise_lr
from rtrain.parallel import dtensor_utils
from rtrain.parallel.base import Exchange
from rtrain.trainer import radam

if TYPE_CHECKING:
    import torch

FACTOR = "lr_factor"
"""The key under which a parameter group keeps its factor of the learning rate (`optim.layer_decay`)."""


def build(
    model: "torch.nn.Module",
    optim: Optim,
    made: "Callable[[type[torch.optim.Optimizer]], type[torch.optim.Optimizer]]" = lambda kind: kind,
    *,
    beta2: float = BETAS[1],
) -> "torch.optim.Optimizer":
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) or RAdam, of all parameters that ask for a gradient.

    Decay is decoupled; one-dimensional parameters, biases and normalisations, have none. A group holds the parameters
    of one factor of the learning rate and one decay that are cut alike. Checkpoints hold no groups: these are a
    function of the model and the settings. `made` gives the class that is used in place of torch's or radam's. `beta2`
    is `Recipe.beta2` of the recipe that `optim` belongs to.
    """
    import torch

    found: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for parameter, factor in layerwise_lr.factors(model, optim.layer_decay).items():
        if parameter.requires_grad:
            decay = optim.weight_decay if parameter.dim() > 1 else 0.0
            found.setdefault((factor, decay), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": alike, "weight_decay": decay, "lr": optim.lr * factor, FACTOR: factor}
        for factor, decay in sorted(found, reverse=True)
        for alike in dtensor_utils.by_kind(found[factor, decay])
    ]
    kind: Any = made(radam.optimizer_class() if optim.name == "radam" else torch.optim.AdamW)
    return kind(groups, lr=optim.lr, betas=(BETAS[0], beta2), fused=True)  # type: ignore[no-any-return]


def of_run(exchange: Exchange, recipe: Recipe) -> "torch.optim.Optimizer":
    """The optimizer of a run on one of its workers."""
    return exchange.optimizer(lambda made: build(exchange.module, recipe.optim, made, beta2=recipe.beta2))


def set_rate(optimizer: "torch.optim.Optimizer", rate: float) -> None:
    """Give each group the learning rate `rate`, times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[FACTOR]


def learning_rate(recipe: Recipe, update: int, updates: int) -> float:
    """Learning rate of `update` (from 0) of `updates`: a linear rise to the peak over the warm-up, then the schedule.

    The peak is `recipe.peak_lr`: what `optim.lr` comes to at the run's rows_per_update.
    """
    optim, peak = recipe.optim, recipe.peak_lr
    warmup = math.ceil(optim.warmup * updates)
    if update < warmup:
        return peak * (update + 1) / warmup
    if optim.schedule == "constant":
        return peak
    left, of = updates - update, max(1, updates - warmup)
    if optim.schedule == "cosine":
        # (1 + cos(pi (1 - share left))) / 2, without the difference of two numbers that are nearly the same at the end
        return peak * math.sin(math.pi / 2 * left / of) ** 2
    return peak * left / of
