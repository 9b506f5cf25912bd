"""How far a gradient is off that is sent in fewer bits: measured once, on the first exchange of a start.

torch's `bf16_compress_hook` halves the bytes too, but only of what DistributedDataParallel sends by sockets: the word
embedding's touched rows and gradients in shared memory do not pass it, and it does not say what was lost.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rtrain.exchange.transport import Transport

KINDS = {"none": None, "bf16": "bfloat16"}
"""The name of the type in which gradients are sent, by setting. None: gradients keep their own type."""


def sent(setting: str) -> "torch.dtype | None":
    import torch

    name = KINDS[setting]
    return None if name is None else getattr(torch, name)


class Compared:
    """A transport that compares its first exchange of a gradient, the first that is not zero, with the exact mean. The
    comparison costs one more exchange."""

    def __init__(self, transport: "Transport", world: int):
        self.name, self.beside = transport.name, transport.beside
        self._inner, self._world = transport, world
        self._done = False
        self._squares: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Two sums of squares [1] for each vector: of its error, and of its exact mean."""

    def start(self, flat: "torch.Tensor", last: bool) -> "torch.futures.Future[torch.Tensor]":
        if self._done:
            return self._inner.start(flat, last)
        exact = self._exact(flat)
        return self._inner.start(flat, last).then(lambda done: self._compare(done.value(), exact))

    def mean(self, flat: "torch.Tensor") -> "torch.Tensor":
        if self._done:
            return self._inner.mean(flat)
        exact = self._exact(flat)
        return self._compare(self._inner.mean(flat), exact)

    def union(self, places: "torch.Tensor", rows: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor] | None":
        return self._inner.union(places, rows) if self._done else None

    def spread(self, owned: "Sequence[Sequence[torch.Tensor]]") -> None:
        self._inner.spread(owned)

    def error(self) -> float | None:
        """|sent - exact| / |exact| over all of the first exchange; None after any other one."""
        errors, exacts = (math.fsum(float(pair[place]) for pair in self._squares) for place in (0, 1))
        self._squares = []
        if self._done or exacts == 0.0:
            return None
        self._done = True
        return math.sqrt(errors / exacts)

    def _exact(self, flat: "torch.Tensor") -> "torch.Tensor":
        import torch.distributed as dist

        exact = flat / self._world
        dist.all_reduce(exact)
        return exact

    def _compare(self, found: "torch.Tensor", exact: "torch.Tensor") -> "torch.Tensor":
        self._squares.append(((found - exact).double().square().sum(), exact.double().square().sum()))
        return found
