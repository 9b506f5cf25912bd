"""What the updates of a start come to, on one worker and over all of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING

from rtrain.training import step

if TYPE_CHECKING:
    from rtrain.exchange.exchange import Exchange


@dataclass
class Totals:
    rows_seen: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    passes: int = 0
    updates: int = 0

    def add(self, done: step.Done) -> None:
        self.rows_seen += done.rows
        self.real_tokens += done.real_tokens
        self.padded_tokens += done.padded_tokens
        self.passes += done.passes
        self.updates += 1

    def over_workers(self, exchange: "Exchange") -> "Totals":
        """The sums over all workers, `updates` included. Called on every rank."""
        import torch

        # The tensor is on the CPU wherever the model is: the process group has a transport for both.
        sums = exchange.sum(torch.tensor(astuple(self), dtype=torch.int64)).tolist()
        return Totals(**{one.name: value for one, value in zip(fields(self), sums, strict=True)})


@dataclass
class Clock:
    """Seconds of this start, by section."""

    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> float:
        """What updates have taken: no evaluation, no checkpoint, no waiting for rows."""
        return round(self.seconds.get("train", 0.0), 3)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
