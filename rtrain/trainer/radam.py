"""RAdam (Liu et al. 2020, arXiv:1908.03265) at AdamW's cost: torch's fused AdamW kernel, given other numbers.

torch.optim.RAdam has no fused kernel: it reads and writes all of the moments several times over in one step. With
m and v the moments of step t, c1 = 1 - beta1^t and c2 = 1 - beta2^t, the kernel of AdamW does

    w <- w (1 - lr wd) - lr (m / c1) / (sqrt(v) / sqrt(c2) + eps)

and RAdam, from the step on at which the variance of 1 / sqrt(v) is finite, with the rectification r of that step,

    w <- w (1 - lr wd) - lr r (m / c1) sqrt(c2) / (sqrt(v) + eps)

which is the same with lr r for lr, wd / r for wd and eps / sqrt(c2) for eps. Before, RAdam does not adapt at all,

    w <- w (1 - lr wd) - lr (m / c1)

which is the same with an eps so large that sqrt(v) is nothing beside it, lr as many times larger and wd smaller.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

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
