"""How many replicas there should be: the rule, a simulation of an endpoint under it, and Ray Serve's own interface."""

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import ray.serve
from hypothesis import given, strategies as st

from rtrain.config import ServeConfig
from serve import deployment, ray_config
from serve.rollout import autoscaling
from serve.rollout.autoscaling import (
    DRAIN_S,
    HIGH_UTILIZATION,
    LOW_UTILIZATION,
    LoadMeter,
    ReplicaLoad,
    desired_replicas,
)
from tests.serve.test_deployment import openvino_artifact
from tests.unit.serve.test_haproxy import wait_until


def loads(*busy: float, queued_s: float = 0.0) -> list[ReplicaLoad]:
    """Replicas of 1,000 tokens a second; `queued_s` of work waits at each."""
    return [ReplicaLoad(1000 * queued_s, 1000.0, share) for share in busy]


@pytest.mark.parametrize(
    ("loads", "current", "expected"),
    [
        (loads(0.0), 1, 1),
        (loads(0.79), 1, 1),
        (loads(0.81), 1, 2),
        (loads(1.0, queued_s=DRAIN_S), 1, 3),
        (loads(0.6, 0.6), 2, 2),
        (loads(0.3, 0.3), 2, 2),
        (loads(0.25, 0.24), 2, 1),
        (loads(0.0, 0.0, 0.0), 3, 1),
        ([ReplicaLoad(5000.0, 0.0, 0.0)], 1, 1),  # has never worked: nobody knows how long it would take
    ],
)
def test_replicas_follow_what_engines_do_and_what_waits(loads: list[ReplicaLoad], current: int, expected: int) -> None:
    assert desired_replicas(loads, current) == expected


@given(demand=st.floats(0, 50), current=st.integers(1, 60))
def test_the_same_load_never_goes_back_and_forth(demand: float, current: int) -> None:
    """One step, and the number stays; whatever it is, the replicas are neither overloaded nor mostly idle."""
    first = desired_replicas([ReplicaLoad(0.0, 1.0, demand)], current)
    assert desired_replicas([ReplicaLoad(0.0, 1.0, demand)], first) == first >= 1
    assert demand <= HIGH_UTILIZATION * first + 1e-6
    assert first == 1 or demand > LOW_UTILIZATION * (first - 1) - 1e-6


# --------------------------------------------------------------------------------------------------------- simulation


@dataclass
class Endpoint:
    """Replicas of one token a second each that share a queue; a new one answers after `start_s`. The rule is asked
    every second about the means of `look_back_s`, and followed where it has wanted the same for a delay, as Ray Serve
    does."""

    start_s: float = 12.0
    look_back_s: int = 10
    up_s: int = 3
    down_s: int = 60
    ready: int = 1
    target: int = 1
    waiting: float = 0.0
    starting: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    queues: list[float] = field(default_factory=list)

    def run(self, seconds: int, arrivals: Callable[[int], float]) -> None:
        history: list[tuple[float, float]] = []
        wanted_for, before = 0, 0
        for now in range(seconds):
            self.starting = [ready for ready in self.starting if ready > now or self._start()]
            self.waiting += arrivals(now)
            done = min(self.waiting, float(self.ready))
            self.waiting -= done
            history.append((self.waiting / self.ready, done / self.ready))
            recent = history[-self.look_back_s :]
            queued, busy = (sum(column) / len(recent) for column in zip(*recent, strict=True))
            desired = desired_replicas([ReplicaLoad(queued, 1.0, busy)] * self.ready, self.target)
            direction = (desired > self.target) - (desired < self.target)
            wanted_for = wanted_for + 1 if direction == before and direction else int(bool(direction))
            before = direction
            if direction and wanted_for >= (self.up_s if direction > 0 else self.down_s):
                self._go(desired, now)
                wanted_for = before = 0
            self.targets.append(self.target)
            self.queues.append(self.waiting)

    def _start(self) -> bool:
        self.ready += 1
        return False

    def _go(self, desired: int, now: int) -> None:
        self.starting += [now + self.start_s] * (desired - self.target)
        if desired < self.target:
            self.starting = []
            self.ready = desired
        self.target = desired


@pytest.mark.parametrize("load", [0.1, 0.7, 0.9, 1.5, 2.4, 3.1, 4.0, 7.9])
def test_a_steady_load_is_met_without_going_back_and_forth(load: float) -> None:
    """Arrivals are drawn, with the given mean. Once what waited at the start is worked off, the number of replicas
    never rises again, no queue is left, and it approaches the need of the load."""
    chance, endpoint = random.Random(1), Endpoint()
    endpoint.run(1500, lambda now: sum(0.1 for _ in range(400) if chance.random() < load / 40))
    later = endpoint.targets[300:]
    assert all(after <= before for before, after in itertools.pairwise(later))
    assert load <= later[-1] <= load / LOW_UTILIZATION + 2
    assert max(endpoint.queues[300:]) < 5


def test_a_rush_is_met_and_given_back() -> None:
    """Five times the capacity of a replica, for ten minutes: the queue empties, and one replica remains."""
    endpoint = Endpoint()
    endpoint.run(2400, lambda now: 5.0 if 300 <= now < 900 else 0.3)
    assert endpoint.targets[299] == 1
    assert 6 <= endpoint.targets[800] <= 11
    assert max(endpoint.queues[420:]) < 1
    assert endpoint.targets[-1] == 1
    turns = [after > before for before, after in itertools.pairwise(endpoint.targets) if after != before]
    assert turns == sorted(turns, reverse=True), "up, and then down, once each"


# ------------------------------------------------------------------------------------------------------ the interface


def test_a_replica_reports_the_time_since_it_last_did() -> None:
    meter = LoadMeter(100.0)
    assert meter.report(110.0, 500, 5.0, 10_000) == {"queued_tokens": 500.0, "tokens_per_second": 2000.0, "busy": 0.5}
    assert meter.report(120.0, 0, 5.0, 10_000) == {"queued_tokens": 0.0, "tokens_per_second": 2000.0, "busy": 0.0}
    assert meter.report(121.0, 0, 7.0, 11_000)["busy"] == 1.0  # a call that had begun before


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_replicas_follow_the_load_on_ray_serve_and_no_request_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "DOWNSCALE_DELAY_S", 5.0)
    # The tiny model's engine is done sooner than its tokens are made, and never busy for long.
    monkeypatch.setattr(autoscaling, "HIGH_UTILIZATION", 0.2)
    monkeypatch.setattr(autoscaling, "LOW_UTILIZATION", 0.1)
    artifact = openvino_artifact(tmp_path / "artifact")
    many, one_text = (json.dumps({"inputs": texts}).encode() for texts in (["a long text " * 100] * 64, "hello"))
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def ask(url: str, body: bytes, pause: float = 0.0) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not over.wait(pause):
                statuses[client.post(f"{url}/predict", content=body).status_code] += 1

    def running() -> int:
        [application] = ray.serve.status().applications.values()
        states = application.deployments[ray_config.DEPLOYMENT_NAME].replica_states
        return sum(number for state, number in states.items() if str(state).endswith("RUNNING"))

    def reaches(number: int) -> bool:
        return wait_until(lambda: running() == number, 120)

    settings = ServeConfig(port=0, replicas=1, max_replicas=2, request_timeout_s=60, ungated=True)
    with deployment.start_endpoint(artifact, settings) as endpoint, ThreadPoolExecutor(4) as pool:
        assert running() == 1
        futures = [pool.submit(ask, endpoint.url, many) for _ in range(4)]
        try:
            assert reaches(2)
        finally:
            over.set()
        assert [future.result() for future in futures] == [None] * 4
        over.clear()
        asked_many = statuses.total()
        gentle = [
            pool.submit(ask, endpoint.url, one_text, 0.02) for _ in range(2)
        ]  # they keep sending while a replica ends
        try:
            assert reaches(1)
        finally:
            over.set()
        assert [future.result() for future in gentle] == [None, None]
        assert statuses.total() > asked_many + 100
        assert httpx.post(f"{endpoint.url}/predict", json={"inputs": "hello"}, trust_env=False).status_code == 200
    assert set(statuses) == {200}
