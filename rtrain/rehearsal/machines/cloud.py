"""Starts and ends the machines of a rehearsed cluster, as its book asks."""

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
from rtrain.rehearsal.machines.machine_registry import Book, Machine

LOOK_EVERY_S = 0.2
ENDED_WITHIN_S = 15.0
"""Seconds in which machines that are told to end must have; after them they are killed, which is said."""


class Start(NamedTuple):
    """What a machine is started with."""

    commands: Sequence[Sequence[str]]
    """The first one is its Ray."""
    environ: Mapping[str, str]


class Cloud:
    """While it is entered, machines that the book asks for are started, and those that it does not want are ended.

    Leaving it ends them all. `make` says what a machine is started with; `logs` is a folder for what they print.
    """

    def __init__(self, book: Book, make: Callable[[Machine], Start], logs: Path):
        self._book, self._make, self._logs = book, make, logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._told: set[str] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rtrain-cloud", daemon=True)
        self.killed_late: list[str] = []
        """Machines that did not end in time when all were told to."""

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for process in self._running.values():
            process.send_signal(signal.SIGINT)
        give_up = time.monotonic() + ENDED_WITHIN_S
        for name, process in self._running.items():
            try:
                process.wait(max(0.1, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.killed_late.append(name)
                process.send_signal(machine.POWER_CUT)
                process.wait()
            self._book.ended(name, "down")

    def cut(self, name: str) -> None:
        """A loss of power: the machine is gone, and nothing of it is told."""
        self._running[name].send_signal(machine.POWER_CUT)

    def log_of(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def _look(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            for name, one in self._book.up().items():
                process = self._running.get(name)
                if process is None and not one.unwanted:
                    self._start(one)
                elif process is None:
                    self._book.ended(name, "terminated")  # no longer wanted before it was there
                elif process.poll() is not None:
                    self._book.ended(name, "killed")  # without a word of its own
                elif one.unwanted and name not in self._told:
                    self._told.add(name)
                    process.terminate()

    def _start(self, asked: Machine) -> None:
        made = self._make(asked)
        words = [sys.executable, "-m", machine.__name__, str(self._book.folder), asked.name, str(os.getpid())]
        for command in made.commands:
            words += ["--", *command]
        with (self._logs / f"{asked.name}.log").open("wb") as log:
            self._running[asked.name] = subprocess.Popen(
                words,
                env=dict(made.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the rehearsal, which then ends them in order
            )
        self._book.started(asked.name, self._running[asked.name].pid)
