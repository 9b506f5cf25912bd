"""Start commands of a rehearsed machine: the file's own `ray start`, on free ports."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rtrain.cluster.connection import package_root
from rtrain.core import env
from rtrain.rehearsal.machines.cloud import MachineCommands
from rtrain.rehearsal.machines.machine_registry import MachineRecord
from rtrain.rehearsal.plan import RehearsalPlan

OBJECT_STORE_BYTES = 128 << 20
"""Object store of a node: two streams of 64 MB."""
RAY_START = [sys.executable, "-m", "ray.scripts.scripts", "start"]
# Ray or the file fixes these ports, but all nodes of a rehearsal share one machine.
PORT_OPTIONS = (
    *("--node-manager-port", "--object-manager-port", "--runtime-env-agent-port", "--dashboard-agent-grpc-port"),
    *("--dashboard-agent-listen-port", "--metrics-export-port"),
)
INHERITED_VARIABLES = (
    *("HOME", "LANG", "TMPDIR", "TZ", "OMP_NUM_THREADS", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Environment variables that a machine inherits, besides those of the model hub: a real node has no other settings of
its user, such as cloud credentials."""
RANDOM_PORTS = tuple(f"{name}=0" for name in PORT_OPTIONS)


@dataclass(frozen=True)
class NodeCommandFactory:
    """Start commands of each machine of `plan`'s cluster."""

    plan: RehearsalPlan
    folder: Path
    """Folder of Ray's files. Its path is short: socket paths have at most about 100 bytes."""
    token_file: Path
    autoscaler_file: Path
    """Configuration file of the autoscaler."""
    address: str
    """HOST:PORT of the head's control service."""
    dashboard_port: int
    metadata_url: str
    """Base URL of the metadata services; each machine has its own path."""
    monitor_ports: tuple[int, int] = (0, 0)
    """Metrics ports of the autoscaler and of the dashboard."""

    def __call__(self, machine: MachineRecord) -> MachineCommands:
        is_head = machine.type == self.plan.head.name
        return self._head_commands(machine) if is_head else self._worker_commands(machine)

    def _head_commands(self, machine: MachineRecord) -> MachineCommands:
        autoscaler_port, dashboard_port = self.monitor_ports
        environment = self._environment(machine) | {
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_METRIC_PORT": str(autoscaler_port),
            "DASHBOARD_METRIC_PORT": str(dashboard_port),
        }
        command = [
            *(*RAY_START, "--head", "--block", *self.plan.head_options, *RANDOM_PORTS),
            f"--port={self.address.rpartition(':')[2]}",
            f"--dashboard-port={self.dashboard_port}",
            f"--autoscaling-config={self.autoscaler_file}",
            *self._common_options(machine),
        ]
        return MachineCommands([command], environment)

    def _worker_commands(self, machine: MachineRecord) -> MachineCommands:
        command = [*RAY_START, *self.plan.worker_options, *RANDOM_PORTS]
        command += [f"--address={self.address}", *self._common_options(machine)]
        commands = [[*command, "--block"]]
        if self.plan.watcher:
            watcher = [
                sys.executable,
                "-m",
                "rtrain.cluster.spot_watcher",
                self.plan.watcher,
                f"--address={self.address}",
            ]
            lock = self.folder / f"{machine.name}.lock"
            commands.append([*watcher, f"--metadata={self.metadata_url}/{machine.name}", f"--lock={lock}"])
        return MachineCommands(commands, self._environment(machine))

    def _common_options(self, machine: MachineRecord) -> list[str]:
        # A separate folder: in a shared one, two nodes' agents manage the same uploads.
        folder = self.folder / machine.name
        return [
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={folder}",
            "--disable-usage-stats",
        ]

    def _environment(self, machine: MachineRecord) -> dict[str, str]:
        """Environment as the launcher sets it; of this process only what programs need to start."""
        inherited = {
            name: value for name, value in os.environ.items() if name in INHERITED_VARIABLES or name.startswith("HF_")
        }
        return {
            **inherited,
            "RAY_CLOUD_INSTANCE_ID": machine.name,
            "RAY_NODE_TYPE_NAME": machine.type,
            "RAY_OVERRIDE_RESOURCES": json.dumps(dict(machine.resources)),
            "RAY_OVERRIDE_LABELS": json.dumps(dict(machine.labels)),
            # Each node would kill workers for the memory of other nodes on this machine.
            "RAY_memory_monitor_refresh_ms": "0",
            **({env.FAKE_GPUS_ENV: "1"} if self.plan.has_gpus else {}),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join([str(package_root()), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            **({"RAY_START_HOOK": self.plan.start_hook} if self.plan.start_hook else {}),
        }
