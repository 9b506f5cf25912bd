"""Model parallelism: a replica on several workers, which all have its rows and a part of its weights."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rtrain.parallel import dtensor_utils, mesh, transport
from rtrain.parallel.data_parallel import EventLogger, SingleReplica, ignore_event
from rtrain.parallel.timeline import COMM_WAIT
from rtrain.parallel.watchdog import Watchdog
from rtrain.parallel.zero import MOMENT_KEYS, STEP_BYTES

if TYPE_CHECKING:
    import torch


class ModelParallelStrategy(SingleReplica):
    """A part of the weights on each of several workers, which form a replica. Each worker synchronizes gradients with
    the workers of other replicas that have the same part."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        *,
        device: "torch.device | None" = None,
        **sizes: int,
    ):
        """Initialize the strategy.

        Args:
            log_event: Logs the size of the optimizer's state on each worker.
            device: The training device, if the network is not on it; its parts are moved once they are sharded.
            sizes: Sizes of the mesh, as for `mesh.make_mesh`.
        """
        self._device = device or dtensor_utils.module_device(module)
        self._mesh = mesh.make_mesh(sizes, self._device.type)
        super().__init__(module, watchdog, log_event, self._mesh.get_group(mesh.REPLICAS))
        self._replica_group = mesh.replica_group(self._mesh)

    def make_optimizer(self, build: Any) -> "torch.optim.Optimizer":
        import torch
        import torch.distributed as dist

        local_tensors = [
            dtensor_utils.local_tensor(parameter)
            for parameter in self.module.parameters()
            if parameter.requires_grad and dtensor_utils.is_materialized(parameter)
        ]
        sizes = torch.zeros(self.num_workers, dtype=torch.int64)
        sizes[dist.get_rank()] = sum(len(MOMENT_KEYS) * tensor.nbytes + STEP_BYTES for tensor in local_tensors)
        dist.all_reduce(sizes)
        self._log_event("optimizer_sharding", state_bytes=sizes.tolist())
        return super().make_optimizer(build)

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        yield
        if is_last and self.is_distributed:
            with self.timeline.span(COMM_WAIT):
                transport.all_reduce_sum(
                    [dtensor_utils.local_tensor(gradient) for gradient in self.local_gradients()], self._group
                )
            self.scale_gradients(1.0 / self.num_replicas)

    def replica_max(self, value: int) -> int:
        import torch
        import torch.distributed as dist

        if self._replica_group is None:
            return value
        maximum = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self._replica_group)
        return int(maximum.item())

    def any_failed(self, has_failed: bool) -> bool:
        return bool(self.replica_max(int(has_failed)))
