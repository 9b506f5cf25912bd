"""What a replica is asked by Ray, beside its requests."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
import ray.serve

from serve import replica
from serve.watching.sums import exposition, sum_expositions
from serve.watching.telemetry import Telemetry


def test_all_that_others_ask_runs_on_the_loop_which_counts() -> None:
    """Ray runs a method that is not `async` in a thread, beside the loop on which requests are counted."""
    asked = {name: one for name, one in inspect.getmembers(replica.Replica, inspect.isfunction) if name[0] != "_"}
    assert {"status", "serves", "exposition", "load", "follow", "drop"} < {*asked}
    plain = {name for name, one in asked.items() if not inspect.iscoroutinefunction(one)}
    assert plain == {"check_health", "record_autoscaling_stats"}  # they read two numbers


def test_metrics_are_those_of_the_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Telemetry()
    one.rows.inc(3)

    class Handle:
        def broadcast(self, method: str) -> "Handle":
            assert method == "exposition"
            return self

        async def results_async(self, return_exceptions: bool = False) -> list[Any]:
            ended = ray.exceptions.ActorDiedError()
            if not return_exceptions:
                raise ended
            told = exposition({"tiny": one.registry})
            return [told, ended, told]

    context = SimpleNamespace(deployment="rtrain", app_name="tiny")
    monkeypatch.setattr(ray.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ray.serve, "get_deployment_handle", lambda *given: Handle())
    found = asyncio.run(replica.of_all("exposition"))
    assert 'rtrain_rows_total{model="tiny"} 6.0' in sum_expositions(found)
