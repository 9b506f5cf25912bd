"""Registry of the machines of a rehearsed cluster: one file per event of a machine.

Ray's autoscaler requests machines from several processes and threads, `cloud.SimulatedCloud` starts them, and machines
record their own end. Each file is written once and atomically by one of them, without locks.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

EndReason = Literal["terminated", "killed", "left", "down"]
"""Why a machine ended: the autoscaler terminated it, it was killed, its Ray exited (as after a drain), or the whole
cluster was taken down."""


@dataclass(frozen=True)
class MachineRecord:
    name: str
    """The autoscaler's id of the machine."""
    type: str
    """Its node type in the cluster's file."""
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    tags: Mapping[str, str]
    """Tags of the autoscaler."""
    requested_at: float
    """Time of the request, in seconds since 1970."""
    pid: int | None = None
    """Process of the machine, once started; all its processes descend from it."""
    is_unwanted: bool = False
    """Whether the autoscaler requested its termination."""
    ended_at: float | None = None
    end_reason: EndReason | None = None


class MachineRegistry:
    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    # -------------------------------------------------------------------------------------------------- by its writers

    def request_machine(
        self, node_type: str, resources: Mapping[str, float], labels: Mapping[str, str], tags: Mapping[str, str]
    ) -> str:
        """Request a machine of the type `node_type`; returns its unique name."""
        name = self._reserve_name(node_type)
        request = {"type": node_type, "resources": dict(resources), "labels": dict(labels), "tags": dict(tags)}
        self._write(name, "requested", {"name": name, **request, "requested_at": time.time()})
        return name

    def record_start(self, name: str, pid: int) -> None:
        self._write(name, "started", {"pid": pid})

    def request_end(self, name: str) -> None:
        self._write(name, "unwanted", {"is_unwanted": True})

    def record_end(self, name: str, end_reason: EndReason) -> None:
        """Record the end; the first reason counts, since a killed machine is terminated later too."""
        if not self._file(name, "ended").is_file():
            self._write(name, "ended", {"ended_at": time.time(), "end_reason": end_reason})

    def set_tags(self, name: str, tags: Mapping[str, str]) -> None:
        """Replace the tags of a machine."""
        self._write(name, "tags", {"tags": dict(tags)})

    def exhaust_capacity(self) -> None:
        """Reject further requests, like a cloud without spot capacity."""
        self._write("cloud", "sold-out", {})

    # ------------------------------------------------------------------------------------------------- for its readers

    @property
    def is_exhausted(self) -> bool:
        return self._file("cloud", "sold-out").is_file()

    def all_machines(self) -> dict[str, MachineRecord]:
        """All machines by name, in the order of their requests."""
        machines = {}
        for path in self.folder.glob("*.requested"):
            document: dict[str, Any] = {}
            for suffix in ("requested", "tags", "started", "unwanted", "ended"):
                if (part_file := path.with_suffix(f".{suffix}")).is_file():
                    document |= json.loads(part_file.read_text())
            machines[path.stem] = MachineRecord(**document)
        return dict(sorted(machines.items(), key=lambda item: (item[1].requested_at, item[0])))

    def live_machines(self) -> dict[str, MachineRecord]:
        """Machines that have not ended, including those not started yet."""
        return {name: machine for name, machine in self.all_machines().items() if machine.ended_at is None}

    def _reserve_name(self, node_type: str) -> str:
        number = 1
        while True:
            try:
                os.close(os.open(self._file(f"{node_type}-{number}", "taken"), os.O_CREAT | os.O_EXCL))
                return f"{node_type}-{number}"
            except FileExistsError:
                number += 1

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _write(self, name: str, suffix: str, document: Mapping[str, Any]) -> None:
        draft = self._file(name, f"{suffix}-draft")
        draft.write_text(json.dumps(document))
        draft.rename(self._file(name, suffix))  # atomic: a reader sees a complete file
