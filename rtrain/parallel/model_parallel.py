"""A replica on several workers, which all have its rows and a part of its weights."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rtrain.parallel import dtensor_utils, mesh, transport
from rtrain.parallel.data_parallel import Replicas, Say, unsaid
from rtrain.parallel.timeline import WAITS
from rtrain.parallel.watchdog import Watch
from rtrain.parallel.zero import MOMENTS, STEP_BYTES

if TYPE_CHECKING:
    import torch


class Parted(Replicas):
    """A part of the weights on each of several workers, which together are a replica. Gradients are exchanged between
    replicas alone: by each worker with those that have the same part."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watch: Watch | None = None,
        say: Say = unsaid,
        *,
        device: "torch.device | None" = None,
        **sizes: int,
    ):
        """`say` is told how much of the optimizer's state each worker has. `device`: where the network is to compute,
        if not where it is: its parts are put there once they are cut. `sizes`: of the grid, as `mesh.grid` has them."""
        self._device = device or dtensor_utils.device(module)
        self._grid = mesh.grid(sizes, self._device.type)
        super().__init__(module, watch, say, self._grid.get_group(mesh.REPLICAS))
        self._within = mesh.replica(self._grid)

    def optimizer(self, made: Any) -> "torch.optim.Optimizer":
        import torch
        import torch.distributed as dist

        shares = [
            dtensor_utils.local(one)
            for one in self.module.parameters()
            if one.requires_grad and dtensor_utils.here(one)
        ]
        sizes = torch.zeros(self.workers, dtype=torch.int64)
        sizes[dist.get_rank()] = sum(len(MOMENTS) * one.nbytes + STEP_BYTES for one in shares)
        dist.all_reduce(sizes)
        self._say("sharded", state_bytes=sizes.tolist())
        return super().optimizer(made)

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        yield
        if last and self.distributed:
            with self.timeline.during(WAITS):
                transport.add_up([dtensor_utils.local(one) for one in self.collected()], self._group)
            self.multiply(1.0 / self.world)

    def agreed(self, value: int) -> int:
        import torch
        import torch.distributed as dist

        if self._within is None:
            return value
        found = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._within)
        return int(found.item())

    def stops(self, failed: bool) -> bool:
        return bool(self.agreed(int(failed)))
