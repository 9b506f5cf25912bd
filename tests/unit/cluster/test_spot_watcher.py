"""Spot notices of the three clouds, and the reaction to them."""

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
from rtrain.cluster.spot_watcher import AwsPoller, AzurePoller, GcpPoller, MetadataService, PreemptionNotice
from rtrain.rehearsal.cloud import FakeInstanceMetadata, MetadataByMachine, serve_metadata
from tests.support.root import ROOT


@pytest.fixture
def machine() -> FakeInstanceMetadata:
    return FakeInstanceMetadata()


@pytest.fixture
def service(machine: FakeInstanceMetadata) -> Iterator[MetadataService]:
    with serve_metadata(MetadataByMachine(lambda: machine)) as address:
        yield MetadataService(f"{address}/node-1")


# ------------------------------------------------------------------------------------------------------ three clouds


def test_aws_tells_the_end_by_version_2_alone(machine: FakeInstanceMetadata, service: MetadataService) -> None:
    look = AwsPoller(service)
    assert look() is None
    machine.terminates_at = 2_000_000_000.0
    assert look() == PreemptionNotice("spot terminate", 2_000_000_000.0)
    assert machine.requests.count("PUT /latest/api/token") == 1


def test_aws_s_token_is_renewed_where_it_has_run_out(machine: FakeInstanceMetadata, service: MetadataService) -> None:
    look = AwsPoller(service)
    assert look() is None
    machine.tokens.clear()
    machine.terminates_at = 2_000_000_000.0
    assert look() == PreemptionNotice("spot terminate", 2_000_000_000.0)
    assert machine.requests.count("PUT /latest/api/token") == 2


class Forgets(set[str]):
    """Tokens that a service has given and takes for none."""

    def add(self, token: str) -> None:
        pass


def test_a_service_that_refuses_every_token_is_an_error_and_no_silence(
    machine: FakeInstanceMetadata, service: MetadataService
) -> None:
    """It would be taken for "no notice" for ever, and the node be taken away unheard."""
    machine.terminates_at, machine.tokens = 2_000_000_000.0, Forgets()
    with pytest.raises(urllib.error.HTTPError) as refused:
        AwsPoller(service)()
    assert refused.value.code == 401
    assert machine.requests.count("PUT /latest/api/token") == 2


def test_aws_s_recommendation_is_not_the_end(machine: FakeInstanceMetadata, service: MetadataService) -> None:
    machine.rebalance_at = 1_900_000_000.0
    assert AwsPoller(service)() == PreemptionNotice("rebalance recommended", 1_900_000_000.0, is_final=False)


def test_google_tells_that_it_has_begun(machine: FakeInstanceMetadata, service: MetadataService) -> None:
    look = GcpPoller(service)
    assert look() is None
    machine.terminates_at = 1.0
    before = time.time()
    notice = look()
    assert notice is not None
    assert notice.reason == "preempted"
    assert before + 29 <= notice.deadline <= time.time() + 31


def test_azure_tells_of_this_machine_and_of_others(machine: FakeInstanceMetadata, service: MetadataService) -> None:
    look = AzurePoller(service)
    assert look() is None
    machine.terminates_at, machine.event_resources = 2_000_000_000.0, ("node-2",)
    assert look() is None
    machine.event_resources = ("node-2", "node-1")
    assert look() == PreemptionNotice("scheduled event Preempt", 2_000_000_000.0)


def test_a_watcher_that_has_gone_without_its_answer_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    requested, gone, tried = threading.Event(), threading.Event(), threading.Event()

    class Slow(FakeInstanceMetadata):
        def respond(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
            requested.set()
            assert gone.wait(10)
            tried.set()
            return 200, "x" * 10_000_000

    with serve_metadata(MetadataByMachine(Slow)) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            client.sendall(b"GET /node-1/ HTTP/1.0\r\n\r\n")
            assert requested.wait(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        gone.set()
        assert tried.wait(10)
        assert MetadataService(f"{address}/node-2").fetch("/", {})
    assert capsys.readouterr().err == ""


# ----------------------------------------------------------------------------------------------------------- waiting


def test_it_looks_on_where_the_service_fails_and_says_so_once(
    machine: FakeInstanceMetadata, service: MetadataService
) -> None:
    machine.remaining_failures, machine.terminates_at = 3, 2_000_000_000.0
    messages: list[str] = []
    notice = spot_watcher.poll_until_notice(AwsPoller(service), 0.0, messages.append, lambda notice: notice.is_final)
    assert notice.reason == "spot terminate"
    assert len(messages) == 1


def answering(server: socket.socket, odd: bytes, then: bytes) -> None:
    """Two odd answers, and others after them, whatever is asked."""
    for answer in itertools.chain((odd, odd), itertools.repeat(then)):
        try:
            item, _ = server.accept()
        except OSError:
            return
        with item:
            item.recv(4096)
            item.sendall(answer)


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
AWS_ENDS = HEAD + b'{"action": "terminate", "time": "2033-05-18T03:33:20+00:00"}'
AZURE_ENDS = HEAD + b'{"Events": [{"EventType": "Preempt"}]}'


@pytest.mark.parametrize(
    ("cloud", "odd", "then"),
    [
        (GcpPoller, b"garbage\r\n\r\n", HEAD + b"TRUE"),  # http.client's own errors are no OSError
        (AzurePoller, HEAD + b"[]", AZURE_ENDS),
        (AzurePoller, HEAD + b'{"Events": null}', AZURE_ENDS),
        (AzurePoller, HEAD + b'{"Events": [{"EventType": "Preempt", "NotBefore": 5}]}', AZURE_ENDS),
        (AwsPoller, HEAD + b"[1]", AWS_ENDS),
        (AwsPoller, HEAD + b'{"action": "terminate", "time": null}', AWS_ENDS),
    ],
)
def test_no_answer_of_the_service_ends_the_watcher(
    cloud: Callable[[MetadataService], spot_watcher.Poller], odd: bytes, then: bytes
) -> None:
    messages: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answering, args=(server, odd, then), daemon=True).start()
        look = cloud(MetadataService(f"http://127.0.0.1:{server.getsockname()[1]}"))
        assert spot_watcher.poll_until_notice(look, 0.0, messages.append, lambda notice: notice.is_final).reason
    assert len(messages) == 1


def test_a_recommendation_is_said_once_and_waited_through(
    machine: FakeInstanceMetadata, service: MetadataService
) -> None:
    machine.rebalance_at = 1_900_000_000.0
    looks = iter(range(5))
    messages: list[str] = []

    def look() -> PreemptionNotice | None:
        if next(looks) == 3:
            machine.terminates_at = 2_000_000_000.0
        return AwsPoller(service)()

    notice = spot_watcher.poll_until_notice(look, 0.0, messages.append, lambda notice: notice.is_final)
    assert notice.reason == "spot terminate"
    assert len(messages) == 1


# ---------------------------------------------------------------------------------------------------------- draining


def test_where_ray_has_ended_now_does_not_wait_to_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod whose Ray is gone would stay for the whole grace period."""
    monkeypatch.setattr(spot_watcher, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(spot_watcher, "STARTUP_GRACE_S", 0.05)
    monkeypatch.setattr(ray_internals, "local_cluster_address", lambda: None)
    looks = iter([{"node"}, {"node"}, set[str]()])  # its processes are still ending
    monkeypatch.setattr(ray_internals, "local_node_ids", lambda: next(looks))
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        spot_watcher.main(["now", "--wait", "--seconds", "60"])
    assert (ended.value.code, next(looks, None), time.monotonic() - began < 30) == (1, None, True)


def test_it_tries_until_the_head_takes_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | Exception] = [RuntimeError("no head yet"), [], ["node"]]
    requested: list[tuple[object, ...]] = []

    def drain(*arguments: object) -> list[str]:
        requested.append(arguments)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray_internals, "drain_local_nodes", drain)
    monkeypatch.setattr(spot_watcher, "RETRY_INTERVAL_S", 0.0)
    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", "i-1")
    messages: list[str] = []
    deadline = time.time() + 60
    assert spot_watcher.drain_node(PreemptionNotice("spot terminate", deadline), "head:6379", messages.append) == [
        "node"
    ]
    assert requested == [("head:6379", "i-1", "spot terminate", deadline, spot_watcher.DRAIN_TIMEOUT_S)] * 3
    assert len(messages) == 1


def test_it_gives_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "drain_local_nodes", lambda *_: [])
    messages: list[str] = []
    assert spot_watcher.drain_node(PreemptionNotice("spot terminate", time.time()), "head:6379", messages.append) == []
    assert len(messages) == 1


def test_nothing_heavy_is_imported_before_the_notice() -> None:
    heavy = ("ray", "yaml", "numpy", "torch")
    script = f"import sys, rtrain.cluster.spot_watcher; print(len(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_a_watcher_that_is_started_again_takes_the_place_of_the_first(
    machine: FakeInstanceMetadata, tmp_path: Path
) -> None:
    """The first one knows the address of the head before. A third that cannot end the second says so."""
    with serve_metadata(MetadataByMachine(lambda: machine)) as address:
        command = [sys.executable, "-m", "rtrain.cluster.spot_watcher", "aws", "--every", "0.1"]
        command += ["--metadata", f"{address}/node-1", "--lock", str(tmp_path / "lock"), "--address"]

        def watching(head: str) -> "subprocess.Popen[str]":
            machine.requests.clear()
            started = subprocess.Popen([*command, head], cwd=ROOT, stderr=subprocess.PIPE, text=True)
            while not any("instance-action" in line for line in machine.requests):
                assert started.poll() is None
                time.sleep(0.05)
            return started

        with watching("127.0.0.1:1") as first:
            try:
                second = subprocess.Popen([*command, "127.0.0.1:2"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
                with second:
                    try:
                        assert first.wait(30) == -signal.SIGTERM
                        machine.requests.clear()
                        while not any("instance-action" in line for line in machine.requests):
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
from rtrain.rehearsal.cloud import FakeInstanceMetadata, MetadataByMachine, serve_metadata
from rtrain.cluster import capacity
os.environ["RAY_CLOUD_INSTANCE_ID"] = "head"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
os.environ["RAY_CLOUD_INSTANCE_ID"] = "i-spot"
node = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
machine, before = FakeInstanceMetadata(), [n["NodeID"] for n in ray.nodes() if n["Alive"]]
with serve_metadata(MetadataByMachine(lambda: machine)) as address:
    address = f"{address}/i-spot"
    command = [sys.executable, "-m", "rtrain.cluster.spot_watcher", "aws", "--metadata", address, "--every", "0.2",
               "--lock", sys.argv[1], "--address", cluster.address]
    watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not machine.requests:
        time.sleep(0.05)
    machine.terminates_at = time.time() + 120
    _, said = watcher.communicate(timeout=120)
gone = []
for _ in range(200):
    gone = sorted(capacity.draining_node_ids() | ({n["NodeID"] for n in ray.nodes() if not n["Alive"]}))
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
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["code"], document["nodes"]) == (0, 2), document["said"]
    assert document["gone"] == [document["spot"]]
