"""Gradient exchange: DistributedDataParallel over one of the transports, or nothing for one worker."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain import ray_internals
from rtrain.exchange import compression, transport
from rtrain.exchange.alive import Watch
from rtrain.exchange.own import Own, squared
from rtrain.exchange.spent import Spent
from rtrain.exchange.timeline import BACKWARD, WAITS, Timeline
from rtrain.exchange.touched_rows import TouchedRows, table_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class Exchange:
    """One model and its exchange. `model` is what passes call; it averages gradients over workers once per update."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watch: Watch | None = None,
        say: Callable[..., None] = lambda kind, **fields: None,
        *,
        touched_rows: bool = True,
        by: str = "stock",
        compressed: str = "none",
    ):
        """`watch` is told before every pass that this worker goes on. `say` is told, on every worker, by which
        transport gradients go and what compression costs. `touched_rows`: of the word embedding's gradient, exchange
        the rows that the update touched. `by`, `compressed`: as `train.transport` and `train.gradient_compression`."""
        import torch.distributed as dist

        self.module = module
        self.timeline = Timeline()
        self.watch, self._say, self._spent, self.own = watch or Watch(), say, Spent(self.timeline), Own()
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.world = dist.get_world_size() if self.distributed else 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.model: torch.nn.Module = module
        table = table_of(module) if touched_rows else None
        self.rows = TouchedRows(table[1]) if table else None
        if self.distributed:
            from torch.nn.parallel import DistributedDataParallel

            if table:
                ray_internals.leave_out(module, [table[0]])
            # gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them all per update.
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True)
            ray_internals.take_times(self.model)
            self._transport = self._carried(by, compressed)
            state = (self._transport, self._spent, self.own)
            self.model.register_comm_hook(state, lambda state, bucket: _started(state, bucket))

    def _carried(self, by: str, compressed: str) -> "transport.Transport":
        """What takes DistributedDataParallel's buckets. Asked for on every worker."""
        sent = compression.sent(compressed)
        made: transport.Transport = transport.Stock(self.world, sent)
        if by == "shared_memory" or (by == "auto" and self.world == transport.SAME_BITS):
            found = transport.share([one for one in self._others() if one.requires_grad], self.rank, self.world, sent)
            reason = found if isinstance(found, str) else None
            made = made if isinstance(found, str) else found
            self._say("transport", asked=by, used=made.name, reason=reason)
        return made if sent is None else compression.Compared(made, self.world)

    def alive(self) -> None:
        """Say that this worker goes on. Called before every pass."""
        self.watch.passes()

    def begin(self, measures: bool = False) -> None:
        """Prepare for an update. Called before its first pass. `measures`: `own_square` will be asked for."""
        self.own.begin(measures)
        if self.rows is not None:
            self.rows.begin()

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        """Wrap a pass. Only the last pass of an update exchanges."""
        from torch.nn.parallel import DistributedDataParallel

        alone = self.model.no_sync if not last and isinstance(self.model, DistributedDataParallel) else None
        if self.rows is not None:
            self.rows.gathers = True
        try:
            with alone() if alone else contextlib.nullcontext():
                yield
        finally:
            if self.rows is not None:
                self.rows.gathers = False
        if self.rows is not None and last:
            with self._spent.waiting() if self.distributed else self.timeline.during(BACKWARD):
                self.rows.complete(self)
        self._spent.exchanges += last
        compared = self._transport if last and self.distributed else None
        if isinstance(compared, compression.Compared) and (error := compared.error()) is not None:
            self._say("compressed", error=error)

    def cost(self) -> dict[str, Any] | None:
        """{seconds, bytes} of an exchange: the mean seconds on this worker, the bytes of the last one. None without."""
        if not self.distributed or not self._spent.exchanges:
            return None
        return self._spent.told(self.model, self.gradients())

    def gradients(self) -> "list[torch.Tensor]":
        """The complete gradient: one tensor for each parameter that has one. The word embedding's holds its touched
        rows."""
        touched = [] if self.rows is None else [self.rows.gradient]
        return touched + [one.grad for one in self._others() if one.grad is not None]

    def own_square(self) -> float:
        """The squared norm of this worker's own gradient: after the last pass, as it was before the exchange; of a
        worker that is alone also before, as it stands."""
        if self.distributed:
            return self.own.square
        found = [one.grad for one in self._others() if one.grad is not None]
        return squared([*found, *([] if self.rows is None else [self.rows.collected()[1]])])

    def multiply(self, factor: float) -> None:
        """Multiply the complete gradient by `factor`."""
        if found := [one.grad for one in self._others() if one.grad is not None]:
            ray_internals.multiply(found, factor)
        if self.rows is not None:
            self.rows.gradient = self.rows.gradient * factor

    def clip(self, most: float, norm: "torch.Tensor") -> None:
        """Scale the gradient, whose norm is `norm`, down to `most`; see `torch.nn.utils.clip_grads_with_norm_`."""
        import torch

        torch.nn.utils.clip_grads_with_norm_(self._others(), most, norm)
        if self.rows is not None:
            self.rows.gradient = self.rows.gradient * torch.clamp(most / (norm + 1e-6), max=1.0)

    def _others(self) -> "list[torch.nn.Parameter]":
        table = None if self.rows is None else self.rows.weight
        return [parameter for parameter in self.module.parameters() if parameter is not table]

    def sum(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """`tensor` summed over the workers, in place."""
        if self.distributed:
            import torch.distributed as dist

            with self.timeline.during(WAITS):
                dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """`tensor`, a part of the gradient, replaced by its mean over the workers."""
        if self.distributed:
            with self.timeline.during(WAITS):
                self._transport.mean(tensor.view(-1))
        return tensor

    def spread(self, owned: "Sequence[Sequence[torch.Tensor]]") -> None:
        """Broadcast `owned[rank]` from each rank to all others. Shapes are the same everywhere, tensors contiguous."""
        if self.distributed:
            with self.timeline.during(WAITS):
                self._transport.spread(owned)

    def gather(self, values: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
        """Every worker's vector by rank, on every worker. The vectors may differ in length."""
        if not self.distributed:
            return [values]
        import torch
        import torch.distributed as dist

        own = torch.from_numpy(values)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        # The transport takes vectors of one length only: all are padded to the longest.
        longest = max(int(size) for size in sizes)
        parts = [own.new_zeros(longest) for _ in range(self.world)]
        dist.all_gather(parts, torch.nn.functional.pad(own, (0, longest - len(own))))
        return [part[: int(size)].numpy() for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        if self.distributed:
            import torch.distributed as dist

            dist.barrier()


def _started(state: "tuple[transport.Transport, Spent, Own]", bucket: Any) -> Any:
    """DistributedDataParallel's hook. It is no method of an exchange: it is kept below Python, where no collector finds
    a cycle."""
    by, spent, own = state
    own.add(bucket.buffer())
    start = spent.now()
    with spent.waiting():
        future = by.start(bucket.buffer(), bucket.is_last())
    return spent.sending(future, start) if by.beside else future
