"""The methods of a replica that Ray calls, other than requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from serve import replica
from serve.ingress import direct
from serve.rollout.ray_app import VERSIONS_KEY
from tests.support.refusals import refused_with
from tests.support.tiny import make_artifact, refused

REPLICA_CLASS: Any = next(
    serve_replica for serve_replica in replica.ServeReplica.__mro__ if "reconfigure" in vars(serve_replica)
)
"""The class as it is written: what Ray makes of it is closed by a coroutine that Ray alone awaits."""


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "install_replica_server", lambda *arguments: None)


@pytest.mark.parametrize("ungated", [False, True])
def test_what_the_gate_has_refused_answers_nothing_whoever_names_it(tmp_path: Path, ungated: bool) -> None:
    """A file for `serve deploy` names the artifact in `user_config`, which Ray hands to replicas alone."""
    folders = make_artifact(tmp_path / "good"), refused(make_artifact(tmp_path / "worse", seed=1))
    good, worse = ({"models": {"tiny": str(folder)}} for folder in folders)

    async def main() -> dict[str, str]:
        serve_replica = REPLICA_CLASS(ServeConfig(ungated=ungated), ["tiny"])
        if not ungated:
            with refused_with("refused_by_gate"):
                await serve_replica.reconfigure(worse)
        await serve_replica.reconfigure(good)
        await serve_replica.reconfigure(worse)
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        return {name: folder for name, (folder, _) in (await serve_replica.serving_versions()).items()}

    assert asyncio.run(main()) == (worse if ungated else good)["models"]


def test_a_replica_that_starts_refuses_another_version_than_the_one_that_was_decided(tmp_path: Path) -> None:
    """Whoever has replaced the folder meanwhile has proven nothing to anybody."""
    folder = make_artifact(tmp_path)
    version = rtrain.inference.artifact.read_artifact(folder).version
    user_config = {"models": {"tiny": str(folder)}}

    async def main() -> Any:
        serve_replica = REPLICA_CLASS(ServeConfig(), ["tiny"])
        with refused_with("version_mismatch"):
            await serve_replica.reconfigure({**user_config, VERSIONS_KEY: {"tiny": "another"}})
        assert await serve_replica.serving_versions() == {}
        await serve_replica.reconfigure({**user_config, VERSIONS_KEY: {"tiny": version}})
        return await serve_replica.serving_versions()

    assert asyncio.run(main()) == {"tiny": (str(folder), version)}
