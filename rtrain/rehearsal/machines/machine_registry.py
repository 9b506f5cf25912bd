"""The machines of a rehearsed cluster, written down: a file for each thing that happens to one.

Ray's autoscaler asks for machines from a process and several threads of its own, `cloud.Cloud` starts them, and they
say themselves when they end. Each file is written once and whole, by one of these, so that none waits for another.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Why = Literal["terminated", "killed", "left", "down"]
"""Why a machine has ended: its autoscaler had it ended, it was killed, its Ray ended by itself (as after a drain), or
the whole cluster was taken down."""


@dataclass(frozen=True)
class Machine:
    name: str
    """What the autoscaler knows it by."""
    type: str
    """Its node type in the cluster's file."""
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    tags: Mapping[str, str]
    """The autoscaler's own notes."""
    asked: float
    """When it was asked for, in seconds since 1970."""
    pid: int | None = None
    """The process that stands for the machine, once it is started; all that runs on it descends from that."""
    unwanted: bool = False
    """Whether the autoscaler has asked for its end."""
    ended: float | None = None
    why: Why | None = None


class Book:
    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    # -------------------------------------------------------------------------------------------------- by its writers

    def ask(self, kind: str, resources: Mapping[str, float], labels: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """A machine of the node type `kind` is asked for; returns its name, which no other has had."""
        name = self._take_name(kind)
        asked = {"type": kind, "resources": dict(resources), "labels": dict(labels), "tags": dict(tags)}
        self._write(name, "asked", {"name": name, **asked, "asked": time.time()})
        return name

    def started(self, name: str, pid: int) -> None:
        self._write(name, "started", {"pid": pid})

    def unwant(self, name: str) -> None:
        self._write(name, "unwanted", {"unwanted": True})

    def ended(self, name: str, why: Why) -> None:
        """The first reason stands: one that was killed is told to end later as well."""
        if not self._file(name, "ended").is_file():
            self._write(name, "ended", {"ended": time.time(), "why": why})

    def tag(self, name: str, tags: Mapping[str, str]) -> None:
        """Notes of the autoscaler's in place of those that there are."""
        self._write(name, "tags", {"tags": dict(tags)})

    def sell_out(self) -> None:
        """From now on nobody gets another machine, as in a cloud without spot capacity."""
        self._write("cloud", "sold-out", {})

    # ------------------------------------------------------------------------------------------------- for its readers

    @property
    def sold_out(self) -> bool:
        return self._file("cloud", "sold-out").is_file()

    def all(self) -> dict[str, Machine]:
        """Every machine that there is or was, by its name, in the order in which they were asked for."""
        found = {}
        for path in self.folder.glob("*.asked"):
            document: dict[str, Any] = {}
            for kind in ("asked", "tags", "started", "unwanted", "ended"):
                if (part := path.with_suffix(f".{kind}")).is_file():
                    document |= json.loads(part.read_text())
            found[path.stem] = Machine(**document)
        return dict(sorted(found.items(), key=lambda item: (item[1].asked, item[0])))

    def up(self) -> dict[str, Machine]:
        """Those that have not ended, those among them that are still to be started."""
        return {name: one for name, one in self.all().items() if one.ended is None}

    def _take_name(self, kind: str) -> str:
        number = 1
        while True:
            try:
                os.close(os.open(self._file(f"{kind}-{number}", "taken"), os.O_CREAT | os.O_EXCL))
                return f"{kind}-{number}"
            except FileExistsError:
                number += 1

    def _file(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"

    def _write(self, name: str, kind: str, document: Mapping[str, Any]) -> None:
        draft = self._file(name, f"{kind}-draft")
        draft.write_text(json.dumps(document))
        draft.rename(self._file(name, kind))  # at once: whoever reads it sees a whole file
