"""The rehearsal of a cluster's file: what it takes from the file, its machines, when faults come, how it is judged. The
slow tests run it whole."""

import json
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import save_file

from rtrain import env
from rtrain.checkpoints import checkpoint
from rtrain.cluster import supply
from rtrain.cluster.rehearsal import (
    faults as sabotage,
    machine,
    nodes as starts,
    plan as plans,
    ports,
    provider,
    rehearse,
    up,
)
from rtrain.cluster.rehearsal.book import Book, Machine
from rtrain.cluster.rehearsal.certificate import Certificate, Rows, Weights, most_at_a_time, nodes_of
from rtrain.cluster.rehearsal.cloud import Cloud, Start
from rtrain.cluster.rehearsal.faults import Fault, due, follow
from rtrain.cluster.rehearsal.ports import Listener
from rtrain.errors import ConfigError, UserError
from rtrain.run import Run
from tests.conftest import labelled_rows, write_rows
from tests.tiny import make_encoder

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
PLAN = plans.of(TEXT)
WITHIN_S = 20.0


def until(met: Any) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not met():
        assert time.monotonic() < give_up
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------- from file to plan


def test_the_file_s_types_limits_prices_and_options_are_taken() -> None:
    [worker] = PLAN.kinds
    assert (PLAN.head.name, PLAN.head.resources, PLAN.head.most) == ("head", {"CPU": 0.0}, 0)
    assert (worker.name, worker.resources, worker.least, worker.most) == ("worker", {"CPU": 8.0}, 0, 4)
    assert (worker.is_spot, worker.instance, worker.dollars) == (True, "c7i.2xlarge", 0.357)
    assert (PLAN.most, PLAN.idle_s, PLAN.rehearsed_idle_s, PLAN.watcher) == (4, 300.0, plans.IDLE_S, "aws")
    assert PLAN.head_options == ("--dashboard-host=127.0.0.1",)
    assert PLAN.hook == "rtrain.cluster.session.on_node_start"


def test_the_autoscaler_gets_the_same_cluster_of_another_cloud() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    made = PLAN.autoscaler_file("/tmp/book")
    prepared = prepare_config(json.loads(json.dumps(made)))
    validate_config(prepared)
    heads, kinds, limit = supply.startable(made)
    assert ([host.has for host in heads], limit) == ([{"CPU": 0.0}], 4)
    assert [(host.has, most) for host, most in kinds.values()] == [({"CPU": 8.0}, 4)]
    assert made["provider"]["module"] == f"{provider.__name__}.{provider.Rehearsed.__name__}"
    assert not [name for name, commands in prepared.items() if name.endswith("_commands") and commands]


def changed(**settings: Any) -> str:
    """cluster.yaml with other top-level settings."""
    return yaml.safe_dump({**yaml.safe_load(TEXT), **settings})


def test_declared_gpus_labels_and_own_prices_are_taken() -> None:
    kind = {"node_config": {"InstanceType": "x9.large"}, "labels": {"for": "training"}, "min_workers": 1}
    types = {"head": {"resources": {"CPU": 0}, "node_config": {}}, "gpu": {**kind, "resources": {"CPU": 8, "GPU": 1}}}
    plan = plans.of(changed(available_node_types=types, metadata={"prices": {"x9.large": 2.5}}))
    [gpu] = plan.kinds
    assert (gpu.resources, gpu.labels, gpu.least, gpu.dollars) == (
        {"CPU": 8.0, "GPU": 1.0},
        {"for": "training"},
        1,
        2.5,
    )
    assert plan.head.dollars is None
    assert plan.least == 1


def test_resources_that_are_not_said_are_those_of_the_instance_or_asked_for() -> None:
    types = yaml.safe_load(TEXT)["available_node_types"]
    del types["worker"]["resources"]
    assert plans.of(changed(available_node_types=types)).kinds[0].resources == {"CPU": 8.0}
    types["worker"]["node_config"]["InstanceType"] = "x9.large"
    with pytest.raises(ConfigError, match=r"worker says no resources, and x9\.large is in no table"):
        plans.of(changed(available_node_types=types))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "no YAML"),
        ("- a\n- b\n", "no file of Ray's launcher"),
        ("apiVersion: ray.io/v1\nkind: RayCluster\n", "no file of Ray's launcher"),
        ("cluster_name: x\nprovider: {type: local}\n", "names no available_node_types"),
        ("available_node_types: {a: {resources: {CPU: 1}}}\nhead_node_type: b\n", "head_node_type is b"),
    ],
)
def test_a_file_that_cannot_be_rehearsed_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plans.of(text)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        rehearse.check(["tune", "intent", "--data", "/shared/nowhere.csv"], "a: [")
    assert [problem.field for problem in refused.value.problems] == ["verb", "path", "--file"]
    (tmp_path / "rows.csv").touch()
    _, absolute = rehearse.check(["train", "--data", str(tmp_path / "rows.csv"), "--model", "a/hub-name"], TEXT)
    assert absolute == {str(tmp_path / "rows.csv"): str(tmp_path / "rows.csv")}


@pytest.mark.parametrize(("workers", "data", "needed"), [(6, 2, 1), (7, 2, 2), (30, 2, 4), (31, 2, None)])
def test_the_nodes_that_a_run_needs_are_counted_by_what_they_hold(workers: int, data: int, needed: int | None) -> None:
    assert PLAN.needed(workers, data, "cpu") == needed


def test_a_command_keeps_its_words_but_for_where_it_writes() -> None:
    words = ["train", "intent", "--data", "rows.csv", "--model=enc", "--out", "/shared/x", "--resume", "--workers", "3"]
    words += ["--set", "cluster.storage=s3://b/r", "--set=cluster.storage=s3://c", "--set", "train.epochs=2"]
    made = plans.words_of(words, "/out", "file:///store", {"rows.csv": "/here/rows.csv", "enc": "/here/enc"})
    kept = ["train", "intent", "--data", "/here/rows.csv", "--model=/here/enc", "--workers", "3"]
    kept += ["--set", "train.epochs=2", "--out", "/out", "--set", "train.log_every=1"]
    assert made == [*kept, "--set", "report.attributions=0", "--set", "cluster.storage=file:///store"]
    assert "cluster.storage" not in " ".join(plans.words_of(words[:4], "/out", "file:///store", {}))


def test_a_machine_starts_ray_as_the_file_does_on_ports_that_are_free(tmp_path: Path) -> None:
    token = tmp_path / "token"
    nodes = starts.Nodes(
        PLAN, tmp_path, token, tmp_path / "a.yaml", "10.0.0.1:6379", 8265, "http://127.0.0.1:1", (1, 2)
    )
    labels = {"for": "training"}
    head, worker = (nodes(Machine(f"{kind}-1", kind, {"CPU": 3.0}, labels, {}, 0.0)) for kind in ("head", "worker"))
    [command] = head.commands
    assert {"--head", "--port=6379", "--dashboard-port=8265", "--dashboard-host=127.0.0.1"} <= set(command)
    first, spot = worker.commands
    assert {"--address=10.0.0.1:6379", *starts.FREE_PORTS} <= set(first)
    assert "--head" not in first
    assert {"rtrain.cluster.spot", "aws", "--metadata=http://127.0.0.1:1/worker-1"} <= set(spot)
    assert worker.environ["RAY_CLOUD_INSTANCE_ID"] == "worker-1"
    assert json.loads(worker.environ["RAY_OVERRIDE_RESOURCES"]) == {"CPU": 3.0}
    assert json.loads(worker.environ["RAY_OVERRIDE_LABELS"]) == labels
    assert (worker.environ["RAY_AUTH_MODE"], worker.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))
    assert len([word for word in command if word.startswith("--temp-dir=")]) == 1
    assert not env.gpus_are_counted(worker.environ)
    counting = replace(PLAN, kinds=(replace(PLAN.kinds[0], resources={"GPU": 1.0}),))
    assert env.gpus_are_counted(replace(nodes, plan=counting)(Machine("a", "worker", {}, {}, {}, 0.0)).environ)


# -------------------------------------------------------------------------------------------------- book and provider


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "book")


def asked_by(book: Book, count: int = 1) -> list[str]:
    """Machines that Ray's autoscaler asks for."""
    made = provider.Rehearsed({plans.FOLDER: str(book.folder)}, "rehearsal")
    tags = {"ray-user-node-type": "worker", "ray-node-kind": "worker"}
    return list(made.create_node_with_resources_and_labels({}, tags, count, {"CPU": 8}, {"a": "b"}))


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


def test_ray_s_provider_has_the_calls_that_are_made_here() -> None:
    from ray.autoscaler.node_provider import NodeProvider
    from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter

    needed = ("non_terminated_nodes", "is_running", "node_tags", "terminate_nodes", "safe_to_scale", "post_process")
    assert all(hasattr(NodeProvider, name) and hasattr(NodeProviderAdapter, f"_v1_{name}") for name in needed)
    with pytest.raises(NotImplementedError):
        provider.Rehearsed({plans.FOLDER: "/tmp"}, "x").set_node_tags("a", {})


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
        "nc -l 4444": "nc -l 4444",
    }
    assert {command: ports.role_of(command) for command in roles} == roles
    assert [ports.scope_of(address) for address in ("127.0.0.1", "::1", "0.0.0.0", "::", "10.1.2.3")] == [
        *("loopback", "loopback", "network", "network", "network")
    ]
    assert Listener("m", "raylet", "network", 1).allowed
    assert Listener("m", "dashboard", "loopback", 8265).allowed
    for refused in (("dashboard", "network"), ("Ray Client", "loopback"), ("nc -l 4444", "loopback")):
        assert not Listener("m", refused[0], refused[1], 1).allowed


def test_open_sockets_are_found_by_machine() -> None:
    script = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(60)"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        found = ports.listening([("m", os.getpid()), ("gone", 2**22)])
        server.kill()
    assert [(one.machine, one.scope, one.allowed) for one in found if one.port == port] == [("m", "loopback", False)]


def test_shared_memory_is_left_behind_where_nobody_has_mapped_it() -> None:
    with (
        tempfile.NamedTemporaryFile(dir=up.SHARED_MEMORY) as held,
        tempfile.NamedTemporaryFile(dir=up.SHARED_MEMORY) as left,
    ):
        held.truncate(10)
        with mmap.mmap(held.fileno(), 10):
            assert up._unused({Path(held.name).name, Path(left.name).name, "gone"}) == [Path(left.name).name]


# ------------------------------------------------------------------------------------------------------------- faults


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **fields}


def test_a_fault_comes_once_the_run_is_over_the_last_one() -> None:
    wanted: tuple[sabotage.Kind, ...] = ("notice", "kill")
    log = [event("started", 0, update=0), event("progress", 1, update=24)]
    assert due([], [], wanted, 100) is None
    assert due(log, [], wanted, 100) is None
    log.append(event("progress", 2, update=25))
    assert due(log, [], wanted, 100) == "notice"
    met = Fault("notice", "worker-1", "worker", 2.0)
    log.append(event("progress", 9, update=60))
    assert due(log, [met], wanted, 100) is None
    met.seconds_to_next_update = 5.0
    assert due(log, [met], wanted, 100) == "kill"
    assert due([*log, event("yielded", 10, reason="resize", update=60)], [met], wanted, 100) is None
    assert due(log, [met, met], wanted, 100) is None


def test_what_a_fault_has_cost_is_read_from_the_log() -> None:
    log = [event("started", 0, update=0, workers=2), *(event("progress", n, update=n) for n in range(1, 6))]
    notice = Fault("notice", "worker-1", "worker", 5.0)
    log += [event("progress", 6, update=6), event("yielded", 7, reason="preemption", update=6)]
    follow(notice, log)
    assert (notice.seconds_to_checkpoint, notice.is_over, notice.passed) == (2.0, False, False)
    log += [event("started", 20, update=6, workers=2), event("progress", 21, update=7)]
    follow(notice, log)
    assert (notice.at_update, notice.resumed_from, notice.recomputed) == (6, 6, 0)
    assert (notice.seconds_to_next_update, notice.passed) == (16.0, True)
    kill = Fault("kill", "worker-2", "worker", 25.0)
    log += [event("progress", 24, update=9), event("crashed", 26, cause="crash", resumes_from=6)]
    log += [event("started", 30, update=6), event("progress", 31, update=7), event("progress", 33, update=10)]
    follow(kill, log)
    assert (kill.at_update, kill.recomputed, kill.seconds_to_next_update, kill.passed) == (9, 3, 8.0, True)
    assert (kill.seconds_to_checkpoint, replace(kill, kind="notice").passed) == (None, False)


# -------------------------------------------------------------------------------------------------------- certificate


def made(**changes: Any) -> Certificate:
    machines = {
        "head-1": Machine("head-1", "head", {}, {}, {}, 100.0, ended=460.0, why="down"),
        "worker-1": Machine("worker-1", "worker", {}, {}, {}, 110.0, ended=200.0, why="terminated"),
        "worker-2": Machine("worker-2", "worker", {}, {}, {}, 190.0, ended=300.0, why="killed"),
        "worker-3": Machine("worker-3", "worker", {}, {}, {}, 301.0, ended=440.0, why="terminated"),
    }
    faults = [
        Fault("notice", "worker-1", "worker", 190.0, 25, 25, 0, 4.0, 30.0),
        Fault("kill", "worker-2", "worker", 300.0, 50, 45, 5, None, 40.0),
    ]
    nodes = nodes_of(machines, {"head-1": 105.0, "worker-1": 118.0, "worker-2": 197.0}, PLAN, faults, 100.0)
    given: dict[str, Any] = {
        "plan": PLAN,
        "nodes": nodes,
        "most_at_a_time": most_at_a_time([node for node in nodes if node.type == "worker"]),
        "needed": 1,
        "scale_up_s": 18.0,
        "scale_down_s": 22.0,
        "upload": {"files": 2, "bytes": 3000, "largest": (("a.py", 2000), ("b.py", 1000))},
        "ports": [Listener("head-1", "dashboard", "loopback", 8265), Listener("worker-1", "raylet", "network", 1)],
        "faults": faults,
        "wanted_faults": 2,
        "restarts": 2,
        "rows": Rows(True, 0, 0, True),
        "weights": Weights(True, 0.0, True),
        "updates": 100,
        "workers": [2, 2, 2],
        "device": "cpu",
        "left_behind": [],
        "seconds": 360.0,
    }
    return Certificate(**{**given, **changes})


def test_a_sound_rehearsal_passes_and_says_what_it_came_to() -> None:
    found = made()
    assert found.problems() == []
    assert (found.started, found.wanted_nodes, found.most_at_a_time) == (3, 3, 2)
    assert [node.end for node in found.nodes] == ["taken down", "spot notice", "killed", "idle"]
    assert [node.seconds_to_join for node in found.nodes] == [5.0, 8.0, 7.0, None]
    worker = (90 + 110 + 139) / 3600 * 0.357
    assert found.dollars == pytest.approx(0.101 / 10 + worker, abs=1e-5)
    assert found.dollars_an_hour_at_most == pytest.approx(0.101 + 4 * 0.357)
    text = found.text()
    assert text.splitlines()[-1] == "passed (360 s)"
    for said in (
        "rows: 0 lost, 0 repeated",
        "bit for bit",
        "3 started, 3 needed",
        "a.py",
        "after 300 s there, here after 60",
    ):
        assert said in text
    document = found.to_document()
    assert json.loads(json.dumps(document))["passed"] is True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"faults": [], "nodes": []}, "the run had ended before 2 of 2 faults"),
        ({"rows": Rows(True, 1, 0, True)}, "1 rows lost, 0 repeated"),
        ({"rows": Rows(True, 0, 0, False)}, "other rows than"),
        ({"rows": None}, "other rows than"),
        ({"weights": Weights(False, 1e-7, True)}, "other weights than"),
        ({"weights": None}, "other weights than"),
        ({"weights": Weights(True, math.nan, True)}, "weights that are no finite numbers"),
        ({"weights": Weights(False, math.nan, False)}, "weights that are no finite numbers"),
        ({"weights": Weights(False, math.inf, False)}, "weights that are no finite numbers"),
        ({"ports": [Listener("head-1", "dashboard", "network", 8265)]}, "dashboard listens on the network, port 8265"),
        ({"most_at_a_time": 5}, "5 worker nodes at a time, and the file allows 4"),
        ({"scale_down_s": None}, "nodes without work were not ended"),
        ({"left_behind": ["process 7 (x)"]}, "left behind: process 7"),
        ({"errors": ["broken off"]}, "broken off"),
    ],
)
def test_whatever_is_wrong_fails_it_and_is_said(changes: dict[str, Any], why: str) -> None:
    found = made(**changes)
    assert [one for one in found.problems() if why in one]
    assert found.text().splitlines()[-1].startswith("FAILED")
    assert found.to_document()["passed"] is False


def test_other_numbers_of_workers_may_round_otherwise() -> None:
    found = made(weights=Weights(False, 3e-7, False), workers=[2, 1, 2])
    assert found.passed
    assert "not rehearsed: whether the weights are the undisturbed run's" in found.text()
    assert "whether the weights are" not in made().text()
    assert "relative difference 3.0e-07" in found.text()


def test_what_is_not_rehearsed_is_said() -> None:
    gpu = replace(PLAN, kinds=(replace(PLAN.kinds[0], resources={"CPU": 8.0, "GPU": 1.0}),), watcher=None)
    said = "\n".join(made(plan=gpu, device="gpu").not_rehearsed())
    for expected in (
        "which were counted and not there",
        "NCCL sums gradients (here gloo)",
        "the file starts no watcher",
    ):
        assert expected in said
    assert "trained on CPUs, as it asks for" in "\n".join(made(plan=gpu).not_rehearsed())
    assert "GPU" not in "\n".join(made().not_rehearsed())


# ----------------------------------------------------------------------------------------------------------- its runs


def test_a_head_that_is_late_is_asked_again_and_one_that_is_gone_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "LOOK_EVERY_S", 0.0)
    answers: list[Any] = [UserError("late"), UserError("late"), {"job": SimpleNamespace(status="RUNNING")}]

    def all_jobs() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return dict(answer)

    made: Any = SimpleNamespace(jobs=SimpleNamespace(all=all_jobs), head="head-1", book=SimpleNamespace())
    made.book.up = lambda: {"head-1": None}
    assert rehearse._status(made, "job") == "RUNNING"
    made.book.up = dict
    answers.append(UserError("gone"))
    with pytest.raises(UserError, match="gone"):
        rehearse._status(made, "job")


def test_the_last_weights_of_two_runs_are_compared(tmp_path: Path) -> None:
    def run(name: str, off: float, updates: tuple[int, ...] = (3,)) -> Run:
        for update in updates:
            folder = checkpoint.path_of(Run(tmp_path / name).checkpoints, update)
            folder.mkdir(parents=True)
            tensors = {"a": np.full((3, 4), 2.0 + off, np.float32), "b": np.ones(2, np.float32)}
            save_file(tensors, folder / "model.safetensors")
            (folder / "MANIFEST.json").write_text("{}")
        return Run(tmp_path / name)

    control = run("control", 0.0, (2, 3))
    assert rehearse.weights(control, run("same", 0.0), True) == Weights(True, 0.0, True)
    other = rehearse.weights(control, run("other", 0.5), False)
    assert (other.identical, other.same_workers) == (False, False)
    assert other.difference == pytest.approx((12 * 0.25 / (12 * 4 + 2)) ** 0.5)


# ---------------------------------------------------------------------------------------------------------- the whole

SMALL = ("train.precision=fp32", "train.save_every=40", "train.evaluate_every=400", "quantize.calibration_rows=32")


def rehearsed(folder: Path, text: str, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """`rtrain cluster rehearse` of a file with a training of a tiny encoder."""
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yaml").write_text(text)
    data, model = write_rows(folder / "rows.csv", labelled_rows(403)), make_encoder(folder / "encoder")
    command = [sys.executable, "-m", "rtrain", "cluster", "rehearse", "--json", "--file", str(folder / "cluster.yaml")]
    command += ["--out", str(folder / "out"), "--folder", str(ROOT), "--most-mb", "20", "--", "train", "intent"]
    command += ["--data", str(data), "--model", str(model), *words]
    command += [word for setting in SMALL for word in ("--set", setting)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done, json.loads(lines[-1]) if lines else {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_project_s_own_file_is_rehearsed_whole(tmp_path: Path) -> None:
    done, found = rehearsed(tmp_path, TEXT, "--workers", "2", "--set", "train.epochs=40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found["passed"], found["problems"], found["left_behind"]) == (True, [], [])
    assert found["rows"] == {"agrees": True, "lost": 0, "repeated": 0, "same_order": True}
    assert (found["weights"]["identical"], found["workers"]) == (True, [2, 2, 2])
    assert [fault["kind"] for fault in found["faults"]] == ["notice", "kill"]
    assert found["faults"][0]["recomputed"] == 0
    assert [one for one in found["ports"] if not one["allowed"]] == []
    assert found["nodes_started"] >= found["nodes_needed"] == 3
    assert json.loads((tmp_path / "out" / "certificate.json").read_text()) == found


def on_machines(verb: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.machines", verb, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_workers_take_gpus_that_are_declared_and_land_on_the_nodes_that_have_them(tmp_path: Path) -> None:
    """Beside nodes of CPUs, which the data tasks may have."""
    document = yaml.safe_load(TEXT)
    worker = document["available_node_types"]["worker"]
    document["available_node_types"]["gpu"] = {**worker, "resources": {"CPU": 2, "GPU": 1}, "max_workers": 4}
    done, found = rehearsed(tmp_path, yaml.safe_dump(document), "--workers", "2", "--set", "train.epochs=40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found["passed"], found["device"], found["workers"]) == (True, "gpu", [2, 2, 2])
    assert (found["weights"]["identical"], found["left_behind"]) == (True, [])
    assert {fault["type"] for fault in found["faults"]} == {"gpu"}
    assert any("NCCL" in one for one in found["not_rehearsed"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_a_job_submitted_again_goes_on_from_its_storage_when_the_head_is_gone(tmp_path: Path) -> None:
    """The head's machine is cut off in the middle of a run, and takes the run's folder with it. The same job on a new
    cluster goes on from the newest checkpoint that the storage has: nothing that was saved is lost."""
    first = on_machines("train", tmp_path)
    second = on_machines("again", tmp_path)
    assert (first["left"], second["left"]) == ([], [])
    assert second["resumed_from"] == first["stored"] >= 30


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_an_endpoint_s_replicas_bring_up_nodes_and_leave_none(tmp_path: Path) -> None:
    found = on_machines("serve", tmp_path)
    assert (found["nodes"], found["traceback"], found["left"]) == (2, False, [])
    assert found["statuses"].keys() == {"200", "refused"}  # what was accepted is answered, though the job is stopped


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_run_that_grows_starts_the_nodes_that_it_needs_and_no_more(tmp_path: Path) -> None:
    found = on_machines("grow", tmp_path)
    assert (found["workers"][-1], found["left"]) == (4, [])
    assert found["needed"] == found["started"] == found["at_a_time"] == found["in_the_end"] == 6, found


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_trials_and_replicas_land_on_the_nodes_that_are_labelled_for_them(tmp_path: Path) -> None:
    found = on_machines("labels", tmp_path)
    assert (found["status"], found["trials"], found["left"]) == ("SUCCEEDED", 2, [])
    assert found["on"] == {"ray::RayTrainWorker": ["training"], "ray::ServeReplica": ["answers"]}
