"""What a replica is asked by Ray, beside its requests."""

import asyncio
import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
import ray.serve
from prometheus_client.parser import text_string_to_metric_families

import rtrain.artifact
from rtrain.config import Serve
from serve import replica
from serve.change.application import VERSIONS
from serve.front import direct
from tests.refusals import refused_with
from tests.tiny import make_artifact, refused

OWN: Any = next(one for one in replica.Replica.__mro__ if "reconfigure" in vars(one))
"""The class as it is written: what Ray makes of it is closed by a coroutine that Ray alone awaits."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One that is served, another version of it, and one that the gate has refused."""
    root = tmp_path_factory.mktemp("replica")
    first, second, third = (make_artifact(root / str(seed), seed=seed) for seed in range(3))
    return [first, second, refused(third)]


@pytest.mark.parametrize("ungated", [False, True])
def test_what_the_gate_has_refused_answers_nothing_whoever_names_it(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], ungated: bool
) -> None:
    """A file for `serve deploy` names the artefact in `user_config`, which Ray hands to replicas alone."""
    first, _, worse = ({"models": {"tiny": str(folder)}} for folder in folders)

    async def main() -> dict[str, str]:
        [one] = Fleet(monkeypatch, Serve(ungated=ungated), 1).every
        if not ungated:
            with refused_with("refused_by_gate"):
                await one.reconfigure(worse)
        await one.reconfigure(first)
        await one.reconfigure(worse)
        await asyncio.gather(*one._changes)
        return {name: folder for name, (folder, _) in (await one.serves()).items()}

    assert asyncio.run(main()) == (worse if ungated else first)["models"]


def test_a_replica_that_starts_refuses_another_version_than_the_one_that_was_decided(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    """Whoever has replaced the folder meanwhile has proven nothing to anybody."""
    old, new = (rtrain.artifact.read(folder).version for folder in folders[:2])
    wish = {"models": {"tiny": str(folders[0])}}

    async def main() -> Any:
        [one] = Fleet(monkeypatch, Serve(), 1).every
        with refused_with("other_version"):
            await one.reconfigure({**wish, VERSIONS: {"tiny": new}})
        assert await one.serves() == {}
        await one.reconfigure({**wish, VERSIONS: {"tiny": old}})
        return await one.serves()

    assert asyncio.run(main()) == {"tiny": (str(folders[0]), old)}


class Fleet:
    """Replicas of this process in place of Ray's, and what Ray tells of their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: Serve, number: int):
        monkeypatch.setattr(direct, "install", lambda *given: None)
        monkeypatch.setattr(
            ray.serve, "get_replica_context", lambda: SimpleNamespace(deployment="rtrain", app_name="a")
        )
        monkeypatch.setattr(ray.serve, "get_deployment_handle", lambda *given: self)
        self.every = [OWN(settings, ["tiny"]) for _ in range(number)]
        self.asked: list[str] = []
        self.ends: list[Any] = []

    def broadcast(self, method: str, *given: object) -> Any:
        self.asked.append(method)
        asked = list(self.every)

        async def ended() -> None:
            raise ray.exceptions.ActorDiedError()

        async def results() -> list[Any]:
            found = [SimpleNamespace(get_async=functools.partial(getattr(one, method), *given)) for one in asked]
            return [*found, *(SimpleNamespace(get_async=ended) for _ in self.ends)]

        return SimpleNamespace(_fetch_replica_results_async=results)

    async def tell(self, folder: Path, **wish: object) -> list[str]:
        """Ray tells all of them, one after another; what they answer with in the end."""
        for one in self.every:
            await one.reconfigure({"models": {"tiny": str(folder)}, **wish})
        await asyncio.gather(*(change for one in self.every for change in one._changes))
        return [(await one.serves())["tiny"][0] for one in self.every]


def test_all_that_others_ask_runs_on_the_loop_which_counts() -> None:
    """Ray runs a method that is not `async` in a thread, beside the loop on which requests are counted."""
    asked = {name: one for name, one in inspect.getmembers(replica.Replica, inspect.isfunction) if name[0] != "_"}
    assert {"status", "serves", "exposition", "load", "follow", "drop"} < {*asked}
    plain = {name for name, one in asked.items() if not inspect.iscoroutinefunction(one)}
    assert plain == {"check_health", "record_autoscaling_stats"}  # they read two numbers


def test_counters_of_replicas_stay_apart_so_that_none_falls_where_one_ends(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    async def main() -> tuple[str, str]:
        fleet = Fleet(monkeypatch, Serve(replicas=3), 3)
        await fleet.tell(folders[0])
        for number, one in enumerate(fleet.every):
            one._lasting["tiny"].telemetry.rows.inc(number + 1)
        before = await fleet.every[0]._join_expositions()
        fleet.ends, fleet.every = fleet.every[-1:], fleet.every[:-1]
        return before, await fleet.every[0]._join_expositions()

    before, after = (rows_of(text) for text in asyncio.run(main()))
    assert sorted(before.values()) == [1, 2, 3]
    assert after == {name: rows for name, rows in before.items() if rows < 3}


def rows_of(text: str) -> dict[str, float]:
    """By replica."""
    return {
        sample.labels["replica"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "rtrain_rows_total"
    }


def test_metrics_come_without_those_of_a_replica_that_hangs(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    async def main() -> str:
        fleet = Fleet(monkeypatch, Serve(replicas=3), 3)
        monkeypatch.setattr(replica, "ANSWER_S", 0.05)
        await fleet.tell(folders[0])

        async def hangs() -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(fleet.every[1], "exposition", hangs)
        text: str = await asyncio.wait_for(fleet.every[0]._join_expositions(), 10)
        return text

    assert len(rows_of(asyncio.run(main()))) == 2
