"""What the driver hands to the workers of a start: plain values, the same for each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain.config import Config


@dataclass(frozen=True)
class Start:
    """One start of a run, up to `until` updates or to its end."""

    config: Config
    run: Path
    store: Path
    model: Path
    teacher: Path | None = None
    """The artefact that a student learns from."""
    until: int | None = None
    rung: bool = False
    """Keep the answers to the validation rows at `until`."""
    head: Mapping[str, Any] | None = None
    """The head's machine (`machines.head`), which is paid for too."""
    owners: tuple[str, ...] = ()
    """Tokens of the run folder's starts, this one's last; see `checkpoints.replica`."""
    halvings: int = 0
    """How often passes were made half as large, since a start ran out of memory."""
    profile: bool = False
    """Keep where the time of each update goes, on each worker (`training.watched`)."""
