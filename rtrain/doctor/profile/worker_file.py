"""What a profiled worker has left (`rtrain.training.watched`), read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain import documents
from rtrain.exchange.timeline import Span
from rtrain.training.stages import Window


@dataclass(frozen=True)
class Update:
    window: Window
    rows: int
    """On this worker, as are its passes and its tokens."""
    passes: int
    real_tokens: int


@dataclass(frozen=True)
class Worker:
    rank: int
    host: str
    cores: int
    """That its process may use."""
    cpu_seconds: float
    """Its process's, all threads, over all of its updates."""
    seconds: float
    """Those of all of its updates."""
    epoch: int
    """Nanoseconds since 1970 at its clock's zero."""
    updates: tuple[Update, ...]


def read(path: Path) -> Worker:
    document = documents.read(path)
    updates = tuple(_update(one) for one in document.pop("windows"))
    return Worker(**document, updates=updates)


def _update(found: Mapping[str, Any]) -> Update:
    spans = tuple(Span(*one) for one in found["spans"])
    window = Window(found["number"], found["start"], found["stop"], spans)
    return Update(window, *(found[name] for name in ("rows", "passes", "real_tokens")))
