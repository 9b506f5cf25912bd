"""What a replica is asked by Ray, beside its requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rtrain.inference.artifact
from rtrain.config import Serve
from serve import replica
from serve.ingress import direct
from serve.rollout.ray_app import VERSIONS
from tests.refusals import refused_with
from tests.tiny import make_artifact, refused

OWN: Any = next(one for one in replica.Replica.__mro__ if "reconfigure" in vars(one))
"""The class as it is written: what Ray makes of it is closed by a coroutine that Ray alone awaits."""


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "install", lambda *given: None)


@pytest.mark.parametrize("ungated", [False, True])
def test_what_the_gate_has_refused_answers_nothing_whoever_names_it(tmp_path: Path, ungated: bool) -> None:
    """A file for `serve deploy` names the artefact in `user_config`, which Ray hands to replicas alone."""
    folders = make_artifact(tmp_path / "good"), refused(make_artifact(tmp_path / "worse", seed=1))
    good, worse = ({"models": {"tiny": str(folder)}} for folder in folders)

    async def main() -> dict[str, str]:
        one = OWN(Serve(ungated=ungated), ["tiny"])
        if not ungated:
            with refused_with("refused_by_gate"):
                await one.reconfigure(worse)
        await one.reconfigure(good)
        await one.reconfigure(worse)
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        return {name: folder for name, (folder, _) in (await one.serves()).items()}

    assert asyncio.run(main()) == (worse if ungated else good)["models"]


def test_a_replica_that_starts_refuses_another_version_than_the_one_that_was_decided(tmp_path: Path) -> None:
    """Whoever has replaced the folder meanwhile has proven nothing to anybody."""
    folder = make_artifact(tmp_path)
    version = rtrain.inference.artifact.read(folder).version
    wish = {"models": {"tiny": str(folder)}}

    async def main() -> Any:
        one = OWN(Serve(), ["tiny"])
        with refused_with("other_version"):
            await one.reconfigure({**wish, VERSIONS: {"tiny": "another"}})
        assert await one.serves() == {}
        await one.reconfigure({**wish, VERSIONS: {"tiny": version}})
        return await one.serves()

    assert asyncio.run(main()) == {"tiny": (str(folder), version)}
