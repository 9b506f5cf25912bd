"""Gradient exchange: DistributedDataParallel over the stock transport, or nothing for one worker."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class Exchange:
    """One model and its exchange. `model` is what passes call; it averages gradients over workers once per update."""

    def __init__(self, module: "torch.nn.Module", alive: Callable[[], None] = lambda: None):
        """`alive` is called before every pass: whoever watches over this worker sees that it goes on."""
        import torch.distributed as dist

        self.module = module
        self.alive = alive
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.world = dist.get_world_size() if self.distributed else 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.model: torch.nn.Module = module
        if self.distributed:
            from torch.nn.parallel import DistributedDataParallel

            # gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them all per update.
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True)

    def during(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a pass: only the last pass of an update exchanges."""
        if last or not self.distributed:
            return contextlib.nullcontext()
        from torch.nn.parallel import DistributedDataParallel

        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()

    def sum(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """`tensor` summed over the workers, in place."""
        if self.distributed:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def gather(self, values: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
        """Every worker's vector, of any length each, by rank; on every worker."""
        if not self.distributed:
            return [values]
        import torch
        import torch.distributed as dist

        own = torch.from_numpy(values)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        # Of one length, which the transport asks for: the longest's.
        longest = max(int(size) for size in sizes)
        parts = [own.new_zeros(longest) for _ in range(self.world)]
        dist.all_gather(parts, torch.nn.functional.pad(own, (0, longest - len(own))))
        return [part[: int(size)].numpy() for part, size in zip(parts, sizes, strict=True)]

    def from_rank_zero(self, value: int) -> int:
        """Rank 0's `value`, on every rank."""
        if not self.distributed:
            return value
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def barrier(self) -> None:
        if self.distributed:
            import torch.distributed as dist

            dist.barrier()
