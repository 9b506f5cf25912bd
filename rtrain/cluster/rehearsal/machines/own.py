"""How a machine of a rehearsed cluster is made by the file's own commands, with an address and a home of its own."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import yaml

from rtrain.cluster.rehearsal.machines import metadata, network, nodes, vm
from rtrain.cluster.rehearsal.machines.book import Machine
from rtrain.cluster.rehearsal.machines.cloud import Start
from rtrain.cluster.rehearsal.machines.commands import DASHBOARD_PORT, GCS_PORT, Commands, File
from rtrain.cluster.rehearsal.machines.network import Network, Place, Result
from rtrain.cluster.rehearsal.plan import Plan
from rtrain.cluster.session import package_root

STORE_SHARE = "0.01"
"""Share of the memory that a node's object store takes: all nodes are on one machine, and the store is 30 % by
default."""
METADATA_PORT = 80
NO_RESOLVER = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
"""Nobody answers there, which is seen at once."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Own:
    """Start of each machine of the cluster of `plan`, which a `Network` and metadata services are made for.

    `source`: the folder of the cluster's file, from which machines get their files. `folder` is the cluster's own; its
    path is short, since the paths of sockets are. While it is entered, `api_port` leads to the head's job API.
    """

    def __init__(self, plan: Plan, file: File, source: Path, folder: Path, token: str, told: metadata.Machines):
        self.plan, self.file, self.network = plan, file, Network()
        self._source, self._folder, self._token, self._told = source, folder, token, told
        self._stack = ExitStack()
        self._head: str | None = None
        self.environ: Mapping[str, str] = {}
        """What the head has in its environment beside."""
        self.commands: dict[str, Commands] = {}
        """By node type, what its nodes run and what they do not."""

    def __enter__(self) -> "Own":
        self._stack.enter_context(self.network)
        port = self.file.number("--dashboard-port", DASHBOARD_PORT)
        self.api_port = self._stack.enter_context(self.forwarded(port))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def forwarded(self, port: int) -> AbstractContextManager[int]:
        """A port of this machine's loopback that leads to that one of the head's, whichever machine that is."""
        return network.forwarded(lambda: self._place().namespace, port)

    def at_head(self, act: Callable[[], Result]) -> Result:
        return network.inside(self._place().namespace, act)

    @property
    def address(self) -> str:
        """HOST:PORT of the head's control service."""
        return f"{self._place().address}:{self.file.number('--port', GCS_PORT)}"

    def token_of(self, machine: str) -> Path:
        return self._path(machine, self.file.token)

    def home(self, machine: str) -> Path:
        return self._folder / str(self.network.place(machine).number) / "home"

    def __call__(self, machine: Machine) -> Start:
        is_head = machine.type == self.plan.head.name
        place = self.network.join(machine.name)
        if is_head:
            self._head = machine.name
        listening = network.inside(
            place.namespace, lambda: socket.create_server((network.METADATA, METADATA_PORT), backlog=16)
        )
        self._stack.enter_context(metadata.serving_one(self._told[machine.name], listening))
        found = self.commands[machine.type] = self.file.of(machine.type, is_head)
        home = self.home(machine.name)
        self._furnish(machine.name, home, found, is_head)
        names, resolver = home.parent / "hosts", home.parent / "resolv.conf"
        names.write_text(self.network.hosts())
        resolver.write_text(NO_RESOLVER)
        spec = vm.Spec(
            name=machine.name,
            namespace=place.namespace,
            home=str(home),
            files={"/etc/hosts": str(names), "/etc/resolv.conf": str(resolver)},
            book=str(self._folder / "book"),
            user_home=self.file.home,
            # As the launcher on a laptop does; a worker is made by the autoscaler of the head that has got it.
            commands=found.run if is_head else (),
            copies=self._copies(machine.name, is_head),
        )
        spec.write(home.parent / "spec.json")
        command = [sys.executable, "-m", vm.__name__, str(home.parent / "spec.json")]
        return Start([command], self._environ(machine, place, home, is_head))

    def _furnish(self, machine: str, home: Path, found: Commands, is_head: bool) -> None:
        """What the launcher and the commands that are left out would have put there."""
        (home.parent / "tmp").mkdir(parents=True)
        home.mkdir()
        for name in found.environments:
            (home / name).symlink_to(sys.prefix)
        for target, source in self.file.mounts.items():
            place, given = self._path(machine, target), self._source / source
            if target.startswith("~/") and given.exists() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(given.resolve())
        if is_head:
            bootstrap = self._path(machine, self.file.option("--autoscaling-config") or "~/ray_bootstrap_config.yaml")
            workers = {kind.name: self.file.of(kind.name, is_head=False) for kind in self.plan.kinds}
            setup = {name: one.setup for name, one in workers.items()}
            start = next((one.start for one in workers.values()), ())
            described = self.plan.autoscaler_file(str(self._folder / "book"), setup, start)
            bootstrap.write_text(yaml.safe_dump(described))
            # The file's own command makes none where there is one: this process shows the same one to every cluster.
            token = self.token_of(machine)
            token.parent.mkdir(parents=True, exist_ok=True)
            token.touch(mode=0o600)
            token.write_text(self._token)

    def _copies(self, machine: str, is_head: bool) -> dict[str, str]:
        if is_head or self._head is None:
            return {}
        pairs = {str(self._path(machine, path)): self._path(self._head, path) for path in self.file.synced}
        return {target: str(source) for target, source in pairs.items() if source.is_file()}

    def _path(self, machine: str, path: str) -> Path:
        return self.home(machine) / path.removeprefix("~/") if path.startswith("~") else Path(path)

    def _place(self) -> Place:
        """The head's. Raises LookupError where there is none yet."""
        return self.network.place(self._head or "")

    def _environ(self, machine: Machine, place: Place, home: Path, is_head: bool) -> dict[str, str]:
        kept = nodes.environ_of(machine, self.plan)
        cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        return {
            **kept,
            "HOME": str(home),
            "HF_HOME": str(cache),
            "TMPDIR": str(home.parent / "tmp"),
            # What the file's commands have installed comes first, where they put it ahead.
            "PATH": f"{SYSTEM_PATH}:{Path(sys.executable).parent}",
            "PYTHONPATH": str(package_root()),
            **({"RAY_HEAD_IP": place.address} if is_head else {}),
            "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": STORE_SHARE,
            **({**nodes.HEAD_ENVIRON, **self.environ} if is_head else {}),
        }
