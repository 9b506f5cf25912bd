"""All-reduce of gradients by the process group, optionally in fewer bits.

torch's `bf16_compress_hook` halves the bytes too, but not those of the word embedding's touched rows, which bypass it,
and it does not report the error.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    Future = torch.futures.Future[torch.Tensor]

MIN_SEPARATE_ELEMENTS = 1 << 16
"""Tensors with fewer elements are sent together."""
COMM_DTYPES = {"none": None, "bf16": "bfloat16"}
"""Name of the dtype on the wire, by `train.gradient_compression`; None keeps the gradient's own."""


def resolve_comm_dtype(setting: str) -> "torch.dtype | None":
    import torch

    name = COMM_DTYPES[setting]
    return None if name is None else getattr(torch, name)


class ProcessGroupTransport:
    """All-reduce by the process group. `comm_dtype` is the dtype on the wire; None keeps the gradient's own."""

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
