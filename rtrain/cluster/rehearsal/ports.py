"""The sockets on which a rehearsed cluster listens, against a list of those that it may listen on."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import psutil

_LISTENS = "0A"
"""A socket's state in Linux's tables, TCP_LISTEN."""
Scope = Literal["loopback", "network"]

ROLES = (
    # By what its command line begins with or holds; the first that fits.
    ("control service", "gcs_server"),
    ("raylet", "/raylet/raylet "),
    ("node agent", "ray::DashboardAgent"),
    ("runtime environments", "ray::RuntimeEnvAgent"),
    ("autoscaler", "monitor.py"),
    ("dashboard", "dashboard.py"),
    ("dashboard", "ray-dashboard"),
    ("Ray Client", "ray.util.client.server"),
    ("HAProxy", "haproxy"),
    ("process of a job", "ray::"),
    ("process of a job", "default_worker.py"),
    ("driver", "-m rtrain"),
)
METRICS = "metrics of the dashboard"
"""Counts of the cluster, which Ray (2.60) gives to whoever reaches that port; its process is the dashboard's."""
ENDPOINT = "endpoint"
"""The port of an endpoint's own, whoever listens there: a job's process, as others that reach each other."""
ALLOWED: dict[str, Scope] = {
    "control service": "network",
    "raylet": "network",
    "node agent": "network",
    "runtime environments": "network",
    "autoscaler": "network",
    "process of a job": "network",
    "driver": "network",
    METRICS: "network",
    # The job API runs anyone's code who has the token: it is reached by SSH alone.
    "dashboard": "loopback",
    # The rehearsed one; an endpoint that others may reach asks for keys (`serve.keys`).
    ENDPOINT: "loopback",
    "HAProxy": "loopback",
}
"""How far a process of each role may be reached. `network` is the nodes' own, which lets nobody else in: what listens
there asks for the cluster's token, or serves the gradients' exchange. Whatever else listens is a finding."""
NOBODY: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, order=True)
class Listener:
    machine: str
    role: str
    scope: Scope
    port: int

    @property
    def allowed(self) -> bool:
        may = ALLOWED.get(self.role)
        return may == "network" or may == self.scope

    @property
    def text(self) -> str:
        where = "the network" if self.scope == "network" else "loopback"
        return f"{self.role} listens on {where}, port {self.port} ({self.machine})"


def role_of(command: str) -> str:
    return next((role for role, sign in ROLES if sign in command), command[:60] or "a process without a name")


def scope_of(address: str) -> Scope:
    return "loopback" if ip_address(address.partition("%")[0]).is_loopback else "network"


def listening(machines: Iterable[tuple[str, int]], known: Mapping[int, str] = NOBODY) -> set[Listener]:
    """What listens at this moment on TCP, of everything that runs on the machines: (name, process id) of each.

    `known`: roles of ports that say more than their processes do."""
    found = set()
    for name, pid in machines:
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error, OSError):
                    words = process.cmdline()
                    if not words and not _link(Path(f"/proc/{process.pid}/exe")):
                        continue  # it ends: a process loses its memory, and with it its name, before its sockets
                    role = role_of(" ".join(words))
                    for address, port in _open(process.pid):
                        found.add(Listener(name, known.get(port, role), scope_of(address), port))
    return found


def _open(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports on which a process listens, in the network that it is in, which may be another than this
    one's: psutil reads this one's alone."""
    sockets = {link for path in Path(f"/proc/{pid}/fd").iterdir() if (link := _link(path)).startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and f"socket:[{words[9]}]" in sockets:
                address, _, port = words[1].partition(":")
                # Words of four bytes, each as this processor has them.
                packed = b"".join(
                    int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)
                )
                yield str(ip_address(packed)), int(port, 16)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # it was closed meanwhile
        return ""
