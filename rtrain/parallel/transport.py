"""How workers take the mean of their gradients: by the process group's sums, in fewer bits where that is asked for.

torch's `bf16_compress_hook` halves the bytes too, but not those of the word embedding's touched rows, which do not pass
it, and it does not say what was lost.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    Future = torch.futures.Future[torch.Tensor]

SMALL = 1 << 16
"""Tensors with fewer elements are sent together, as one."""
KINDS = {"none": None, "bf16": "bfloat16"}
"""The name of the type in which gradients are sent, by `train.gradient_compression`. None: they keep their own type."""


def sent_type(setting: str) -> "torch.dtype | None":
    import torch

    name = KINDS[setting]
    return None if name is None else getattr(torch, name)


class Stock:
    """Sums by the process group. `sent` is the type in which numbers are sent; None keeps their own."""

    def __init__(self, world: int, sent: "torch.dtype | None" = None):
        self._world, self._sent = world, sent

    def start(self, flat: "torch.Tensor") -> "Future":
        """Begin to replace `flat`, a vector, by its mean over the workers, which start the same ones in one order."""
        import torch
        import torch.distributed as dist

        part = torch.div(
            flat, self._world, out=flat if self._sent is None else torch.empty_like(flat, dtype=self._sent)
        )
        work = dist.all_reduce(part, async_op=True)
        assert work is not None

        def finished(done: Any) -> torch.Tensor:
            total = done.value()  # raises what the exchange failed with
            return flat if part is flat else flat.copy_(total[0])

        future: Future = work.get_future().then(finished)
        return future

    def mean(self, flat: "torch.Tensor") -> "torch.Tensor":
        """`flat`, a vector, replaced by its mean over the workers."""
        return self.start(flat).wait()


class Compared(Stock):
    """Compares its first exchange of a gradient, the first that is not zero, with the exact mean. The comparison costs
    one more exchange."""

    def __init__(self, world: int, sent: "torch.dtype"):
        super().__init__(world, sent)
        self._done = False
        self._squares: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Two sums of squares [] for each vector: of its error, and of its exact mean."""

    def start(self, flat: "torch.Tensor") -> "Future":
        if self._done:
            return super().start(flat)
        import torch.distributed as dist

        exact = flat / self._world
        dist.all_reduce(exact)
        return super().start(flat).then(lambda done: self._compare(done.value(), exact))

    def error(self) -> float | None:
        """|sent - exact| / |exact| over all of the first exchange; None after any other one."""
        errors, exacts = (math.fsum(float(pair[place]) for pair in self._squares) for place in (0, 1))
        self._squares = []
        if self._done or exacts == 0.0:
            return None
        self._done = True
        return math.sqrt(errors / exacts)

    def _compare(self, found: "torch.Tensor", exact: "torch.Tensor") -> "torch.Tensor":
        self._squares.append(((found - exact).double().square().sum(), exact.double().square().sum()))
        return found


def spread(owned: "Sequence[Sequence[torch.Tensor]]") -> None:
    """Every worker's tensors `owned[rank]`, contiguous and of the same shapes everywhere, become that rank's."""
    import torch.distributed as dist

    rank = dist.get_rank()
    under_way: list[Any] = []
    for owner, tensors in enumerate(owned):
        small = [one for one in tensors if one.numel() < SMALL]
        under_way += [dist.broadcast(one, src=owner, async_op=True) for one in tensors if one.numel() >= SMALL]
        for alike, flat in _joined(small):
            dist.broadcast(flat, src=owner)
            if rank != owner:
                _put_back(flat, alike)
    for work in under_way:
        work.wait()


def add_up(tensors: "Sequence[torch.Tensor]", group: "dist.ProcessGroup | None") -> None:
    """Each tensor summed over the workers of `group`, in place. Small ones go as one: workers wait for each other once
    for all of these."""
    import torch.distributed as dist

    large = [one for one in tensors if one.numel() >= SMALL and one.is_contiguous()]
    under_way: list[Any] = [dist.all_reduce(one, group=group, async_op=True) for one in large]
    whole = {id(one) for one in large}
    for alike, flat in _joined([one for one in tensors if id(one) not in whole]):
        dist.all_reduce(flat, group=group)
        _put_back(flat, alike)
    for work in under_way:
        work.wait()


def _joined(tensors: "Sequence[torch.Tensor]") -> "Iterator[tuple[list[torch.Tensor], torch.Tensor]]":
    """The tensors of each type, and one vector of all of their numbers."""
    import torch

    for kind in dict.fromkeys(one.dtype for one in tensors):
        alike = [one for one in tensors if one.dtype == kind]
        yield alike, torch.cat([one.reshape(-1) for one in alike])


def _put_back(flat: "torch.Tensor", tensors: "Sequence[torch.Tensor]") -> None:
    for one, values in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        one.copy_(values.view_as(one))
