"""The sockets on which a rehearsed cluster listens, against a list of those that it may listen on."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType
from typing import Literal

import psutil

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
    ("process of a job", "ray::"),
    ("process of a job", "default_worker.py"),
    ("driver", "-m rtrain"),
)
METRICS = "metrics of the dashboard"
"""Counts of the cluster, which Ray (2.60) gives to whoever reaches that port; its process is the dashboard's."""
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
                with suppress(psutil.Error):
                    words = process.cmdline()
                    if not words and not process.exe():
                        continue  # it ends: a process loses its memory, and with it its name, before its sockets
                    role = role_of(" ".join(words))
                    for one in process.net_connections(kind="tcp"):
                        if one.status == psutil.CONN_LISTEN:
                            found.add(
                                Listener(name, known.get(one.laddr.port, role), scope_of(one.laddr.ip), one.laddr.port)
                            )
    return found
