"""How many replicas a machine gets where nobody has said it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from serve import launcher, replica
from serve.ingress import direct
from serve.launcher import HostCapacity
from serve.rollout.controller import VERSIONS_KEY
from tests.support.refusals import refused_with
from tests.support.tiny import make_artifact, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    (folder / "model.int8.bin").write_bytes(bytes(20_000_000))
    return folder


@pytest.mark.parametrize(
    ("host", "number", "line"),
    [
        (HostCapacity(1, 8000), 1, ""),
        (HostCapacity(2, 24_000), 1, ""),
        (HostCapacity(3, 24_000), 2, "2 replicas, by 3 cores (serve.replicas)"),
        (HostCapacity(4, 24_000), 3, "3 replicas, by 4 cores (serve.replicas)"),
        (HostCapacity(64, 240_000), 4, "4 replicas, by 64 cores (serve.replicas)"),
        (HostCapacity(64, 2_000), 2, "2 replicas, by 64 cores and 2.0 GB of free memory (serve.replicas)"),
        (HostCapacity(64, 100), 1, "1 replica, by 64 cores and 0.1 GB of free memory (serve.replicas)"),
        (HostCapacity(64, 240_000, is_multi_node=True), 1, ""),
    ],
)
def test_a_core_each_beside_haproxy_s_as_far_as_memory_goes(
    folder: Path, host: HostCapacity, number: int, line: str
) -> None:
    messages: list[str] = []
    settings = launcher.resolve_replicas(ServeConfig(), [folder], host, messages.append)
    assert (settings.replicas, "".join(messages)) == (number, line)


def replicas(settings: ServeConfig, folders: list[Path], host: HostCapacity) -> int | None:
    return launcher.resolve_replicas(settings, folders, host, lambda line: None).replicas


@pytest.mark.parametrize(
    ("options", "number"), [({"replicas": 7}, 7), ({"max_replicas": 3}, 1), ({"threads": 4}, 3), ({"threads": 32}, 1)]
)
def test_what_is_said_counts_and_what_it_leaves_open_is_in_keeping(
    folder: Path, options: dict[str, Any], number: int
) -> None:
    assert replicas(ServeConfig(**options), [folder], HostCapacity(16, 1e6)) == number


def test_several_models_have_engines_and_memory_of_their_own(folder: Path) -> None:
    assert replicas(ServeConfig(), [folder] * 3, HostCapacity(8, 1e6)) == 2
    assert replicas(ServeConfig(), [folder] * 3, HostCapacity(16, 3_000)) == 1


def test_a_graph_that_keeps_plans_by_shape_needs_memory_for_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.int8.bin").read_bytes())
    assert replicas(ServeConfig(), [tmp_path], HostCapacity(64, 1_000)) == 2
    assert replicas(ServeConfig(), [folder], HostCapacity(64, 1_000)) == 1


REPLICA_CLASS: Any = next(
    serve_replica for serve_replica in replica.ServeReplica.__mro__ if "reconfigure" in vars(serve_replica)
)
"""The class as it is written: what Ray makes of it is closed by a coroutine that Ray alone awaits."""


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "install_replica_server", lambda *arguments: None)


@pytest.mark.usefixtures("without_ray")
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


@pytest.mark.usefixtures("without_ray")
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
