"""Listening sockets of a rehearsed cluster, checked against a list of allowed ones."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType
from typing import Literal

import psutil

Scope = Literal["loopback", "network"]

PROCESS_ROLES = (
    # Fragments of the command line; the first match counts.
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
METRICS_ROLE = "metrics of the dashboard"
"""Cluster metrics, which Ray (2.60) serves to anyone; the dashboard's process serves them."""
ALLOWED_SCOPES: dict[str, Scope] = {
    "control service": "network",
    "raylet": "network",
    "node agent": "network",
    "runtime environments": "network",
    "autoscaler": "network",
    "process of a job": "network",
    "driver": "network",
    METRICS_ROLE: "network",
    # The job API runs any code of a token holder: it is reachable by SSH only.
    "dashboard": "loopback",
}
"""Allowed scope of each role. `network` is the cluster's own network, which admits nobody else: these listeners require
the cluster's token, or synchronize gradients. Any other listener is a finding."""
NO_PORT_ROLES: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, order=True)
class Listener:
    machine: str
    role: str
    scope: Scope
    port: int

    @property
    def is_allowed(self) -> bool:
        allowed_scope = ALLOWED_SCOPES.get(self.role)
        return allowed_scope == "network" or allowed_scope == self.scope

    @property
    def description(self) -> str:
        network = "the network" if self.scope == "network" else "loopback"
        return f"{self.role} listens on {network}, port {self.port} ({self.machine})"


def process_role(command: str) -> str:
    return next((role for role, sign in PROCESS_ROLES if sign in command), command[:60] or "an unnamed process")


def address_scope(address: str) -> Scope:
    return "loopback" if ip_address(address.partition("%")[0]).is_loopback else "network"


def find_listeners(machines: Iterable[tuple[str, int]], port_roles: Mapping[int, str] = NO_PORT_ROLES) -> set[Listener]:
    """Find the TCP listeners of all processes on the machines, given as (name, process id).

    `port_roles`: roles of ports that are more specific than their processes.
    """
    listeners = set()
    for name, pid in machines:
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    command_line = process.cmdline()
                    if not command_line and not process.exe():
                        continue  # it is exiting: a process loses its name before its sockets
                    role = process_role(" ".join(command_line))
                    for connection in process.net_connections(kind="tcp"):
                        if connection.status == psutil.CONN_LISTEN:
                            listeners.add(
                                Listener(
                                    name,
                                    port_roles.get(connection.laddr.port, role),
                                    address_scope(connection.laddr.ip),
                                    connection.laddr.port,
                                )
                            )
    return listeners
