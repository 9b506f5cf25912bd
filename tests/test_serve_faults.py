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
from rtrain.config import Serve
from serve import deployment, ray_config
from serve.deployment import start
from serve.ingress.address import Address
from tests.test_serve_deployment import openvino_artifact, processes
from tests.test_serve_haproxy import wait_until
from tests.test_serve_rollout import CLIENTS, Seen, answering, load, replicas

pytestmark = [pytest.mark.slow, pytest.mark.serve]

BETWEEN = ("ConnectionRefusedError", "RemoteDisconnected", "ConnectionResetError", "BrokenPipeError")
"""How a client learns that the endpoint has ended between two of its questions."""
RETRY_AFTER_S = 1.0
"""What a 503 of HAProxy's own says."""


def tell(what: str, seen: Seen, **others: object) -> None:
    errors, again = (Counter(one[:60] for one in found) for found in (seen.errors, seen.again))
    asked = {"requests": seen.versions.total() + len(seen.errors), "slowest_s": round(seen.slowest_s, 2)}
    told = {**asked, "outage_s": round(seen.outage_s, 2), "load": os.getloadavg()[0], **others}
    sys.stderr.write(f"\n{what}: {told}, raw {dict(errors)}, after one more try {dict(again)}\n")


def wait_for(count: int) -> float:
    """Seconds until so many replicas are up."""

    def up() -> bool:
        states = (
            ray.serve.status().applications[ray_config.APPLICATION].deployments[deployment.DEPLOYMENT].replica_states
        )
        running = sum(number for state, number in states.items() if str(state).endswith("RUNNING"))
        return running == count == len(replicas())

    began = time.monotonic()
    assert wait_until(up, 120), f"not {count} replicas"
    return time.monotonic() - began


LONG = "where is my parcel " * 2000
"""A text that takes so long that a client of this machine can ask for more than the engine does."""


def haproxy_folder(family: list[psutil.Process]) -> Path:
    """That of a command's HAProxy, of which a process may end just now: another one has taken over."""
    found = set[Path]()
    for one in family:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found |= {Path(word).parent for word in one.cmdline() if word.endswith("/haproxy.cfg")}
    [folder] = found
    return folder


@pytest.mark.usefixtures("ray_session")
def test_a_replica_that_hangs_is_passed_by_and_replaced(tmp_path: Path) -> None:
    """What it has in hand is lost at the deadline, which a client meets once: HAProxy passes it by after two questions
    without an answer, 8 s at most, and the 504 comes 2 s after the deadline."""
    with (
        start(openvino_artifact(tmp_path), Serve(ungated=True, port=0, replicas=2, deadline_s=7)) as endpoint,
        load(endpoint.port, pause_s=0.02, again_s=0) as seen,
    ):
        time.sleep(2)
        victim = replicas()[0]
        victim.suspend()
        time.sleep(15)
        late = len(seen.errors)
        victim.wait(60)
        back = 15 + wait_for(2)
        time.sleep(2)
        assert len(seen.errors) == late, "it is not passed by"
    tell("one of two replicas hangs", seen, back_s=round(back, 1))
    assert seen.again == []


@pytest.mark.usefixtures("ray_session")
def test_the_only_replica_that_hangs_is_replaced(tmp_path: Path) -> None:
    """Whoever asks waits for it, as there is no other one, and is answered 504; the last of them when its successor
    answers already. The rest of an answer that it had begun is missing, of one at most."""
    with (
        start(openvino_artifact(tmp_path), Serve(ungated=True, port=0, replicas=1, deadline_s=7)) as endpoint,
        load(endpoint.port, pause_s=0.02) as seen,
    ):
        time.sleep(2)
        [victim] = replicas()
        assert seen.errors == []
        began = time.monotonic()
        victim.suspend()
        time.sleep(1)
        before = seen.versions.total()
        assert wait_until(lambda: seen.versions.total() > before, 90), "none takes its place"
        back = time.monotonic() - began
        victim.wait(60)
        ended = time.monotonic() - began
        wait_for(1)
        time.sleep(1)
        late, before = len(seen.errors), seen.versions.total()
        time.sleep(2)
        assert len(seen.errors) == late, "it does not come back"
        assert seen.versions.total() > before
    tell("the only replica hangs", seen, back_s=round(back, 1), ended_s=round(ended, 1))
    begun = [error for error in seen.errors if error.startswith("IncompleteRead")]
    statuses = [error[:4] for error in seen.errors if error not in begun]
    assert len(begun) <= 1
    assert statuses[: CLIENTS - 1] == ["504 "] * (CLIENTS - 1), "what it had in hand"
    assert set(statuses) <= {"503 ", "504 "}
    assert len(seen.labels) == 1


@pytest.mark.parametrize(
    ("number", "send", "code", "said"),
    [
        (signal.SIGINT, os.killpg, 130, "interrupted"),  # as a terminal does
        (signal.SIGINT, os.kill, 130, "interrupted"),
        (signal.SIGTERM, os.kill, 143, "ended by SIGTERM"),
    ],
)
def test_a_command_that_is_ended_under_load_answers_what_it_has_accepted_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None], code: int, said: str
) -> None:
    asked: list[tuple[float, float, str]] = []
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
            asked.append((began, time.monotonic(), last))

    artifact = str(openvino_artifact(tmp_path))
    with ThreadPoolExecutor(CLIENTS) as pool, answering(artifact, "--ungated", group=True) as (process, port):
        started = psutil.Process(process.pid).children(recursive=True)
        folder = haproxy_folder(started)
        assert folder.exists()
        with load(port, pause_s=0.02) as seen:
            done = [pool.submit(ask, port, client) for client in range(CLIENTS)]
            time.sleep(3)
            assert wait_until(in_hand, 30)
            assert seen.errors == []
            told = time.monotonic()
            send(process.pid, number)
            out, err = process.communicate(timeout=120)
            took = time.monotonic() - told
        assert [one.result() for one in done] == [None] * CLIENTS
    _, left = psutil.wait_procs(started, timeout=20)
    names = [one.name() for one in left]
    for one in left:
        one.kill()
    held = [answer for began, came, answer in asked if began < told - 0.1 and came > told]
    before = Counter(answer for _, came, answer in asked if came < told)
    tell(f"{send.__name__} {number.name}", seen, end_s=round(took, 1), long=dict(before), held=held)
    assert set(held) == {"200"}
    assert [error for error in seen.errors if not error.startswith(BETWEEN)] == []
    assert (process.returncode, out) == (code, "")
    assert [line for line in err.splitlines() if not line.startswith("next: ")] == ["ending Ray", f"rtrain: {said}"]
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
        with load(port, pause_s=0.02) as seen:
            time.sleep(2)
            [store] = [one for one in started if one.name().startswith("gcs_server")]
            store.kill()
            time.sleep(told_after_s or cluster_connection.KEPT_S - 5)
        assert process.poll() is None
        if told_after_s:
            process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=120)[1]
    _, left = psutil.wait_procs(started, timeout=60)
    names = [one.name() for one in left]
    for one in left:
        one.kill()
    tell("the cluster store killed", seen, code=process.returncode, said=err.splitlines()[-1:])
    assert seen.errors == []
    assert (names, folder.exists()) == ([], False)
    assert process.returncode == (143 if told_after_s else 1)


HAPROXY, SUPERVISOR, MANAGER, CONTROLLER = (
    "haproxy.cfg.",
    "haproxy.cfg -d",
    "ray::HAProxyManager",
    "ray::ServeController",
)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("what", [HAPROXY, SUPERVISOR, MANAGER, CONTROLLER])
def test_the_proxy_and_the_controller_are_killed_under_load(tmp_path: Path, what: str) -> None:
    def up() -> list[psutil.Process]:
        return [one for one in processes(what) if one.status() != psutil.STATUS_ZOMBIE]

    with (
        start(openvino_artifact(tmp_path), Serve(ungated=True, port=0, replicas=2)) as endpoint,
        load(endpoint.port, pause_s=0.02, again_s=RETRY_AFTER_S) as seen,
    ):
        time.sleep(2)
        [victim] = up()
        victim.kill()
        began = time.monotonic()
        assert wait_until(lambda: up() not in ([], [victim]), 120), "none takes its place"
        back = time.monotonic() - began
        time.sleep(10)
        late = len(seen.errors)
        time.sleep(5)
        assert len(seen.errors) == late, "it does not come back"
    tell(f"{what} killed", seen, back_s=round(back, 1))
    assert len(seen.labels) == 1
    if what in (MANAGER, CONTROLLER):
        assert seen.errors == []
    if what == HAPROXY:
        assert seen.again == []
