"""Starts and terminates the machines of a rehearsed cluster, as its registry requests."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from rtrain.rehearsal.machines import machine
from rtrain.rehearsal.machines.machine_registry import MachineRecord, MachineRegistry

POLL_INTERVAL_S = 0.2
SHUTDOWN_TIMEOUT_S = 15.0
"""Timeout in seconds for machines to shut down; then they are killed and reported."""


class MachineCommands(NamedTuple):
    """Start commands of a machine."""

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
        command_line = [
            sys.executable,
            "-m",
            machine.__name__,
            str(self._registry.folder),
            record.name,
            str(os.getpid()),
        ]
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
