"""What hangs, what Ray itself loses, and more than can be answered: an endpoint under load by real clients. By hand:
the figures are on stderr."""

import http.client
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import ray
import ray.serve

from rtrain.cluster import connection as cluster_connection
from rtrain.config import ServeConfig
from serve import ray_config
from serve.deployment import start_endpoint
from serve.ingress.address import Address
from tests.e2e.test_rollout import CLIENTS, LoadResult, answering, load, replicas
from tests.serve.test_deployment import openvino_artifact, processes
from tests.unit.serve.test_haproxy import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.serve]

BETWEEN = ("ConnectionRefusedError", "RemoteDisconnected", "ConnectionResetError", "BrokenPipeError")
"""How a client learns that the endpoint has ended between two of its questions."""
RETRY_AFTER_S = 1.0
"""Body of a 503 by HAProxy."""


def tell(title: str, result: LoadResult, **extra_fields: object) -> None:
    errors, retried = (
        Counter(message[:60] for message in messages) for messages in (result.errors, result.retried_errors)
    )
    requests = {"requests": result.versions.total() + len(result.errors), "slowest_s": round(result.slowest_s, 2)}
    report = {**requests, "outage_s": round(result.outage_s, 2), "load": os.getloadavg()[0], **extra_fields}
    sys.stderr.write(f"\n{title}: {report}, raw {dict(errors)}, after one more try {dict(retried)}\n")


def wait_for(count: int) -> float:
    """Seconds until so many replicas are up."""

    def is_up() -> bool:
        states = (
            ray.serve.status()
            .applications[ray_config.APPLICATION_NAME]
            .deployments[ray_config.DEPLOYMENT_NAME]
            .replica_states
        )
        running = sum(number for state, number in states.items() if str(state).endswith("RUNNING"))
        return running == count == len(replicas())

    began = time.monotonic()
    assert wait_until(is_up, 120), f"not {count} replicas"
    return time.monotonic() - began


LONG = "where is my parcel " * 2000
"""A text that takes so long that a client of this machine can ask for more than the engine does."""


def haproxy_folder(family: list[psutil.Process]) -> Path:
    """Configuration folder of a command's HAProxy; its process may just have been replaced."""
    paths = set[Path]()
    for process in family:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            paths |= {Path(word).parent for word in process.cmdline() if word.endswith("/haproxy.cfg")}
    [folder] = paths
    return folder


@pytest.mark.usefixtures("ray_session")
def test_a_replica_that_hangs_is_passed_by_and_replaced(tmp_path: Path) -> None:
    """What it has in hand is lost at the deadline, which a client meets once: HAProxy passes it by after two questions
    without an answer, 8 s at most, and the 504 comes 2 s after the deadline."""
    with (
        start_endpoint(
            openvino_artifact(tmp_path), ServeConfig(ungated=True, port=0, replicas=2, request_timeout_s=7)
        ) as endpoint,
        load(endpoint.port, pause_s=0.02, again_s=0) as result,
    ):
        time.sleep(2)
        victim = replicas()[0]
        victim.suspend()
        time.sleep(15)
        late = len(result.errors)
        victim.wait(60)
        recovery_s = 15 + wait_for(2)
        time.sleep(2)
        assert len(result.errors) == late, "it is not passed by"
    tell("one of two replicas hangs", result, back_s=round(recovery_s, 1))
    assert result.retried_errors == []


@pytest.mark.usefixtures("ray_session")
def test_the_only_replica_that_hangs_is_replaced(tmp_path: Path) -> None:
    """Whoever asks waits for it, as there is no other one, and is answered 504; the last of them when its successor
    answers already. The rest of an answer that it had begun is missing, of one at most."""
    with (
        start_endpoint(
            openvino_artifact(tmp_path), ServeConfig(ungated=True, port=0, replicas=1, request_timeout_s=7)
        ) as endpoint,
        load(endpoint.port, pause_s=0.02) as result,
    ):
        time.sleep(2)
        [victim] = replicas()
        assert result.errors == []
        began = time.monotonic()
        victim.suspend()
        time.sleep(1)
        before = result.versions.total()
        assert wait_until(lambda: result.versions.total() > before, 90), "none takes its place"
        recovery_s = time.monotonic() - began
        victim.wait(60)
        shutdown_s = time.monotonic() - began
        wait_for(1)
        time.sleep(1)
        late, before = len(result.errors), result.versions.total()
        time.sleep(2)
        assert len(result.errors) == late, "it does not come back"
        assert result.versions.total() > before
    tell("the only replica hangs", result, back_s=round(recovery_s, 1), ended_s=round(shutdown_s, 1))
    cut_answers = [error for error in result.errors if error.startswith("IncompleteRead")]
    statuses = [error[:4] for error in result.errors if error not in cut_answers]
    assert len(cut_answers) <= 1
    assert statuses[: CLIENTS - 1] == ["504 "] * (CLIENTS - 1), "its running requests"
    assert set(statuses) <= {"503 ", "504 "}
    assert len(result.labels) == 1


@pytest.mark.parametrize(
    ("number", "send", "code", "message"),
    [
        (signal.SIGINT, os.killpg, 130, "interrupted"),  # as a terminal does
        (signal.SIGINT, os.kill, 130, "interrupted"),
        (signal.SIGTERM, os.kill, 143, "ended by SIGTERM"),
    ],
)
def test_a_command_that_is_ended_under_load_answers_what_it_has_accepted_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None], code: int, message: str
) -> None:
    exchanges: list[tuple[float, float, str]] = []
    """When a long question was asked, when its answer had come, and what that was."""
    under_way: dict[int, float] = {}
    """When each client has asked."""

    def in_hand() -> bool:
        """Whether the endpoint has a question of each client, sent so long ago that it has been accepted."""
        return len(under_way) == CLIENTS and max(under_way.values()) < time.monotonic() - 0.1

    def ask(port: int, client: int) -> None:
        """Until there is no answer."""
        body, last = json.dumps({"inputs": [LONG] * 16}), ""
        while last in ("", "200"):
            began = under_way[client] = time.monotonic()
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                    connection.request("POST", "/predict", body)
                    answer = connection.getresponse()
                    last = f"{answer.status}" if len(json.loads(answer.read())) == 16 else f"{answer.status} cut"
            except (OSError, http.client.HTTPException) as error:
                last = repr(error)
            exchanges.append((began, time.monotonic(), last))

    artifact = str(openvino_artifact(tmp_path))
    with ThreadPoolExecutor(CLIENTS) as pool, answering(artifact, "--ungated", group=True) as (process, port):
        started = psutil.Process(process.pid).children(recursive=True)
        folder = haproxy_folder(started)
        assert folder.exists()
        with load(port, pause_s=0.02) as result:
            done = [pool.submit(ask, port, client) for client in range(CLIENTS)]
            time.sleep(3)
            assert wait_until(in_hand, 30)
            assert result.errors == []
            signalled_at = time.monotonic()
            send(process.pid, number)
            out, err = process.communicate(timeout=120)
            took = time.monotonic() - signalled_at
        assert [future.result() for future in done] == [None] * CLIENTS
    _, left = psutil.wait_procs(started, timeout=20)
    names = [child.name() for child in left]
    for child in left:
        child.kill()
    in_flight_answers = [
        answer for began, came, answer in exchanges if began < signalled_at - 0.1 and came > signalled_at
    ]
    before = Counter(answer for _, came, answer in exchanges if came < signalled_at)
    tell(f"{send.__name__} {number.name}", result, end_s=round(took, 1), long=dict(before), held=in_flight_answers)
    assert set(in_flight_answers) == {"200"}
    assert [error for error in result.errors if not error.startswith(BETWEEN)] == []
    assert (process.returncode, out) == (code, "")
    assert [line for line in err.splitlines() if not line.startswith("next: ")] == ["ending Ray", f"rtrain: {message}"]
    assert (names, folder.parent.exists()) == ([], False)
    assert Address("127.0.0.1", port).is_free()


@pytest.mark.parametrize("told_after_s", [5, None])
def test_an_endpoint_whose_cluster_store_dies_answers_on_and_ends_with_nothing_left(
    tmp_path: Path, told_after_s: float | None
) -> None:
    """Ray's GCS keeps what there is in its memory: Ray waits a minute for another one, and ends its processes then. The
    command is before that, whether it is told to end or not."""
    with answering(str(openvino_artifact(tmp_path)), "--ungated") as (process, port):
        started = psutil.Process(process.pid).children(recursive=True)
        folder = haproxy_folder(started)
        with load(port, pause_s=0.02) as result:
            time.sleep(2)
            [store] = [process for process in started if process.name().startswith("gcs_server")]
            store.kill()
            time.sleep(told_after_s or cluster_connection.STORE_LOSS_GRACE_S - 5)
        assert process.poll() is None
        if told_after_s:
            process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=120)[1]
    _, left = psutil.wait_procs(started, timeout=60)
    names = [process.name() for process in left]
    for child in left:
        child.kill()
    tell("the cluster store killed", result, code=process.returncode, said=err.splitlines()[-1:])
    assert result.errors == []
    assert (names, folder.exists()) == ([], False)
    assert process.returncode == (143 if told_after_s else 1)


HAPROXY, SUPERVISOR, MANAGER, CONTROLLER = (
    "haproxy.cfg.",
    "haproxy.cfg -d",
    "ray::HAProxyManager",
    "ray::ServeController",
)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("actor_name", [HAPROXY, SUPERVISOR, MANAGER, CONTROLLER])
def test_the_proxy_and_the_controller_are_killed_under_load(tmp_path: Path, actor_name: str) -> None:
    def running_actors() -> list[psutil.Process]:
        return [process for process in processes(actor_name) if process.status() != psutil.STATUS_ZOMBIE]

    with (
        start_endpoint(openvino_artifact(tmp_path), ServeConfig(ungated=True, port=0, replicas=2)) as endpoint,
        load(endpoint.port, pause_s=0.02, again_s=RETRY_AFTER_S) as result,
    ):
        time.sleep(2)
        [victim] = running_actors()
        victim.kill()
        began = time.monotonic()
        assert wait_until(lambda: running_actors() not in ([], [victim]), 120), "none takes its place"
        recovery_s = time.monotonic() - began
        time.sleep(10)
        late = len(result.errors)
        time.sleep(5)
        assert len(result.errors) == late, "it does not come back"
    tell(f"{actor_name} killed", result, back_s=round(recovery_s, 1))
    assert len(result.labels) == 1
    if actor_name in (MANAGER, CONTROLLER):
        assert result.errors == []
    if actor_name == HAPROXY:
        assert result.retried_errors == []
