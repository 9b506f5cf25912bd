"""The cluster of a file on this machine: launched, and taken down with nothing left behind. A machine runs the file's
own `ray start`, on free ports."""

import functools
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from rtrain.cluster.cluster_file import WATCHER_MODULE
from rtrain.cluster.connection import package_root
from rtrain.cluster.jobs.client import JobClient
from rtrain.core import env
from rtrain.core.errors import UserError
from rtrain.rehearsal.cloud import (
    FakeInstanceMetadata,
    MachineCommands,
    MetadataByMachine,
    SimulatedCloud,
    serve_metadata,
)
from rtrain.rehearsal.machine import MachineRecord, MachineRegistry
from rtrain.rehearsal.plan import RehearsalPlan

LogFunction = Callable[[str], None]
OBJECT_STORE_BYTES = 128 << 20
"""Object store of a node: two streams of 64 MB."""
HEAD_TIMEOUT_S = 300.0
SHUTDOWN_TIMEOUT_S = 15.0
SHARED_MEMORY = Path("/dev/shm")
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


@dataclass
class RehearsalCluster:
    plan: RehearsalPlan
    registry: MachineRegistry
    cloud: SimulatedCloud
    metadata_by_machine: MetadataByMachine
    """Metadata of each machine."""
    address: str
    """HOST:PORT of the head's control service."""
    metrics_port: int
    """Metrics port of the dashboard."""
    jobs: JobClient
    head_name: str
    """Name of the head's machine."""
    machines: Mapping[str, MachineRecord] = field(default_factory=dict)
    """All machines, once they have ended."""
    left_behind: list[str] = field(default_factory=list)
    """Leftovers after the shutdown."""


@contextmanager
def launch_cluster(plan: RehearsalPlan, logs: Path, log: LogFunction) -> Iterator[RehearsalCluster]:
    """Launch the cluster of `plan` while the block runs. `logs` is a folder for its machines' output."""
    if sys.platform != "linux":
        reason = "a rehearsal needs Linux: other systems cannot keep a machine's processes together"
        raise UserError(reason, code="unsupported_platform")
    previous_shared_memory = _shared_memory_files()
    # Ray's sockets lie in it, and a socket path has about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(_shared_token())
    # Ray reads them on import, and sends the token with every call to the cluster.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token_file))
    import ray.util
    from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    registry, metadata_by_machine = MachineRegistry(folder / "machines"), MetadataByMachine(FakeInstanceMetadata)
    autoscaler_file = folder / "autoscaler.yaml"
    autoscaler_file.write_text(yaml.safe_dump(plan.autoscaler_config(str(registry.folder))))
    head_port, dashboard_port, *metrics_ports = find_free_ports(4)
    address = f"{ray.util.get_node_ip_address()}:{head_port}"
    tags = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: plan.head.name}
    cluster: RehearsalCluster | None = None
    try:
        with serve_metadata(metadata_by_machine) as metadata_url:
            monitor_ports = metrics_ports[0], metrics_ports[1]
            command_factory = NodeCommandFactory(
                plan, folder, token_file, autoscaler_file, address, dashboard_port, metadata_url, monitor_ports
            )
            with SimulatedCloud(registry, command_factory, logs) as cloud:
                head_name = registry.request_machine(plan.head.name, plan.head.resources, plan.head.labels, tags)
                jobs = _wait_for_head(cloud, registry, head_name, f"http://127.0.0.1:{dashboard_port}", log)
                cluster = RehearsalCluster(
                    plan, registry, cloud, metadata_by_machine, address, metrics_ports[1], jobs, head_name
                )
                yield cluster
        cluster.machines = registry.all_machines()
        cluster.left_behind += [f"{name} had to be killed" for name in cloud.killed_late]
    finally:
        _keep_autoscaler_log(folder, logs)
        left_behind = _remaining_processes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        shared_memory = unmapped_files(_shared_memory_files() - previous_shared_memory)
        left_behind += [f"shared memory {name}" for name in shared_memory]
        left_behind += [str(folder)] if folder.exists() else []
        if cluster is not None:
            cluster.left_behind += left_behind


@functools.cache
def _shared_token() -> str:
    """One token for all clusters of a process: Ray caches the first one it reads."""
    return secrets.token_hex(32)


def _wait_for_head(
    cloud: SimulatedCloud, registry: MachineRegistry, head_name: str, api_url: str, log: LogFunction
) -> JobClient:
    """Wait for the job API."""
    log("starting the head")
    deadline = time.monotonic() + HEAD_TIMEOUT_S
    while True:
        with suppress(UserError):
            jobs = JobClient(api_url)
            jobs.list_jobs()
            return jobs
        if head_name not in registry.live_machines() or time.monotonic() > deadline:
            lines = cloud.read_log(head_name).strip().splitlines()[-8:]
            raise UserError("\n".join(["the head does not come up; its last lines:", *lines]), code="no_head")
        time.sleep(0.2)


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
            watcher = [sys.executable, "-m", WATCHER_MODULE, self.plan.watcher, f"--address={self.address}"]
            lock = self.folder / f"{machine.name}.lock"
            commands.append([*watcher, f"--metadata={self.metadata_url}/{machine.name}", f"--lock={lock}"])
        return MachineCommands(commands, self._environment(machine))

    def _common_options(self, machine: MachineRecord) -> list[str]:
        # A separate folder: in a shared one, two nodes' agents manage the same uploads.
        folder = self.folder / machine.name
        return [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder}", "--disable-usage-stats"]

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


def find_free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _remaining_processes(folder: Path) -> list[str]:
    """Remaining processes of the cluster: their command line, folder or environment names its folder."""
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while True:
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                traces = [" ".join(process.cmdline()), process.cwd(), *process.environ().values()]
                if process.pid != os.getpid() and any(str(folder) in trace for trace in traces):
                    processes.append(f"process {process.pid} ({traces[0][:80]})")
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.5)


def _shared_memory_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def unmapped_files(names: set[str]) -> list[str]:
    """Shared memory files that no process maps. A mapped file belongs to a living process, and all processes of the
    cluster have ended."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += maps.read_text()
    return sorted(name for name in names if (SHARED_MEMORY / name).exists() and str(SHARED_MEMORY / name) not in mapped)


def _keep_autoscaler_log(folder: Path, logs: Path) -> None:
    """Keep the autoscaler's log, which explains starts and terminations; Ray's other files are deleted."""
    for path in folder.glob("*/session_2*/logs/*"):
        if path.name.startswith(("monitor.", "autoscaler")) and path.is_file():
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, logs / path.name)
