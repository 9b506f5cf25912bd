"""How a machine of a rehearsed cluster starts Ray: as the file's own `ray start` does, on ports that are free here."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rtrain.cluster.connection import package_root
from rtrain.core import env
from rtrain.rehearsal.machines.cloud import Start
from rtrain.rehearsal.machines.machine_registry import Machine
from rtrain.rehearsal.plan import Plan

STORE_BYTES = 128 << 20
"""Object store of a node: two streams of 64 MB."""
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
# Each of them is fixed by Ray or by the file, and the nodes of a rehearsal are all on one machine.
PORTS = (
    *("--node-manager-port", "--object-manager-port", "--runtime-env-agent-port", "--dashboard-agent-grpc-port"),
    *("--dashboard-agent-listen-port", "--metrics-export-port"),
)
KEPT = (
    *("HOME", "LANG", "TMPDIR", "TZ", "OMP_NUM_THREADS", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""What a machine takes over from the environment of the rehearsal, with what the model hub's library reads: a node has
nothing else of its user's, such as the credentials of a cloud."""
FREE_PORTS = tuple(f"{name}=0" for name in PORTS)


@dataclass(frozen=True)
class Nodes:
    """Start of each machine of the cluster of `plan`."""

    plan: Plan
    folder: Path
    """Ray's own files lie there. Its path is short: sockets lie under it, whose paths may have 100 bytes."""
    token: Path
    autoscaler: Path
    """The autoscaler's file."""
    address: str
    """HOST:PORT of the head's control service."""
    dashboard_port: int
    metadata: str
    """Address of the metadata services of all machines; each has its own under its name."""
    monitor_ports: tuple[int, int] = (0, 0)
    """For the metrics of the autoscaler and of the dashboard."""

    def __call__(self, machine: Machine) -> Start:
        is_head = machine.type == self.plan.head.name
        return self._head(machine) if is_head else self._worker(machine)

    def _head(self, machine: Machine) -> Start:
        autoscaling, dashboard = self.monitor_ports
        environ = self._environ(machine) | {
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_METRIC_PORT": str(autoscaling),
            "DASHBOARD_METRIC_PORT": str(dashboard),
        }
        command = [
            *(*RAY, "--head", "--block", *self.plan.head_options, *FREE_PORTS),
            f"--port={self.address.rpartition(':')[2]}",
            f"--dashboard-port={self.dashboard_port}",
            f"--autoscaling-config={self.autoscaler}",
            *self._common(machine),
        ]
        return Start([command], environ)

    def _worker(self, machine: Machine) -> Start:
        command = [*RAY, *self.plan.worker_options, *FREE_PORTS]
        command += [f"--address={self.address}", *self._common(machine)]
        commands = [[*command, "--block"]]
        if self.plan.watcher:
            spot = [sys.executable, "-m", "rtrain.cluster.spot_watcher", self.plan.watcher, f"--address={self.address}"]
            lock = self.folder / f"{machine.name}.lock"
            commands.append([*spot, f"--metadata={self.metadata}/{machine.name}", f"--lock={lock}"])
        return Start(commands, self._environ(machine))

    def _common(self, machine: Machine) -> list[str]:
        # A folder of its own: with a shared one, two nodes' agents manage one uploaded folder.
        folder = self.folder / machine.name
        return [
            f"--object-store-memory={STORE_BYTES}",
            f"--temp-dir={folder}",
            "--disable-usage-stats",
        ]

    def _environ(self, machine: Machine) -> dict[str, str]:
        """As the launcher sets it; of this process's own only what programs need to start."""
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("HF_")}
        return {
            **kept,
            "RAY_CLOUD_INSTANCE_ID": machine.name,
            "RAY_NODE_TYPE_NAME": machine.type,
            "RAY_OVERRIDE_RESOURCES": json.dumps(dict(machine.resources)),
            "RAY_OVERRIDE_LABELS": json.dumps(dict(machine.labels)),
            # Each node would end workers for the memory that others on this machine take.
            "RAY_memory_monitor_refresh_ms": "0",
            **({env.COUNTED_GPUS: "1"} if self.plan.counts_gpus else {}),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join([str(package_root()), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            **({"RAY_START_HOOK": self.plan.hook} if self.plan.hook else {}),
        }
