"""Sharded optimizer state: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).

Each worker keeps the state of some parameters, updates them and broadcasts them. AdamW computes each element by itself,
so the weights equal those of an unsharded optimizer, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rtrain.parallel import collectives, dtensor_utils
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.profiler import COMM_WAIT

if TYPE_CHECKING:
    import torch

MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
"""State keys with the shape of the parameter; `step` is one more number."""
STEP_BYTES = 4


class ShardedOptimizerStrategy(DDPStrategy):
    """A full model on every worker, and a shard of the optimizer's state. `log_event` logs the size of each shard."""

    def make_optimizer(self, build: Any) -> "torch.optim.Optimizer":
        if not self.is_distributed:
            return super().make_optimizer(build)
        optimizer: Any = build(shard_optimizer_class)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.shards = ParameterShards(parameters, self)
        self._log_event("optimizer_sharding", state_bytes=optimizer.shards.state_bytes())
        return optimizer  # type: ignore[no-any-return]

    def gather_full_tensors(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        if not self.is_distributed:
            return super().gather_full_tensors(tensors)
        return dtensor_utils.gather_to_rank_zero(tensors, self.watchdog)


def assign_owners(sizes: Sequence[int], num_workers: int) -> list[int]:
    """Assign parameters to workers: the largest first, each to the worker with the fewest elements."""
    loads, owners = [0] * num_workers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class ParameterShards:
    def __init__(self, parameters: "Sequence[torch.nn.Parameter]", strategy: DDPStrategy):
        self._strategy = strategy
        owners = assign_owners([parameter.numel() for parameter in parameters], strategy.num_replicas)
        self._owner_by_parameter = dict(zip(parameters, owners, strict=True))

    def is_local(self, parameter: "torch.nn.Parameter") -> bool:
        return self._owner_by_parameter[parameter] == self._strategy.replica_rank

    def state_bytes(self) -> list[int]:
        """Bytes of optimizer state on each worker, by rank."""
        bytes_by_rank = [0] * self._strategy.num_replicas
        for parameter, owner in self._owner_by_parameter.items():
            bytes_by_rank[owner] += len(MOMENT_KEYS) * parameter.numel() * parameter.itemsize + STEP_BYTES
        return bytes_by_rank

    def broadcast_from_owners(self) -> None:
        """Broadcast each parameter from its owner."""
        tensors_by_rank: list[list[torch.Tensor]] = [[] for _ in range(self._strategy.num_replicas)]
        for parameter, owner in self._owner_by_parameter.items():
            tensors_by_rank[owner].append(parameter.detach())
        with self._strategy.timeline.span(COMM_WAIT):
            collectives.broadcast_from_owners(tensors_by_rank)

    def drop_remote_state(self, state: dict[Any, Any]) -> None:
        """Drop the optimizer's state of parameters that other workers own."""
        for parameter in [key for key in state if not self.is_local(key)]:
            del state[parameter]


def shard_optimizer_class(optimizer_class: "type[torch.optim.Optimizer]") -> "type[torch.optim.Optimizer]":
    """An optimizer like `optimizer_class` that updates only the parameters that this worker owns by its `shards`."""

    class ShardedOptimizer(optimizer_class):  # type: ignore[misc,valid-type]
        shards: ParameterShards
        param_groups: list[dict[str, Any]]

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            self.shards.drop_remote_state(self.state)  # a checkpoint holds the state of all parameters
            groups = self.param_groups
            self.param_groups = [
                {**group, "params": [parameter for parameter in group["params"] if self.shards.is_local(parameter)]}
                for group in groups
            ]
            try:
                loss = super().step(closure)
            finally:
                self.param_groups = groups
            self.shards.broadcast_from_owners()
            return loss

    return ShardedOptimizer
