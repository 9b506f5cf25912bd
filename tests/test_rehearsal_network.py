"""The network of a rehearsed cluster: addresses, ports, what reaches whom, and that nothing of it stays."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rtrain.cluster.rehearsal.machines import network
from rtrain.cluster.rehearsal.machines.network import Network, inside

# Slow since they may be skipped: namespaces are root's alone.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(network.problem() is not None, reason=network.problem() or "")]
ROOT = Path(__file__).resolve().parents[1]
ECHOED = b"a request of some words"


@pytest.fixture
def made() -> Iterator[Network]:
    with Network() as found:
        yield found
    assert found.left() == []


def echo(server: socket.socket) -> None:
    """Answers one connection after another with what it sends."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                one, _ = server.accept()
                with one:
                    while portion := one.recv(1000):
                        one.sendall(portion)

    threading.Thread(target=serve, daemon=True).start()


def asked(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, timeout=2) as one:
        one.sendall(ECHOED)
        one.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: one.recv(1000), b""))


def test_machines_have_addresses_of_their_own_and_may_have_the_same_port(made: Network) -> None:
    first, second = made.join("head-1"), made.join("worker-1")
    assert first.address != second.address
    for place in (first, second):
        server = inside(place.namespace, lambda place=place: socket.create_server((place.address, 6379)))  # type: ignore[misc]
        echo(server)
    assert asked((first.address, 6379)) == ECHOED  # from here, as one inside of the cloud's network
    assert inside(second.namespace, lambda: asked((first.address, 6379))) == ECHOED
    assert made.hosts().splitlines()[2:] == [f"{first.address} head-1", f"{second.address} worker-1"]
    names = inside(second.namespace, lambda: [name for _, name in socket.if_nameindex()])
    assert sorted(names)[:2] == ["eth0", "lo"]


def test_each_machine_has_a_metadata_service_and_what_is_on_its_loopback_for_itself(made: Network) -> None:
    places = [made.join("head-1"), made.join("worker-1")]
    for place in places:
        for address in (network.METADATA, "127.0.0.1"):
            echo(inside(place.namespace, lambda address=address: socket.create_server((address, 80))))  # type: ignore[misc]
        assert inside(place.namespace, lambda: asked((network.METADATA, 80))) == ECHOED
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((places[0].address, 80), timeout=2)


def test_a_port_of_a_machine_s_loopback_is_forwarded_to_here(made: Network) -> None:
    place = made.join("head-1")
    with network.forwarded(lambda: made.place("head-1").namespace, 8265) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as early:
            assert early.recv(10) == b""  # nobody listens there yet
        echo(inside(place.namespace, lambda: socket.create_server(("127.0.0.1", 8265))))
        assert [asked(("127.0.0.1", port)) for _ in range(3)] == [ECHOED] * 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_machine_without_power_says_nothing(made: Network) -> None:
    place = made.join("worker-1")
    echo(inside(place.namespace, lambda: socket.create_server((place.address, 6379))))
    with socket.create_connection((place.address, 6379), timeout=2) as one:
        one.sendall(b"hello")
        assert one.recv(10) == b"hello"
        made.unplug("worker-1")
        one.settimeout(0.5)
        one.sendall(b"hello")
        with pytest.raises(TimeoutError):  # no word that the connection is over
            one.recv(10)


def test_what_a_killed_rehearsal_has_left_is_removed_by_the_next() -> None:
    script = (
        "import os, signal; from rtrain.cluster.rehearsal.machines.network import Network; made = Network();"
        "made.__enter__(); made.join('head-1'); print(made.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    killed = Network()
    killed.name = done.stdout.strip()
    assert len(killed.left()) == 3
    with Network():
        assert killed.left() == []


def test_nothing_stays_where_the_cluster_fails() -> None:
    found = Network()
    with suppress(RuntimeError), found:
        found.join("head-1")
        raise RuntimeError
    assert found.left() == []
    listed = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert found.name not in listed
