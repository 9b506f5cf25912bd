"""What the exchange of gradients costs a worker: seconds by which it lengthens a pass, and bytes that it sends."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rtrain import ray_internals

if TYPE_CHECKING:
    import torch


class Spent:
    """Kept by one worker. What it waits for slower workers within an exchange counts: it could not compute then."""

    def __init__(self) -> None:
        self.exchanges = 0
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a part of an exchange for which the pass stands still."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - start

    def each(self, model: "torch.nn.Module") -> float:
        """Mean seconds of an exchange by `model`, without what is hidden behind the backward pass."""
        from torch.nn.parallel import DistributedDataParallel

        after = ray_internals.unhidden_seconds(model) if isinstance(model, DistributedDataParallel) else 0.0
        return self._waited / max(1, self.exchanges) + after

    def told(self, model: "torch.nn.Module", gradient: "list[torch.Tensor]") -> dict[str, Any]:
        """{seconds, bytes} of one exchange of `gradient`, for the log."""
        return {"seconds": round(self.each(model), 6), "bytes": sum(one.nbytes for one in gradient)}
