"""The whole model on every worker; the mean of its gradients is by DistributedDataParallel."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.parallel import dtensor_utils, transport
from rtrain.parallel.base import Work
from rtrain.parallel.data_parallel import Replicas, Say, unsaid
from rtrain.parallel.sparse_embedding import TouchedRows, table_of
from rtrain.parallel.timeline import BACKWARD, SENDS, WAITS, Timeline
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import torch


class Replicated(Replicas):
    """`model` is what passes call; it averages gradients over workers once per update."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watch: Watch | None = None,
        say: Say = unsaid,
        *,
        touched_rows: bool = True,
        compressed: str = "none",
    ):
        """`say` is told what compression costs. `touched_rows`: of the word embedding's gradient, exchange the rows
        that the update touched. `compressed`: as `train.gradient_compression`."""
        super().__init__(module, watch, say)
        self._spent, self.own = Spent(self.timeline), Own()
        # A GPU that is alone fills and adds a dense gradient in less time than it waits for which rows were touched.
        dense = not self.distributed and dtensor_utils.device(module).type == "cuda"
        table = table_of(module) if touched_rows and not dense else None
        self.rows = TouchedRows(table[1]) if table else None
        # Asked for several times an update: to walk through the module takes milliseconds.
        self._others = [one for one in module.parameters() if self.rows is None or one is not self.rows.weight]
        if self.distributed:
            from torch.nn.parallel import DistributedDataParallel

            if table:
                torch_internals.leave_out(module, [table[0]])
            # gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them all per update.
            # forward_sync_buffers: an encoder's buffers are constants, so rank 0 need not send them before each step.
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True, forward_sync_buffers=False)
            torch_internals.take_times(self.model)
            self._sent = sent = transport.sent_type(compressed)
            self._transport = transport.Stock(self.world) if sent is None else transport.Compared(self.world, sent)
            state = (self._transport, self._spent, self.own)
            self.model.register_comm_hook(state, lambda state, bucket: _started(state, bucket))

    def settle(self, work: Work) -> None:
        """Discard one exchange, where three workers or more take part.

        DistributedDataParallel rebuilds its buckets after its first exchange, which changes the order of summation from
        then on: a restart would differ from the run it continues. The sum of two terms has only one order.
        """
        if self.world > 2:
            work.loss(work.answer(self.model, work.idle), work.idle).backward()

    def begin(self, measures: bool = False) -> None:
        self.own.begin(measures)
        if self.rows is not None:
            self.rows.begin()
        if self.distributed:  # the buckets are where gradients live
            self.module.zero_grad(set_to_none=False)
        else:
            for one in self._others:
                one.grad = None

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
        if isinstance(compared, transport.Compared) and (error := compared.error()) is not None:
            self._say("compressed", error=error)

    def cost(self) -> dict[str, Any] | None:
        if not self.distributed or not self._spent.exchanges:
            return None
        return self._spent.cost(self.model, self.gradients(), self._sent)

    def gradients(self) -> "list[torch.Tensor]":
        """The complete gradient: one tensor for each parameter that has one. The word embedding's holds its touched
        rows."""
        touched = [] if self.rows is None else [self.rows.gradient]
        return touched + [one.grad for one in self._others if one.grad is not None]

    def collected(self) -> "list[torch.Tensor]":
        found = [one.grad for one in self._others if one.grad is not None]
        return [*found, *([] if self.rows is None else [self.rows.collected()[1]])]

    @property
    def tells_noise(self) -> bool:
        return True

    def own_square(self) -> float | None:
        return self.own.square if self.distributed else self._first

    def multiply(self, factor: "float | torch.Tensor") -> None:
        if found := [one.grad for one in self._others if one.grad is not None]:
            torch_internals.multiply(found, factor)
        if self.rows is not None:
            self.rows.gradient = self.rows.gradient * factor

    def mean(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """`tensor`, a part of the gradient, replaced by its mean over the workers."""
        if self.distributed:
            with self.timeline.during(WAITS):
                self._transport.mean(tensor.view(-1))
        return tensor

    def union(self, places: "torch.Tensor", rows: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """The mean of a matrix that is 0 but for some rows: (places of the rows that any worker has, ascending; their
        means [places, dim]). `places` are this worker's, ascending, `rows` its rows."""
        import torch

        union = torch.unique(torch.cat([torch.from_numpy(one) for one in self.gather(places.cpu().numpy())]))
        union = union.to(places.device)
        shared = rows.new_zeros(len(union), rows.shape[1])
        shared[torch.searchsorted(union, places)] = rows
        return union, self.mean(shared)

    def spread(self, owned: "Sequence[Sequence[torch.Tensor]]") -> None:
        """Broadcast `owned[rank]` from each rank to all others. Shapes are the same everywhere, tensors contiguous."""
        if self.distributed:
            with self.timeline.during(WAITS):
                transport.spread(owned)


class Own:
    """This worker's gradient before the exchange takes the mean: its squared norm, in the updates that measure."""

    def __init__(self) -> None:
        self._measures = False
        self._parts: list[torch.Tensor] = []

    def begin(self, measures: bool) -> None:
        self._measures, self._parts = measures, []

    def add(self, part: "torch.Tensor") -> None:
        """A part of the gradient, which is about to be exchanged."""
        if self._measures:
            self._parts.append(dtensor_utils.squared(part))

    @property
    def square(self) -> float:
        return float(sum(self._parts))


class Spent:
    """What the exchange of gradients costs this worker: seconds by which it lengthens a pass, and bytes that it sends.
    What it waits for slower workers within an exchange counts: it could not compute then."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.exchanges = 0
        self._waited = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a part of an exchange for which the pass stands still."""
        start = time.perf_counter()
        try:
            with self._timeline.during(WAITS):
                yield
        finally:
            self._waited += time.perf_counter() - start

    def start(self, by: transport.Stock, part: "torch.Tensor") -> Any:
        """Begin to exchange a part of the gradient, beside which the worker computes."""
        timeline = self._timeline
        begin = timeline.now()
        with self.waiting():
            future = by.start(part)

        def arrived(done: Any) -> Any:
            timeline.add(SENDS, begin, timeline.now())
            return done.value()

        return future.then(arrived)

    def cost(self, model: Any, gradient: "list[torch.Tensor]", sent: "torch.dtype | None") -> dict[str, Any]:
        """See `Exchange.cost`, of an exchange of `gradient` by `model`, without what is hidden behind the backward
        pass. `sent`: the type in which its numbers are sent; None: their own."""
        seconds = self._waited / self.exchanges + torch_internals.unhidden_seconds(model)
        size = sum(one.numel() * (sent or one.dtype).itemsize for one in gradient)
        return {"seconds": round(seconds, 6), "bytes": size}


def _started(state: "tuple[transport.Stock, Spent, Own]", bucket: Any) -> Any:
    """DistributedDataParallel's hook. It is no method of an exchange: it is kept below Python, where no collector finds
    a cycle."""
    by, spent, own = state
    own.add(bucket.buffer())
    return spent.start(by, bucket.buffer())
