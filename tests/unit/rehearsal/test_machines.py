"""Machines of a rehearsed cluster: recorded, started, terminated; and their listening sockets."""

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

from rtrain.rehearsal import faults, local_cluster, machine, plan as plans, provider
from rtrain.rehearsal.cloud import MachineCommands, SimulatedCloud
from rtrain.rehearsal.faults import Listener
from rtrain.rehearsal.machine import MachineRecord, MachineRegistry
from tests.support.root import ROOT

WITHIN_S = 20.0


def until(met: Any) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not met():
        assert time.monotonic() < give_up
        time.sleep(0.05)


# -------------------------------------------------------------------------------------------------- book and provider


@pytest.fixture
def book(tmp_path: Path) -> MachineRegistry:
    return MachineRegistry(tmp_path / "book")


def asked_by(book: MachineRegistry, count: int = 1) -> list[str]:
    """Machines that Ray's autoscaler asks for."""
    document = provider.RehearsalNodeProvider({plans.FOLDER_SETTING: str(book.folder)}, "rehearsal")
    tags = {"ray-user-node-type": "worker", "ray-node-kind": "worker"}
    return list(document.create_node_with_resources_and_labels({}, tags, count, {"CPU": 8}, {"a": "b"}))


def test_what_is_asked_for_is_there_until_it_has_ended(book: MachineRegistry) -> None:
    cloud = provider.RehearsalNodeProvider({plans.FOLDER_SETTING: str(book.folder)}, "rehearsal")
    first, second = asked_by(book, 2)
    assert (first, second) == ("worker-1", "worker-2")
    assert cloud.non_terminated_nodes({}) == [first, second]
    assert cloud.non_terminated_nodes({"ray-node-kind": "head"}) == []
    assert (cloud.is_running(first), cloud.is_terminated(first)) == (False, False)
    book.record_start(first, os.getpid())
    assert cloud.is_running(first)
    cloud.set_node_tags(second, {"ray-node-status": "up-to-date"})
    tags = {"ray-user-node-type": "worker", "ray-node-kind": "worker", "ray-node-status": "up-to-date"}
    assert cloud.node_tags(second) == tags
    cloud.terminate_node(first)
    assert cloud.non_terminated_nodes({}) == [second]
    assert not cloud.is_terminated(first)  # only once it is gone
    book.record_end(first, "terminated")
    book.record_end(first, "down")
    assert cloud.is_terminated(first)
    assert book.all_machines()[first].end_reason == "terminated"
    assert asked_by(book) == ["worker-3"]  # no name comes back
    book.exhaust_capacity()
    with pytest.raises(NodeLaunchException):
        asked_by(book)
    assert list(book.all_machines()) == [first, second, "worker-3"]


# ----------------------------------------------------------------------------------------------------------- machines

# In place of Ray: a process with a child that has left its session, as a raylet's workers may.
FAMILY = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
"""


def make_commands(requested: MachineRecord) -> MachineCommands:
    lasts = "0.5" if requested.type == "short" else "600"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return MachineCommands([[sys.executable, "-c", FAMILY, lasts], ["sleep", "600"]], environment)


@pytest.fixture
def cloud(book: MachineRegistry, tmp_path: Path) -> Iterator[SimulatedCloud]:
    with SimulatedCloud(book, make_commands, tmp_path / "logs") as document:
        yield document


def family(book: MachineRegistry, name: str) -> list[psutil.Process]:
    pid = book.all_machines()[name].pid
    return [] if pid is None else psutil.Process(pid).children(recursive=True)


def started(book: MachineRegistry, cloud: SimulatedCloud, kind: str) -> tuple[str, list[psutil.Process]]:
    """A machine that is up, and what runs on it: Ray's stand-in, its child, and the command beside it."""
    name = book.request_machine(kind, {"CPU": 1}, {}, {})
    until(lambda: "ready" in cloud.read_log(name))
    result = family(book, name)
    assert len(result) == 3
    return name, result


def test_a_machine_ends_as_it_is_told_and_nothing_of_it_stays(book: MachineRegistry, cloud: SimulatedCloud) -> None:
    output, first = started(book, cloud, "told")
    cut, second = started(book, cloud, "cut")
    ends, third = started(book, cloud, "short")
    book.request_end(output)
    cloud.cut_power(cut)
    until(lambda: not book.live_machines())
    ends_by_name = {name: record.end_reason for name, record in book.all_machines().items()}
    assert ends_by_name == {output: "terminated", cut: "killed", ends: "left"}
    running = [process for process in (*first, *second, *third) if process.is_running()]
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in running)
    assert cloud.killed_late == []


def test_all_machines_end_with_the_cluster(book: MachineRegistry, tmp_path: Path) -> None:
    with SimulatedCloud(book, make_commands, tmp_path / "logs") as cloud:
        name, result = started(book, cloud, "worker")
    assert book.all_machines()[name].end_reason == "down"
    assert [process for process in result if process.is_running()] == []


def test_a_machine_ends_with_a_rehearsal_that_is_killed(book: MachineRegistry) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        words = [str(book.folder), "worker-1", str(owner.pid), "--", sys.executable, "-c", FAMILY, "600"]
        with subprocess.Popen(
            [sys.executable, "-m", machine.__name__, *words], cwd=ROOT, stdout=subprocess.PIPE
        ) as document:
            assert document.stdout is not None
            assert document.stdout.readline() == b"ready\n"
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            assert document.wait(WITHIN_S) == 0


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
    assert {command: faults.process_role(command) for command in roles} == roles
    assert [faults.address_scope(address) for address in ("127.0.0.1", "::1", "0.0.0.0", "::", "10.1.2.3")] == [
        *("loopback", "loopback", "network", "network", "network")
    ]
    assert Listener("m", "raylet", "network", 1).is_allowed
    assert Listener("m", "dashboard", "loopback", 8265).is_allowed
    assert not Listener("m", "dashboard", "network", 8265).is_allowed
    assert not any(Listener("m", role, "loopback", 1).is_allowed for role in ("Ray Client", "nc -l 4444"))


def test_open_sockets_are_found_by_machine() -> None:
    script = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(60)"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        listeners = faults.find_listeners([("m", os.getpid()), ("gone", 2**22)], {})
        known_values = faults.find_listeners([("m", os.getpid())], {port: faults.METRICS_ROLE})
        server.kill()
    roles = [(listener.role, listener.is_allowed) for listener in known_values if listener.port == port]
    assert roles == [(faults.METRICS_ROLE, True)]
    [listener] = [listener for listener in listeners if listener.port == port]
    assert (listener.machine, listener.scope, listener.is_allowed) == ("m", "loopback", False)


def test_shared_memory_is_left_behind_where_nobody_has_mapped_it() -> None:
    with (
        tempfile.NamedTemporaryFile(dir=local_cluster.SHARED_MEMORY) as slots,
        tempfile.NamedTemporaryFile(dir=local_cluster.SHARED_MEMORY) as left,
    ):
        slots.truncate(10)
        with mmap.mmap(slots.fileno(), 10):
            names = {Path(slots.name).name, Path(left.name).name, "gone"}
            assert local_cluster.unmapped_files(names) == [Path(left.name).name]
