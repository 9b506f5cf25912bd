"""Optimizer state in shares: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).

Each worker keeps the state of some parameters, updates these and gives them to the others. AdamW computes each element
by itself: the weights are those of the whole optimizer, bit for bit. A checkpoint has all of the state, so that a run
goes on with any number of workers, and with this setting on or off.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain.config import Recipe
from rtrain.training import optim

if TYPE_CHECKING:
    import torch

    from rtrain.exchange.gradients import Exchange

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the states that have the shape of their parameter; beside these there is `step`, one number."""
STEP_BYTES = 4


def build(
    exchange: "Exchange", recipe: Recipe, say: Callable[..., None] = lambda kind, **fields: None
) -> "torch.optim.Optimizer":
    """The optimizer of a run; `say` is told how large each worker's share of its state is, where it has one."""
    if not (recipe.train.sharded_optimizer and exchange.distributed):
        return optim.build(exchange.module, recipe.optim, beta2=recipe.beta2)
    optimizer: Any = optim.build(exchange.module, recipe.optim, sharded, beta2=recipe.beta2)
    optimizer.shards = Shards([one for group in optimizer.param_groups for one in group["params"]], exchange)
    say("sharded", state_bytes=optimizer.shards.state_bytes())
    return optimizer  # type: ignore[no-any-return]


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """The worker of each parameter: the largest comes first, each to the worker that has the fewest elements."""
    loads, found = [0] * world, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        found[place] = loads.index(min(loads))
        loads[found[place]] += sizes[place]
    return found


class Shards:
    """Which worker has which parameters."""

    def __init__(self, parameters: "Sequence[torch.nn.Parameter]", exchange: "Exchange"):
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

    def gather(self, state: dict[Any, Any]) -> None:
        """Give rank 0 the state of all parameters, in the processor's memory. Called on every rank."""
        import torch
        import torch.distributed as dist

        self.forget(state)
        exchange, device = self._exchange, next(iter(self._owner)).device
        # A parameter that never had a gradient has no state.
        kept = torch.tensor([one in state for one in self._owner], dtype=torch.int64, device=device)
        for (parameter, owner), there in zip(self._owner.items(), exchange.sum(kept).tolist(), strict=True):
            if not there or owner == 0:
                continue
            exchange.watch.alive()
            if exchange.rank == owner:
                for name in ("step", *MOMENTS):
                    dist.send(state[parameter][name], dst=0)
            elif exchange.rank == 0:
                found = {"step": torch.zeros((), dtype=torch.float32, device=device)}
                found |= {name: torch.empty_like(parameter, requires_grad=False) for name in MOMENTS}
                for value in found.values():
                    dist.recv(value, src=owner)
                state[parameter] = {name: value.cpu() for name, value in found.items()}


@contextlib.contextmanager
def whole(optimizer: "torch.optim.Optimizer") -> Iterator[None]:
    """Inside, rank 0's optimizer has all of the state, to save it. Entered on every rank at once."""
    shards: Shards | None = getattr(optimizer, "shards", None)
    if shards is None:
        yield
        return
    shards.gather(optimizer.state)
    try:
        yield
    finally:
        shards.forget(optimizer.state)


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
