"""Optimizer state in shares: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).

Each worker keeps the state of some parameters, updates these and gives them to the others. AdamW computes each element
by itself: the weights are those of the whole optimizer, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rtrain.parallel import dtensor_utils
from rtrain.parallel.ddp import Replicated

if TYPE_CHECKING:
    import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the states that have the shape of their parameter; beside these there is `step`, one number."""
STEP_BYTES = 4


class OptimizerShares(Replicated):
    """A whole model on every worker, and a share of the optimizer's state. `say` is told how large each share is."""

    def optimizer(self, made: Any) -> "torch.optim.Optimizer":
        if not self.distributed:
            return super().optimizer(made)
        optimizer: Any = made(sharded)
        optimizer.shards = Shards([one for group in optimizer.param_groups for one in group["params"]], self)
        self._say("sharded", state_bytes=optimizer.shards.state_bytes())
        return optimizer  # type: ignore[no-any-return]

    def whole(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        return dtensor_utils.from_holders(tensors, self.watch) if self.distributed else super().whole(tensors)


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """The worker of each parameter: the largest comes first, each to the worker that has the fewest elements."""
    loads, found = [0] * world, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        found[place] = loads.index(min(loads))
        loads[found[place]] += sizes[place]
    return found


class Shards:
    """Which worker has which parameters."""

    def __init__(self, parameters: "Sequence[torch.nn.Parameter]", exchange: Replicated):
        self._exchange = exchange
        chosen = owners([parameter.numel() for parameter in parameters], exchange.world)
        self._owner = dict(zip(parameters, chosen, strict=True))

    def own(self, parameter: "torch.nn.Parameter") -> bool:
        return self._owner[parameter] == self._exchange.rank

    def state_bytes(self) -> list[int]:
        """Bytes of optimizer state that each worker keeps, by rank."""
        found = [0] * self._exchange.world
        for parameter, owner in self._owner.items():
            found[owner] += len(MOMENTS) * parameter.numel() * parameter.itemsize + STEP_BYTES
        return found

    def spread(self) -> None:
        """Send each parameter from its owner to all other workers."""
        owned: list[list[torch.Tensor]] = [[] for _ in range(self._exchange.world)]
        for parameter, owner in self._owner.items():
            owned[owner].append(parameter.detach())
        self._exchange.spread(owned)

    def forget(self, state: dict[Any, Any]) -> None:
        """Drop the optimizer's state of parameters that others own."""
        for parameter in [one for one in state if not self.own(one)]:
            del state[parameter]


def sharded(kind: "type[torch.optim.Optimizer]") -> "type[torch.optim.Optimizer]":
    """An optimizer like `kind` that updates the parameters which its `shards` say are this worker's."""

    class Sharded(kind):  # type: ignore[misc,valid-type]
        shards: Shards
        param_groups: list[dict[str, Any]]

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            self.shards.forget(self.state)  # a checkpoint holds the state of all parameters
            groups = self.param_groups
            self.param_groups = [
                {**group, "params": [one for one in group["params"] if self.shards.own(one)]} for group in groups
            ]
            try:
                loss = super().step(closure)
            finally:
                self.param_groups = groups
            self.shards.spread()
            return loss

    return Sharded
