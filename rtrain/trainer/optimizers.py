"""AdamW and RAdam on the fused kernel, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rtrain.config import ADAM_BETAS, OptimConfig, Recipe
from rtrain.models import network_parts
from rtrain.parallel import dtensor_utils
from rtrain.parallel.base import Strategy

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
    for parameter, factor in network_parts.lr_factors(model, optim.layerwise_lr_decay).items():
        if parameter.requires_grad:
            decay = optim.weight_decay if parameter.dim() > 1 else 0.0
            parameters_by_group.setdefault((factor, decay), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": alike, "weight_decay": decay, "lr": optim.lr * factor, FACTOR_KEY: factor}
        for factor, decay in sorted(parameters_by_group, reverse=True)
        for alike in dtensor_utils.group_by_placement(parameters_by_group[factor, decay])
    ]
    run_class: Any = wrap_class(optimizer_class() if optim.name == "radam" else torch.optim.AdamW)
    return run_class(groups, lr=optim.lr, betas=(ADAM_BETAS[0], beta2), fused=True)  # type: ignore[no-any-return]


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


def decay_product(recipe: Recipe, steps: int, total_steps: int, factor: float = 1.0) -> float:
    """Total decay factor of a weight matrix without gradients after `steps` steps.

    Args:
        factor: The matrix's learning-rate factor (`optim.layerwise_lr_decay`).
    """
    decay = recipe.optim.weight_decay * factor
    return math.prod(1 - learning_rate(recipe, step, total_steps) * decay for step in range(steps))


RECTIFIED_LENGTH = 5.0
"""Length of the approximated moving average above which torch.optim.RAdam rectifies (Liu et al.: 4)."""
UNADAPTED_EPS = 2.0**60
"""eps for steps without adaptation. A power of 2, so no product with it is rounded. In float32 it absorbs sqrt(v) up to
7e10 exactly, in float64 to 1e-6 up to 1e12, and lr x UNADAPTED_EPS x m stays finite for gradients up to 1e19."""


class KernelArgs(NamedTuple):
    """Arguments of AdamW's kernel in one step."""

    lr: float
    weight_decay: float
    eps: float


def rectification(step: int, beta2: float) -> float | None:
    """Rectification factor of the learning rate at a step (from 1), or None before adaptation starts."""
    max_length = 2 / (1 - beta2) - 1
    length = max_length - 2 * step * beta2**step / (1 - beta2**step)
    if length <= RECTIFIED_LENGTH:
        return None
    return float(((length - 4) * (length - 2) * max_length / ((max_length - 4) * (max_length - 2) * length)) ** 0.5)


def kernel_args(step: int, lr: float, weight_decay: float, eps: float, beta2: float) -> KernelArgs:
    """Arguments that make AdamW's kernel compute RAdam's step (from 1) with decoupled decay."""
    factor = rectification(step, beta2)
    if factor is None:
        return KernelArgs(lr * UNADAPTED_EPS, weight_decay / UNADAPTED_EPS, UNADAPTED_EPS)
    return KernelArgs(lr * factor, weight_decay / factor, eps / (1 - beta2**step) ** 0.5)


# RAdam (Liu et al. 2020, arXiv:1908.03265) by torch's fused AdamW kernel, with other arguments: torch.optim.RAdam has
# no fused kernel, and reads and writes the moments several times in a step. Let m and v be the moments of step t,
# c1 = 1 - beta1^t and c2 = 1 - beta2^t. The kernel of AdamW does
#
#     w <- w (1 - lr wd) - lr (m / c1) / (sqrt(v) / sqrt(c2) + eps)
#
# and RAdam, once the variance of 1 / sqrt(v) is finite (`rectification` is not None), with the rectification r,
#
#     w <- w (1 - lr wd) - lr r (m / c1) sqrt(c2) / (sqrt(v) + eps)
#
# which is the kernel's with lr r for lr, wd / r for wd and eps / sqrt(c2) for eps. In earlier steps RAdam omits
# sqrt(v),
#
#     w <- w (1 - lr wd) - lr (m / c1)
#
# which is the kernel's with an eps so large that sqrt(v) does not count (UNADAPTED_EPS), lr times eps and wd / eps.


@cache
def optimizer_class() -> "type[torch.optim.AdamW]":
    """The optimizer, to be built with `fused=True`. Its state is AdamW's, and its groups keep their options."""
    import torch

    class RAdam(torch.optim.AdamW):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """Take one step. `closure` recomputes the loss and its gradients if given."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            groups = self.param_groups
            self.param_groups = [part for group in groups for part in self._split_by_step(group)]
            try:
                super().step()
            finally:
                self.param_groups = groups
            return loss

        def _split_by_step(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
            """Split a group by step number: parameters differ if some had no gradient once."""
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            parameters_with_state = [parameter for parameter in parameters if self.state.get(parameter)]
            # Read in one piece: on a GPU each single read would synchronize.
            steps = (
                torch.stack([self.state[parameter]["step"] for parameter in parameters_with_state]).tolist()
                if parameters_with_state
                else []
            )
            steps_done = dict(zip(parameters_with_state, steps, strict=True))
            by_step: dict[int, list[Any]] = {}
            for parameter in parameters:
                by_step.setdefault(1 + int(steps_done.get(parameter, 0)), []).append(parameter)
            for step_number, step_parameters in by_step.items():
                args = kernel_args(step_number, group["lr"], group["weight_decay"], group["eps"], group["betas"][1])
                yield {**group, "params": step_parameters, **args._asdict()}

    return RAdam
