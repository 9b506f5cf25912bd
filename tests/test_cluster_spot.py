"""Spot notices: what the three clouds say, and what becomes of it."""

import itertools
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rtrain import ray_internals
from rtrain.cluster import spot_watcher
from rtrain.cluster.spot_watcher import Aws, Azure, Gcp, Notice, Service
from rtrain.rehearsal.machines.metadata import Machines, Told, serving
from tests.root import ROOT


@pytest.fixture
def machine() -> Told:
    return Told()


@pytest.fixture
def service(machine: Told) -> Iterator[Service]:
    with serving(Machines(lambda: machine)) as address:
        yield Service(f"{address}/node-1")


# ------------------------------------------------------------------------------------------------------ three clouds


def test_aws_tells_the_end_by_version_2_alone(machine: Told, service: Service) -> None:
    look = Aws(service)
    assert look() is None
    machine.ends = 2_000_000_000.0
    assert look() == Notice("spot terminate", 2_000_000_000.0)
    assert machine.asked.count("PUT /latest/api/token") == 1


def test_aws_s_token_is_renewed_where_it_has_run_out(machine: Told, service: Service) -> None:
    look = Aws(service)
    assert look() is None
    machine.tokens.clear()
    machine.ends = 2_000_000_000.0
    assert look() == Notice("spot terminate", 2_000_000_000.0)
    assert machine.asked.count("PUT /latest/api/token") == 2


class Forgets(set[str]):
    """Tokens that a service has given and takes for none."""

    def add(self, token: str) -> None:
        pass


def test_a_service_that_refuses_every_token_is_an_error_and_no_silence(machine: Told, service: Service) -> None:
    """It would be taken for "no notice" for ever, and the node be taken away unheard."""
    machine.ends, machine.tokens = 2_000_000_000.0, Forgets()
    with pytest.raises(urllib.error.HTTPError) as refused:
        Aws(service)()
    assert refused.value.code == 401
    assert machine.asked.count("PUT /latest/api/token") == 2


def test_aws_s_recommendation_is_not_the_end(machine: Told, service: Service) -> None:
    machine.rebalance = 1_900_000_000.0
    assert Aws(service)() == Notice("rebalance recommended", 1_900_000_000.0, is_final=False)


def test_google_tells_that_it_has_begun(machine: Told, service: Service) -> None:
    look = Gcp(service)
    assert look() is None
    machine.ends = 1.0
    before = time.time()
    notice = look()
    assert notice is not None
    assert notice.what == "preempted"
    assert before + 29 <= notice.deadline <= time.time() + 31


def test_azure_tells_of_this_machine_and_of_others(machine: Told, service: Service) -> None:
    look = Azure(service)
    assert look() is None
    machine.ends, machine.meant = 2_000_000_000.0, ("node-2",)
    assert look() is None
    machine.meant = ("node-2", "node-1")
    assert look() == Notice("scheduled event Preempt", 2_000_000_000.0)


def test_a_watcher_that_has_gone_without_its_answer_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    asked, gone, tried = threading.Event(), threading.Event(), threading.Event()

    class Slow(Told):
        def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
            asked.set()
            assert gone.wait(10)
            tried.set()
            return 200, "x" * 10_000_000

    with serving(Machines(Slow)) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            client.sendall(b"GET /node-1/ HTTP/1.0\r\n\r\n")
            assert asked.wait(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        gone.set()
        assert tried.wait(10)
        assert Service(f"{address}/node-2").ask("/", {})
    assert capsys.readouterr().err == ""


# ----------------------------------------------------------------------------------------------------------- waiting


def test_it_looks_on_where_the_service_fails_and_says_so_once(machine: Told, service: Service) -> None:
    machine.failures, machine.ends = 3, 2_000_000_000.0
    said: list[str] = []
    notice = spot_watcher.wait(Aws(service), 0.0, said.append, lambda one: one.is_final)
    assert notice.what == "spot terminate"
    assert len(said) == 1


def answering(server: socket.socket, odd: bytes, then: bytes) -> None:
    """Two odd answers, and others after them, whatever is asked."""
    for answer in itertools.chain((odd, odd), itertools.repeat(then)):
        try:
            one, _ = server.accept()
        except OSError:
            return
        with one:
            one.recv(4096)
            one.sendall(answer)


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
AWS_ENDS = HEAD + b'{"action": "terminate", "time": "2033-05-18T03:33:20+00:00"}'
AZURE_ENDS = HEAD + b'{"Events": [{"EventType": "Preempt"}]}'


@pytest.mark.parametrize(
    ("cloud", "odd", "then"),
    [
        (Gcp, b"garbage\r\n\r\n", HEAD + b"TRUE"),  # http.client's own errors are no OSError
        (Azure, HEAD + b"[]", AZURE_ENDS),
        (Azure, HEAD + b'{"Events": null}', AZURE_ENDS),
        (Azure, HEAD + b'{"Events": [{"EventType": "Preempt", "NotBefore": 5}]}', AZURE_ENDS),
        (Aws, HEAD + b"[1]", AWS_ENDS),
        (Aws, HEAD + b'{"action": "terminate", "time": null}', AWS_ENDS),
    ],
)
def test_no_answer_of_the_service_ends_the_watcher(
    cloud: Callable[[Service], spot_watcher.Look], odd: bytes, then: bytes
) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answering, args=(server, odd, then), daemon=True).start()
        look = cloud(Service(f"http://127.0.0.1:{server.getsockname()[1]}"))
        assert spot_watcher.wait(look, 0.0, said.append, lambda one: one.is_final).what
    assert len(said) == 1


def test_a_recommendation_is_said_once_and_waited_through(machine: Told, service: Service) -> None:
    machine.rebalance = 1_900_000_000.0
    looks = iter(range(5))
    said: list[str] = []

    def look() -> Notice | None:
        if next(looks) == 3:
            machine.ends = 2_000_000_000.0
        return Aws(service)()

    assert spot_watcher.wait(look, 0.0, said.append, lambda one: one.is_final).what == "spot terminate"
    assert len(said) == 1


# ---------------------------------------------------------------------------------------------------------- draining


def test_where_ray_has_ended_now_does_not_wait_to_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod whose Ray is gone would stay for the whole grace period."""
    monkeypatch.setattr(spot_watcher, "RETRY_S", 0.01)
    monkeypatch.setattr(spot_watcher, "GONE_S", 0.05)
    monkeypatch.setattr(ray_internals, "running_here", lambda: None)
    looks = iter([{"node"}, {"node"}, set[str]()])  # its processes are still ending
    monkeypatch.setattr(ray_internals, "nodes_here", lambda: next(looks))
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        spot_watcher.main(["now", "--wait", "--seconds", "60"])
    assert (ended.value.code, next(looks, None), time.monotonic() - began < 30) == (1, None, True)


def test_it_tries_until_the_head_takes_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | Exception] = [RuntimeError("no head yet"), [], ["node"]]
    asked: list[tuple[object, ...]] = []

    def drain(*arguments: object) -> list[str]:
        asked.append(arguments)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray_internals, "drain", drain)
    monkeypatch.setattr(spot_watcher, "RETRY_S", 0.0)
    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", "i-1")
    said: list[str] = []
    deadline = time.time() + 60
    assert spot_watcher.drain(Notice("spot terminate", deadline), "head:6379", said.append) == ["node"]
    assert asked == [("head:6379", "i-1", "spot terminate", deadline, spot_watcher.DRAIN_S)] * 3
    assert len(said) == 1


def test_it_gives_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "drain", lambda *_: [])
    said: list[str] = []
    assert spot_watcher.drain(Notice("spot terminate", time.time()), "head:6379", said.append) == []
    assert len(said) == 1


def test_nothing_heavy_is_imported_before_the_notice() -> None:
    heavy = ("ray", "yaml", "numpy", "torch")
    script = f"import sys, rtrain.cluster.spot_watcher; print(len(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_a_watcher_that_is_started_again_takes_the_place_of_the_first(machine: Told, tmp_path: Path) -> None:
    """The first one knows the address of the head before. A third that cannot end the second says so."""
    with serving(Machines(lambda: machine)) as address:
        command = [sys.executable, "-m", "rtrain.cluster.spot_watcher", "aws", "--every", "0.1"]
        command += ["--metadata", f"{address}/node-1", "--lock", str(tmp_path / "lock"), "--address"]

        def watching(head: str) -> "subprocess.Popen[str]":
            machine.asked.clear()
            started = subprocess.Popen([*command, head], cwd=ROOT, stderr=subprocess.PIPE, text=True)
            while not any("instance-action" in line for line in machine.asked):
                assert started.poll() is None
                time.sleep(0.05)
            return started

        with watching("127.0.0.1:1") as first:
            try:
                second = subprocess.Popen([*command, "127.0.0.1:2"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
                with second:
                    try:
                        assert first.wait(30) == -signal.SIGTERM
                        machine.asked.clear()
                        while not any("instance-action" in line for line in machine.asked):
                            assert second.poll() is None
                            time.sleep(0.05)
                        assert (tmp_path / "lock").read_text() == str(second.pid)
                        (tmp_path / "lock").write_text("")
                        third = subprocess.run([*command, "x:1"], cwd=ROOT, capture_output=True, text=True, check=False)
                        assert third.returncode == 1
                        assert second.poll() is None
                    finally:
                        second.kill()
            finally:
                first.kill()


SCRIPT = """
import json, os, subprocess, sys, time
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray
from ray.cluster_utils import Cluster
from rtrain.rehearsal.machines.metadata import Machines, Told, serving
from rtrain.cluster import supply
os.environ["RAY_CLOUD_INSTANCE_ID"] = "head"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
os.environ["RAY_CLOUD_INSTANCE_ID"] = "i-spot"
node = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
machine, before = Told(), [n["NodeID"] for n in ray.nodes() if n["Alive"]]
with serving(Machines(lambda: machine)) as address:
    address = f"{address}/i-spot"
    command = [sys.executable, "-m", "rtrain.cluster.spot_watcher", "aws", "--metadata", address, "--every", "0.2",
               "--lock", sys.argv[1], "--address", cluster.address]
    watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not machine.asked:
        time.sleep(0.05)
    machine.ends = time.time() + 120
    _, said = watcher.communicate(timeout=120)
gone = []
for _ in range(200):
    gone = sorted(supply.leaving() | ({n["NodeID"] for n in ray.nodes() if not n["Alive"]}))
    if gone:
        break
    time.sleep(0.1)
print(json.dumps({"code": watcher.returncode, "said": said, "gone": gone, "spot": node.node_id, "nodes": len(before)}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.ray
def test_a_notice_drains_the_node_of_this_machine_and_no_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "lock")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["code"], found["nodes"]) == (0, 2), found["said"]
    assert found["gone"] == [found["spot"]]
