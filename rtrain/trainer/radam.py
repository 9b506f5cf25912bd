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

TRACTABLE = 5.0
"""Length of the approximated moving average above which torch.optim.RAdam rectifies (Liu et al.: 4)."""
PLAIN = 2.0**60
"""In place of eps, where nothing is to be adapted. A power of 2: no product with it is rounded. In float32 it absorbs
sqrt(v) up to 7e10 whole, in float64 to 1e-6 up to 1e12, and lr x PLAIN x m stays finite for gradients up to 1e19."""


class Numbers(NamedTuple):
    """The numbers that AdamW's kernel is given in one step."""

    lr: float
    weight_decay: float
    eps: float


def rectified(update: int, beta2: float) -> float | None:
    """The factor of the learning rate at an update (from 1), or None where it is too early to adapt."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * update * beta2**update / (1 - beta2**update)
    if length <= TRACTABLE:
        return None
    return float(((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5)


def numbers(update: int, lr: float, weight_decay: float, eps: float, beta2: float) -> Numbers:
    """The numbers that make AdamW's kernel do RAdam's update (counted from 1) with decoupled decay."""
    factor = rectified(update, beta2)
    if factor is None:
        return Numbers(lr * PLAIN, weight_decay / PLAIN, PLAIN)
    return Numbers(lr * factor, weight_decay / factor, eps / (1 - beta2**update) ** 0.5)


@cache
def optimizer_class() -> "type[torch.optim.AdamW]":
    """The optimizer, to be made with `fused=True`. Its state is AdamW's, and its groups keep what they were given."""
    import torch

    class RAdam(torch.optim.AdamW):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """One update. `closure`, where given, computes the loss and its gradients anew."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            own = self.param_groups
            self.param_groups = [part for group in own for part in self._parts(group)]
            try:
                super().step()
            finally:
                self.param_groups = own
            return loss

        def _parts(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
            """A group by the number of the coming update: parameters differ in it where some had no gradient once."""
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            begun = [parameter for parameter in parameters if self.state.get(parameter)]
            # Read in one piece: on a GPU each number alone would wait for all that is under way.
            steps = torch.stack([self.state[parameter]["step"] for parameter in begun]).tolist() if begun else []
            done = dict(zip(begun, steps, strict=True))
            by_update: dict[int, list[Any]] = {}
            for parameter in parameters:
                by_update.setdefault(1 + int(done.get(parameter, 0)), []).append(parameter)
            for update, chosen in by_update.items():
                given = numbers(update, group["lr"], group["weight_decay"], group["eps"], group["betas"][1])
                yield {**group, "params": chosen, **given._asdict()}

    return RAdam
