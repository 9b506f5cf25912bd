"""A network of its own for a rehearsed cluster: each machine has a namespace with an address, on one bridge.

Ports are the file's own then, and a machine whose power is cut answers nobody, where the end of its processes alone
would be told to all that they were connected to. Linux, and root.
"""

import ctypes
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

NAMESPACES = Path("/run/netns")
METADATA = "169.254.169.254"
"""The address of a cloud's metadata service; each machine has it for itself."""
PREFIX = "rt"
SUBNETS = range(64, 256)
"""Third bytes of the addresses 10.203.x.y that may be taken."""
FIRST, LAST = 2, 250
PORTION = 1 << 16
CONNECT_S = 10.0
Result = TypeVar("Result")
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


def problem() -> str | None:
    """Why there can be none here; None where there can."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "namespaces are Linux's"
    if os.geteuid() != 0:
        return "namespaces need root: call it with sudo, or in a container with --privileged"
    if shutil.which("ip") is None:
        return "the program ip is missing: install iproute2"
    return None


class Place(NamedTuple):
    """Where a machine is in the network."""

    number: int
    namespace: str
    address: str


@dataclass(frozen=True)
class _Link:
    place: Place
    name: str
    """The name of the bridge's end."""


class Network:
    """While it is entered there is a bridge, and a namespace for each machine that has joined. Leaving removes all."""

    def __init__(self) -> None:
        self.name = f"{PREFIX}{os.getpid():x}"
        self._links: dict[str, _Link] = {}
        self._subnet = ""
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        sweep()
        _ip("link", "add", self.name, "type", "bridge")
        try:
            self._subnet = _free_subnet()
            _ip("addr", "add", f"{self.gateway}/24", "dev", self.name)
            _ip("link", "set", self.name, "up")
        except BaseException:
            _ip("link", "del", self.name)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links.values():
            for words in (("link", "del", link.name), ("netns", "del", link.place.namespace)):
                with suppress(subprocess.CalledProcessError):
                    _ip(*words)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self.name)

    @property
    def gateway(self) -> str:
        """This machine's own address there, for what is beside the cluster."""
        return f"{self._subnet}.1"

    def join(self, machine: str) -> Place:
        """Where the machine is, which gets a namespace and an address of its own, like none that there was."""
        with self._lock:
            number = FIRST + len(self._links)
            if number > LAST:
                raise OSError(f"a rehearsed network has room for {LAST - FIRST + 1} machines")
            place = Place(number, f"{self.name}-{number}", f"{self._subnet}.{number}")
            link = _Link(place, f"{self.name}v{number}")
            _ip("netns", "add", place.namespace)
            self._links[machine] = link
        inner = ("-n", place.namespace)
        _ip("link", "add", link.name, "type", "veth", "peer", "name", "eth0", "netns", place.namespace)
        _ip("link", "set", link.name, "master", self.name, "up")
        _ip(*inner, "addr", "add", f"{place.address}/24", "dev", "eth0")
        _ip(*inner, "addr", "add", f"{METADATA}/32", "dev", "lo")
        _ip(*inner, "link", "set", "lo", "up")
        _ip(*inner, "link", "set", "eth0", "up")
        # By it programs find out which address is theirs; nothing is forwarded.
        _ip(*inner, "route", "add", "default", "via", self.gateway)
        return place

    def place(self, machine: str) -> Place:
        return self._links[machine].place

    def unplug(self, machine: str) -> None:
        """From now on nothing reaches the machine, and nobody is told."""
        if machine in self._links:
            _ip("link", "set", self._links[machine].name, "down")

    def hosts(self) -> str:
        """/etc/hosts of the machines that have joined."""
        named = [f"{link.place.address} {machine}" for machine, link in self._links.items()]
        return "\n".join(["127.0.0.1 localhost", "::1 localhost", *named, ""])

    def left(self) -> list[str]:
        """What is still there of it."""
        return [f"network {name}" for name in (*_spaces(), *_links()) if name.startswith(self.name)]


def sweep() -> None:
    """Remove what rehearsals have left that were killed: their names hold the ids of their processes."""
    for names, kind in ((_links(), "link"), (_spaces(), "netns")):
        for name in names:
            owner = re.match(rf"{PREFIX}([0-9a-f]+)(?:$|[-v]\d+$)", name)
            if owner and not Path(f"/proc/{int(owner[1], 16)}").exists():
                with suppress(subprocess.CalledProcessError):  # the other end of a link that was removed
                    _ip(kind, "del", name)


def _spaces() -> list[str]:
    return [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.is_dir() else []


def _links() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _free_subnet() -> str:
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout
    return next(f"10.203.{third}" for third in SUBNETS if f"10.203.{third}." not in routes)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


# --------------------------------------------------------------------------------------------------- from outside of it


def enter(namespace: str) -> None:
    """Have this thread in the network of that name from now on."""
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def inside(namespace: str, act: Callable[[], Result]) -> Result:
    """What `act` returns in the namespace. A socket that it makes stays there, whoever uses it."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter(namespace)
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rtrain-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def forwarded(namespace: Callable[[], str], port: int) -> Iterator[int]:
    """A port of this machine's loopback that leads to the loopback of that namespace, as SSH forwards one. The
    namespace is asked for at each connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def lead(near: socket.socket) -> None:
        with near, suppress(OSError, LookupError):
            far = inside(namespace(), lambda: socket.create_connection(("127.0.0.1", port), CONNECT_S))
            far.settimeout(None)
            back = threading.Thread(target=_pump, args=(far, near), name="rtrain-forward", daemon=True)
            back.start()
            _pump(near, far)
            back.join()
            far.close()

    def serve() -> None:
        while True:
            try:
                near, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=lead, args=(near,), name="rtrain-forward", daemon=True).start()

    thread = threading.Thread(target=serve, name="rtrain-forward", daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """What comes from one goes to the other, until it says no more; and so does that."""
    with suppress(OSError):
        while portion := source.recv(PORTION):
            sink.sendall(portion)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
