"""The simulated cloud of a rehearsal: it starts and terminates the machines that the registry requests, and serves the
metadata of three clouds on loopback, one path per machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self

from rtrain.rehearsal import machine
from rtrain.rehearsal.machine import MachineRecord, MachineRegistry

POLL_INTERVAL_S = 0.2
SHUTDOWN_TIMEOUT_S = 15.0
"""Timeout in seconds for machines to shut down; then they are killed and reported."""


class MachineCommands(NamedTuple):
    commands: Sequence[Sequence[str]]
    """The first command starts Ray."""
    environment: Mapping[str, str]


class SimulatedCloud:
    """Context manager that starts requested machines, and terminates unwanted ones.

    On exit it terminates all of them. `make_commands` returns a machine's start commands; `logs` is a folder for their
    output.
    """

    def __init__(
        self, registry: MachineRegistry, make_commands: Callable[[MachineRecord], MachineCommands], logs: Path
    ):
        self._registry, self._make_commands, self._logs = registry, make_commands, logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._signaled: set[str] = set()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._poll_registry, name="rtrain-cloud", daemon=True)
        self.killed_late: list[str] = []
        """Machines that did not shut down in time."""

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()
        for process in self._processes.values():
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for name, process in self._processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.killed_late.append(name)
                process.send_signal(machine.POWER_CUT)
                process.wait()
            self._registry.record_end(name, "down")

    def cut_power(self, name: str) -> None:
        """Kill a machine without notice, like a loss of power."""
        self._processes[name].send_signal(machine.POWER_CUT)

    def read_log(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def _poll_registry(self) -> None:
        while not self._stop_event.wait(POLL_INTERVAL_S):
            for name, record in self._registry.live_machines().items():
                process = self._processes.get(name)
                if process is None and not record.is_unwanted:
                    self._start(record)
                elif process is None:
                    self._registry.record_end(name, "terminated")  # terminated before it started
                elif process.poll() is not None:
                    self._registry.record_end(name, "killed")  # it ended without recording a reason
                elif record.is_unwanted and name not in self._signaled:
                    self._signaled.add(name)
                    process.terminate()

    def _start(self, record: MachineRecord) -> None:
        machine_commands = self._make_commands(record)
        arguments = [str(self._registry.folder), record.name, str(os.getpid())]
        command_line = [sys.executable, "-m", machine.__name__, *arguments]
        for command in machine_commands.commands:
            command_line += ["--", *command]
        with (self._logs / f"{record.name}.log").open("wb") as log:
            self._processes[record.name] = subprocess.Popen(
                command_line,
                env=dict(machine_commands.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes to the rehearsal only, which shuts them down in order
            )
        self._registry.record_start(record.name, self._processes[record.name].pid)


@dataclass
class FakeInstanceMetadata:
    """Metadata of a machine; it may change at any time."""

    terminates_at: float | None = None
    """Time of the preemption, in seconds since 1970."""
    rebalance_at: float | None = None
    """Time of a rebalance recommendation (AWS)."""
    name: str = "node-1"
    event_resources: tuple[str, ...] = ("node-1",)
    """Azure: the machines of an event."""
    tokens: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    remaining_failures: int = 0
    """Number of failing responses before the first success."""

    def respond(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and text, as in the cloud's documentation."""
        self.requests.append(f"{method} {path}")
        if self.remaining_failures:
            self.remaining_failures -= 1
            return 503, "later"
        if path.startswith("/latest/"):
            return self._respond_aws(method, path, headers)
        if path.startswith("/computeMetadata/"):
            if headers.get("metadata-flavor") != "Google":
                return 403, "Missing Metadata-Flavor:Google header."
            return 200, "FALSE" if self.terminates_at is None else "TRUE"
        if headers.get("metadata") != "true":
            return 400, json.dumps({"error": "Bad request. Required metadata header not specified"})
        if path.startswith("/metadata/instance/compute/name"):
            return 200, self.name
        events = []
        if self.terminates_at is not None:
            not_before = format_datetime(datetime.fromtimestamp(self.terminates_at, UTC), usegmt=True)
            events = [{"EventType": "Preempt", "NotBefore": not_before, "Resources": list(self.event_resources)}]
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})

    def _respond_aws(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path == "/latest/api/token":
            if method != "PUT" or "x-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return 405, ""
            token = f"token-{len(self.requests)}"
            self.tokens.add(token)
            return 200, token
        if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, ""
        if path.endswith("/spot/instance-action") and self.terminates_at is not None:
            return 200, json.dumps({"action": "terminate", "time": _format_time(self.terminates_at)})
        if path.endswith("/events/recommendations/rebalance") and self.rebalance_at is not None:
            return 200, json.dumps({"noticeTime": _format_time(self.rebalance_at)})
        return 404, ""


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


MetadataByMachine = defaultdict[str, FakeInstanceMetadata]
"""Metadata by machine name; unknown machines have defaults."""


class _MetadataServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors: a watcher on a busy machine may retry before it gets its response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serve_metadata(machines: MetadataByMachine) -> Iterator[str]:
    """Serve the metadata; yields the base URL: `URL/NAME` belongs to the machine NAME."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            _, name, rest = self.path.split("/", 2)
            status, text = machines[name].respond(self.command, f"/{rest}", headers)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = _reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _MetadataServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
