"""What the exchange of gradients costs a worker: seconds by which it lengthens a pass, and bytes that it sends."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.exchange.timeline import SENDS, WAITS, Timeline

if TYPE_CHECKING:
    import torch


class Spent:
    """Kept by one worker. What it waits for slower workers within an exchange counts: it could not compute then."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.exchanges = 0
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a part of an exchange for which the pass stands still."""
        start = time.perf_counter()
        try:
            with self._timeline.during(WAITS):
                yield
        finally:
            self._waited += time.perf_counter() - start

    def now(self) -> int:
        """By the timeline's clock."""
        return self._timeline.now()

    def sending(self, future: "torch.futures.Future[torch.Tensor]", start: int) -> Any:
        """`future`, whose end is that of a part of an exchange; it began at `start`, by the timeline's clock."""
        timeline = self._timeline

        def arrived(done: Any) -> Any:
            timeline.add(SENDS, start, timeline.now())
            return done.value()

        return future.then(arrived)

    def each(self, model: "torch.nn.Module") -> float:
        """Mean seconds of an exchange by `model`, without what is hidden behind the backward pass."""
        from torch.nn.parallel import DistributedDataParallel

        after = torch_internals.unhidden_seconds(model) if isinstance(model, DistributedDataParallel) else 0.0
        return self._waited / max(1, self.exchanges) + after

    def told(
        self, model: "torch.nn.Module", gradient: "list[torch.Tensor]", sent: "torch.dtype | None"
    ) -> dict[str, Any]:
        """{seconds, bytes} of one exchange of `gradient`, for the log. `sent`: the type in which its numbers are sent;
        None: their own."""
        size = sum(one.numel() * (sent or one.dtype).itemsize for one in gradient)
        return {"seconds": round(self.each(model), 6), "bytes": size}
