"""Collectives: ranks wait for each other's work, follow rank 0, and sum gradients.

A waiting rank computes no micro-batch, and collectives of the process group fail after a timeout, but another rank may
work for any time (an upload, the predictions of many rows). So in `run_on_all_ranks` working ranks send a heartbeat
from a side thread, as an all-reduce over all ranks. A wait may be arbitrarily long, and ends soon if a rank is dead,
stopped, or hangs with the interpreter lock held. A rank that hangs otherwise is ended by its own watchdog, which limits
such work too (`heartbeat`).
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    Future = torch.futures.Future[torch.Tensor]


HEARTBEAT_INTERVAL_S = 5.0
"""Longest time between two heartbeats; a quarter of the hang timeout if that is shorter."""
T = TypeVar("T")


OTHER_RANK_FAILED = "another worker failed; its own error says why"
MIN_SEPARATE_ELEMENTS = 1 << 16
"""Tensors with fewer elements are sent together."""


class OtherRankFailed(RuntimeError):
    """Another rank failed in a common operation; its own error states the reason."""


def run_on_all_ranks(watchdog: Watchdog, work: Callable[[], T]) -> T:
    """Do this rank's `work` and wait for the other ranks. Called on every rank at the same time.

    `work` uses no collective over all ranks. If it uses others (`Strategy.any_failed`), it must ensure that nobody
    waits for a failed rank. If it fails on one rank all ranks fail, the others with `OtherRankFailed`.
    """
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return work()
    work_finished, has_failed, error = threading.Event(), False, None

    def send_heartbeats() -> None:
        nonlocal has_failed
        with contextlib.suppress(RuntimeError):  # a rank is dead: its next collective reports that
            while not has_failed and not work_finished.wait(min(HEARTBEAT_INTERVAL_S, watchdog.hang_timeout_s / 4)):
                has_failed = _all_reduce_status(is_working=True, has_failed=False)[1]

    heartbeat_thread = threading.Thread(target=send_heartbeats, daemon=True, name="rtrain-works")
    heartbeat_thread.start()
    try:
        result = work()
    except Exception as exception:
        error = exception
    finally:
        work_finished.set()
    heartbeat_thread.join()  # collectives match by order alone, so only one thread may call them
    others_working = True
    try:
        while others_working and not has_failed:
            others_working, has_failed = _all_reduce_status(is_working=False, has_failed=error is not None)
            watchdog.heartbeat()
    except RuntimeError:  # a rank is dead, which is less informative than this rank's own error
        if error is None:
            raise
    if error is not None:
        raise error
    if has_failed:
        raise OtherRankFailed(OTHER_RANK_FAILED)
    return result


def _all_reduce_status(is_working: bool, has_failed: bool) -> tuple[bool, bool]:
    import torch
    import torch.distributed as dist

    sums = torch.tensor([int(is_working), int(has_failed)])
    dist.all_reduce(sums)
    return bool(sums[0]), bool(sums[1])


def decide_on_rank_zero(watchdog: Watchdog, decide: Callable[[], int]) -> int:
    """Let rank 0 decide, however long it takes, and return its decision on every rank. If it fails, all ranks fail."""

    @watchdog.extended_timeout()
    def work() -> int:
        return decide() if is_rank_zero() else 0

    return broadcast_from_rank_zero(run_on_all_ranks(watchdog, work))


def all_reduce_max(value: int, group: "dist.ProcessGroup | None" = None) -> int:
    """The largest value of the ranks of `group`, by default of all ranks, on each of them."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


def all_gather_object(value: T) -> list[T]:
    import torch.distributed as dist

    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def rank() -> int:
    """This worker's rank among all workers; 0 for a single one. The rank of its replica is `Strategy.replica_rank`."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_zero() -> bool:
    return rank() == 0


def broadcast_from_rank_zero(value: int) -> int:
    """Rank 0's `value`, on every rank."""
    import torch
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


class ProcessGroupTransport:
    """All-reduce of gradients by the process group. `comm_dtype`: the dtype on the wire; None for the gradient's own.

    torch's `bf16_compress_hook` halves the bytes too, but not those of the word embedding's touched rows, which bypass
    it, and it does not report the error.
    """

    def __init__(self, num_replicas: int, comm_dtype: "torch.dtype | None" = None):
        self._num_replicas, self._comm_dtype = num_replicas, comm_dtype

    def start_mean(self, flat: "torch.Tensor") -> "Future":
        """Start to replace the vector `flat` by its mean over the workers. All workers call it in the same order."""
        import torch
        import torch.distributed as dist

        part = torch.div(
            flat,
            self._num_replicas,
            out=flat if self._comm_dtype is None else torch.empty_like(flat, dtype=self._comm_dtype),
        )
        handle = dist.all_reduce(part, async_op=True)
        assert handle is not None

        def finish(future: Any) -> torch.Tensor:
            total = future.value()  # raises the error of the collective
            return flat if part is flat else flat.copy_(total[0])

        future: Future = handle.get_future().then(finish)
        return future

    def mean(self, flat: "torch.Tensor") -> "torch.Tensor":
        """Replace the vector `flat` by its mean over the workers."""
        return self.start_mean(flat).wait()


class CompressionErrorProbe(ProcessGroupTransport):
    """Compares the first nonzero synchronized gradient with the exact mean, at the cost of one more all-reduce."""

    def __init__(self, num_replicas: int, comm_dtype: "torch.dtype"):
        super().__init__(num_replicas, comm_dtype)
        self._is_done = False
        self._squares: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Two sums of squares [] for each vector: of its error, and of its exact mean."""

    def start_mean(self, flat: "torch.Tensor") -> "Future":
        if self._is_done:
            return super().start_mean(flat)
        import torch.distributed as dist

        exact = flat / self._num_replicas
        dist.all_reduce(exact)
        return super().start_mean(flat).then(lambda done: self._compare(done.value(), exact))

    def pop_error(self) -> float | None:
        """|sent - exact| / |exact| of the first synchronization; None after later ones."""
        errors, exacts = (math.fsum(float(pair[place]) for pair in self._squares) for place in (0, 1))
        self._squares = []
        if self._is_done or exacts == 0.0:
            return None
        self._is_done = True
        return math.sqrt(errors / exacts)

    def _compare(self, mean: "torch.Tensor", exact: "torch.Tensor") -> "torch.Tensor":
        self._squares.append(((mean - exact).double().square().sum(), exact.double().square().sum()))
        return mean


def broadcast_from_owners(tensors_by_rank: "Sequence[Sequence[torch.Tensor]]") -> None:
    """Broadcast each worker's tensors `owned[rank]`, contiguous and of the same shapes everywhere."""
    import torch.distributed as dist

    rank = dist.get_rank()
    pending: list[Any] = []
    for owner, tensors in enumerate(tensors_by_rank):
        small = [tensor for tensor in tensors if tensor.numel() < MIN_SEPARATE_ELEMENTS]
        pending += [
            dist.broadcast(tensor, src=owner, async_op=True)
            for tensor in tensors
            if tensor.numel() >= MIN_SEPARATE_ELEMENTS
        ]
        for tensors_of_dtype, flat in _flatten_by_dtype(small):
            dist.broadcast(flat, src=owner)
            if rank != owner:
                _unflatten(flat, tensors_of_dtype)
    for handle in pending:
        handle.wait()


def all_reduce_sum(tensors: "Sequence[torch.Tensor]", group: "dist.ProcessGroup | None") -> None:
    """Sum tensors over the workers of `group` in place. Small ones are sent together, so that workers wait only
    once."""
    import torch.distributed as dist

    large = [tensor for tensor in tensors if tensor.numel() >= MIN_SEPARATE_ELEMENTS and tensor.is_contiguous()]
    pending: list[Any] = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in large]
    large_ids = {id(tensor) for tensor in large}
    for tensors_of_dtype, flat in _flatten_by_dtype([tensor for tensor in tensors if id(tensor) not in large_ids]):
        dist.all_reduce(flat, group=group)
        _unflatten(flat, tensors_of_dtype)
    for handle in pending:
        handle.wait()


def _flatten_by_dtype(tensors: "Sequence[torch.Tensor]") -> "Iterator[tuple[list[torch.Tensor], torch.Tensor]]":
    """The tensors of each dtype, with one concatenated vector."""
    import torch

    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        tensors_of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        yield tensors_of_dtype, torch.cat([tensor.reshape(-1) for tensor in tensors_of_dtype])


def _unflatten(flat: "torch.Tensor", tensors: "Sequence[torch.Tensor]") -> None:
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
