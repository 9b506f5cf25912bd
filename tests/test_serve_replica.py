"""What a replica is asked by Ray, beside its requests."""

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
import ray.serve

import rtrain.artifact
from rtrain.artifact import ArtifactError
from rtrain.config import Serve
from serve import replica
from serve.front import direct
from serve.watching.sums import exposition, sum_expositions
from serve.watching.telemetry import Telemetry
from tests.tiny import make_artifact

OWN: Any = next(one for one in replica.Replica.__mro__ if "reconfigure" in vars(one))
"""The class as it is written: what Ray makes of it is closed by a coroutine that Ray alone awaits."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One that is served, another version of it, and one that the gate has refused."""
    root = tmp_path_factory.mktemp("replica")
    found = [make_artifact(root / str(seed), seed=seed) for seed in range(3)]
    made = rtrain.artifact.read(found[2])
    gate = {"version": made.version, "verdict": "refuse", "reasons": ["it is worse"]}
    rtrain.artifact.write(found[2], replace(made, gate=gate), lambda *_: [row["logits"] for row in made.golden])
    return found


@pytest.mark.parametrize("ungated", [False, True])
def test_what_the_gate_has_refused_answers_nothing_whoever_names_it(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], ungated: bool
) -> None:
    """A file for `serve deploy` names the artefact in `user_config`, which Ray hands to replicas alone."""
    monkeypatch.setattr(direct, "install", lambda *given: None)
    first, _, refused = ({"models": {"tiny": str(folder)}} for folder in folders)

    async def main() -> dict[str, str]:
        one = OWN(Serve(ungated=ungated), ["tiny"])
        if not ungated:
            with pytest.raises(ArtifactError, match="was refused by the gate: it is worse"):
                await one.reconfigure(refused)
        await one.reconfigure(first)
        await one.reconfigure(refused)
        await asyncio.gather(*one._changes)
        found: dict[str, str] = await one.serves()
        return found

    assert asyncio.run(main()) == (refused if ungated else first)["models"]


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
