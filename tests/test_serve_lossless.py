"""10,000 requests over changes and the end, and what dies under load: how many are lost, raw and to clients that ask
once more. By hand: the figures are on stderr."""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import ray
import ray.serve

from rtrain.config import Serve
from serve import declared, deployment
from serve.deployment import start
from tests.test_serve_deployment import openvino_artifact, processes
from tests.test_serve_haproxy import wait_until
from tests.test_serve_rollout import Seen, load, replicas

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.usefixtures("ray_session")]

REQUESTS = 10_000
BETWEEN = ("ConnectionRefusedError", "RemoteDisconnected", "ConnectionResetError", "BrokenPipeError")
"""How a client learns that the endpoint has ended between two of its questions."""
KILLS = 10
RETRY_AFTER_S = 1.0
"""What a 503 of HAProxy's own says."""


def tell(what: str, seen: Seen, **others: object) -> None:
    errors, again = (Counter(one[:60] for one in found) for found in (seen.errors, seen.again))
    asked = {"requests": seen.versions.total() + len(seen.errors), "slowest_s": round(seen.slowest_s, 2)}
    told = {**asked, "outage_s": round(seen.outage_s, 2), "load": os.getloadavg()[0], **others}
    sys.stderr.write(f"\n{what}: {told}, raw {dict(errors)}, after one more try {dict(again)}\n")


@pytest.mark.parametrize("copies", [1, 3])
def test_ten_thousand_requests_over_updates_rollbacks_and_the_end_lose_none(tmp_path: Path, copies: int) -> None:
    first, second = (openvino_artifact(tmp_path / str(seed), seed) for seed in (0, 1))
    changes = 0
    with start(first, Serve(ungated=True, port=0, replicas=copies)) as endpoint, load(endpoint.port) as seen:
        while seen.versions.total() < REQUESTS:
            endpoint.change({"rollback": True} if changes % 2 else {"update": str(second)})
            changes += 1
            time.sleep(1)
        assert seen.errors == []
        endpoint.close()
    tell(f"{copies} replicas", seen, changes=changes, versions=dict(seen.versions))
    assert [error for error in seen.errors if not error.startswith(BETWEEN)] == []
    assert changes >= 2


def wait_for(count: int) -> float:
    """Seconds until so many replicas are up."""

    def up() -> bool:
        states = ray.serve.status().applications[declared.APPLICATION].deployments[deployment.DEPLOYMENT].replica_states
        running = sum(number for state, number in states.items() if str(state).endswith("RUNNING"))
        return running == count == len(replicas())

    began = time.monotonic()
    assert wait_until(up, 120), f"not {count} replicas"
    return time.monotonic() - began


@pytest.mark.parametrize("copies", [2, 1])
def test_replicas_that_are_killed_under_load(tmp_path: Path, copies: int) -> None:
    outages: list[float] = []
    with (
        start(openvino_artifact(tmp_path), Serve(ungated=True, port=0, replicas=copies)) as endpoint,
        load(endpoint.port, pause_s=0.02) as seen,
    ):
        for _ in range(KILLS):
            time.sleep(2)
            wait_for(copies)
            replicas()[0].kill()
            time.sleep(1)
            outages.append(1 + wait_for(copies))
        [told] = json.loads(endpoint.change({"status": True}))["models"]
        assert told["trial"] is None
    tell(f"{KILLS} kills, {copies} replicas", seen, back_s=[round(one, 1) for one in outages])
    assert seen.versions.total() > 500
    assert len(seen.labels) == 1
    if copies > 1:
        assert seen.errors == [], "raw: of clients that never ask again"


HAPROXY, SUPERVISOR, MANAGER, CONTROLLER = (
    "haproxy.cfg.",
    "haproxy.cfg -d",
    "ray::HAProxyManager",
    "ray::ServeController",
)


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
