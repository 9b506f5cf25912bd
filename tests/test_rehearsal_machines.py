"""The machines of a rehearsed cluster: written down, started, ended, and the sockets on which they listen."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.autoscaler.node_launch_exception import NodeLaunchException

from rtrain.rehearsal import plan as plans, ports
from rtrain.rehearsal.machines import local_cluster, machine, provider
from rtrain.rehearsal.machines.cloud import Cloud, Start
from rtrain.rehearsal.machines.machine_registry import Book, Machine
from rtrain.rehearsal.ports import Listener
from tests.root import ROOT

WITHIN_S = 20.0


def until(met: Any) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not met():
        assert time.monotonic() < give_up
        time.sleep(0.05)


# -------------------------------------------------------------------------------------------------- book and provider


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "book")


def asked_by(book: Book, count: int = 1) -> list[str]:
    """Machines that Ray's autoscaler asks for."""
    made = provider.Rehearsed({plans.FOLDER: str(book.folder)}, "rehearsal")
    tags = {"ray-user-node-type": "worker", "ray-node-kind": "worker"}
    return list(made.create_node_with_resources_and_labels({}, tags, count, {"CPU": 8}, {"a": "b"}))


def test_the_autoscaler_s_tags_are_added_to_those_that_there_are(book: Book) -> None:
    cloud = provider.Rehearsed({plans.FOLDER: str(book.folder)}, "rehearsal")
    [name] = asked_by(book)
    cloud.set_node_tags(name, {"ray-node-status": "setting-up"})
    cloud.set_node_tags(name, {"ray-node-status": "up-to-date"})
    assert cloud.node_tags(name) == {
        "ray-user-node-type": "worker",
        "ray-node-kind": "worker",
        "ray-node-status": "up-to-date",
    }


def test_what_is_asked_for_is_there_until_it_has_ended(book: Book) -> None:
    cloud = provider.Rehearsed({plans.FOLDER: str(book.folder)}, "rehearsal")
    first, second = asked_by(book, 2)
    assert (first, second) == ("worker-1", "worker-2")
    assert cloud.non_terminated_nodes({}) == [first, second]
    assert cloud.non_terminated_nodes({"ray-node-kind": "head"}) == []
    assert (cloud.is_running(first), cloud.is_terminated(first)) == (False, False)
    book.started(first, os.getpid())
    assert cloud.is_running(first)
    assert cloud.node_tags(second)["ray-user-node-type"] == "worker"
    cloud.terminate_node(first)
    assert cloud.non_terminated_nodes({}) == [second]
    assert not cloud.is_terminated(first)  # only once it is gone
    book.ended(first, "terminated")
    book.ended(first, "down")
    assert cloud.is_terminated(first)
    assert book.all()[first].why == "terminated"
    assert asked_by(book) == ["worker-3"]  # no name comes back
    book.sell_out()
    with pytest.raises(NodeLaunchException):
        asked_by(book)
    assert list(book.all()) == [first, second, "worker-3"]


# ----------------------------------------------------------------------------------------------------------- machines

# In place of Ray: a process with a child that has left its session, as a raylet's workers may.
FAMILY = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def cloud(book: Book, tmp_path: Path) -> Iterator[Cloud]:
    def make(asked: Machine) -> Start:
        lasts = "0.5" if asked.type == "short" else "600"
        return Start([[sys.executable, "-c", FAMILY, lasts], ["sleep", "600"]], {**os.environ, "PYTHONPATH": str(ROOT)})

    with Cloud(book, make, tmp_path / "logs") as made:
        yield made


def family(book: Book, name: str) -> list[psutil.Process]:
    pid = book.all()[name].pid
    return [] if pid is None else psutil.Process(pid).children(recursive=True)


def started(book: Book, cloud: Cloud, kind: str) -> tuple[str, list[psutil.Process]]:
    """A machine that is up, and what runs on it: Ray's stand-in, its child, and the command beside it."""
    name = book.ask(kind, {"CPU": 1}, {}, {})
    until(lambda: "ready" in cloud.log_of(name))
    found = family(book, name)
    assert len(found) == 3
    return name, found


def test_a_machine_ends_as_it_is_told_and_nothing_of_it_stays(book: Book, cloud: Cloud) -> None:
    told, first = started(book, cloud, "told")
    cut, second = started(book, cloud, "cut")
    ends, third = started(book, cloud, "short")
    book.unwant(told)
    cloud.cut(cut)
    until(lambda: not book.up())
    assert {name: one.why for name, one in book.all().items()} == {told: "terminated", cut: "killed", ends: "left"}
    assert [one for one in (*first, *second, *third) if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert cloud.killed_late == []


def test_all_machines_end_with_the_cluster(book: Book, tmp_path: Path) -> None:
    def make(asked: Machine) -> Start:
        return Start([[sys.executable, "-c", FAMILY, "600"]], {**os.environ, "PYTHONPATH": str(ROOT)})

    with Cloud(book, make, tmp_path / "logs") as cloud:
        name = book.ask("worker", {}, {}, {})
        until(lambda: "ready" in cloud.log_of(name))
        found = family(book, name)
    assert book.all()[name].why == "down"
    assert [one for one in found if one.is_running()] == []


def test_a_machine_ends_with_a_rehearsal_that_is_killed(book: Book) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        words = [str(book.folder), "worker-1", str(owner.pid), "--", sys.executable, "-c", FAMILY, "600"]
        with subprocess.Popen(
            [sys.executable, "-m", machine.__name__, *words], cwd=ROOT, stdout=subprocess.PIPE
        ) as made:
            assert made.stdout is not None
            assert made.stdout.readline() == b"ready\n"
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            assert made.wait(WITHIN_S) == 0


def test_commands_are_parted() -> None:
    assert machine.parts(["--", "a", "b", "--", "c"]) == [["a", "b"], ["c"]]


# -------------------------------------------------------------------------------------------------------------- ports


def test_sockets_are_judged_by_whose_they_are_and_who_reaches_them() -> None:
    roles = {
        "/x/ray/core/src/ray/gcs/gcs_server --log_dir": "control service",
        "/x/ray/core/src/ray/raylet/raylet --raylet_socket": "raylet",
        "ray::DashboardAgent": "node agent",
        "python -u /x/ray/dashboard/dashboard.py --host": "dashboard",
        "python -m ray.util.client.server --port": "Ray Client",
        "ray::RayTrainWorker.run": "process of a job",
        "ray::ServeReplica:rtrain": "process of a job",
        "nc -l 4444": "nc -l 4444",
    }
    assert {command: ports.role_of(command) for command in roles} == roles
    assert [ports.scope_of(address) for address in ("127.0.0.1", "::1", "0.0.0.0", "::", "10.1.2.3")] == [
        *("loopback", "loopback", "network", "network", "network")
    ]
    assert Listener("m", "raylet", "network", 1).allowed
    assert Listener("m", "dashboard", "loopback", 8265).allowed
    for refused in (
        ("dashboard", "network"),
        ("Ray Client", "loopback"),
        ("nc -l 4444", "loopback"),
    ):
        assert not Listener("m", refused[0], refused[1], 1).allowed


def test_open_sockets_are_found_by_machine() -> None:
    script = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(60)"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        found = ports.listening([("m", os.getpid()), ("gone", 2**22)])
        known = ports.listening([("m", os.getpid())], {port: ports.METRICS})
        server.kill()
    assert [(one.role, one.allowed) for one in known if one.port == port] == [(ports.METRICS, True)]
    assert [(one.machine, one.scope, one.allowed) for one in found if one.port == port] == [("m", "loopback", False)]


def test_shared_memory_is_left_behind_where_nobody_has_mapped_it() -> None:
    with (
        tempfile.NamedTemporaryFile(dir=local_cluster.SHARED_MEMORY) as held,
        tempfile.NamedTemporaryFile(dir=local_cluster.SHARED_MEMORY) as left,
    ):
        held.truncate(10)
        with mmap.mmap(held.fileno(), 10):
            assert local_cluster.unmapped({Path(held.name).name, Path(left.name).name, "gone"}) == [
                Path(left.name).name
            ]
