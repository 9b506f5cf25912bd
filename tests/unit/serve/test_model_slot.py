"""Two versions of a real (tiny) model in one process: what answers while one takes the other's place."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from rtrain.inference.artifact import ArtifactError
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from serve.batching.batcher import EngineError
from serve.registry import CanaryPlan, ModelSlot
from serve.schemas.predict import RequestError
from tests.support.refusals import refused_with
from tests.support.tiny import CORPUS, make_artifact

Check = Callable[[ModelSlot, httpx.AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("versions")
    first, second = (make_artifact(root / str(seed), seed=seed) for seed in (0, 1))
    return str(first), str(second)


async def make(folder: Path) -> ModelApp:
    return build_app(await asyncio.to_thread(Predictor.load, folder, 1), ServeConfig())


def run(check: Check) -> None:
    async def main() -> None:
        versions = ModelSlot(make)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(versions), base_url="http://localhost") as client:
            await check(versions, client)
        versions.drop_candidate()
        if versions.current is not None:
            versions.current.service.close()

    asyncio.run(main())


async def version(client: httpx.AsyncClient) -> str:
    answer = await client.post("/predict", json={"inputs": CORPUS[0]})
    assert answer.status_code == 200
    return answer.headers["x-model-version"]


def test_the_candidate_answers_nothing_until_the_switch(folders: tuple[str, str]) -> None:
    first, second = folders
    old, new = (rtrain.inference.artifact.read_artifact(Path(folder)).version for folder in folders)
    assert old != new

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        assert await versions.load_candidate(second) == new
        assert await version(client) == old
        await versions.switch_to(second)
        assert await version(client) == new
        assert versions.candidate is None
        await versions.switch_to(first)  # not loaded any more: loaded again
        assert await version(client) == old

    run(check)


def test_a_request_that_the_old_version_has_accepted_is_answered_by_it(folders: tuple[str, str]) -> None:
    first, second = folders
    old, new = (rtrain.inference.artifact.read_artifact(Path(folder)).version for folder in folders)

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        await versions.load_candidate(second)
        replaced = versions.current
        assert replaced is not None
        sent = asyncio.Event()

        async def body() -> Any:
            yield b'{"inputs": '
            sent.set()
            await asyncio.sleep(0.1)
            yield b'"hello"}'

        slow = asyncio.create_task(client.post("/predict", content=body()))
        await sent.wait()
        await versions.switch_to(second)
        assert replaced.active_requests == 1
        assert await version(client) == new
        answer = await slow
        assert (answer.status_code, answer.headers["x-model-version"]) == (200, old)
        assert replaced.active_requests == 0
        with pytest.raises(EngineError):  # its threads have ended with its last answer
            await replaced.service.batcher.submit(replaced.service.predictor.encode(["x"]), 1e9)

    run(check)


def test_a_damaged_candidate_changes_nothing(folders: tuple[str, str], tmp_path: Path) -> None:
    first, second = folders
    old = rtrain.inference.artifact.read_artifact(Path(first)).version
    damaged = shutil.copytree(second, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"x" + (damaged / "model.safetensors").read_bytes()[1:])

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        await versions.load_candidate(second)
        for change in (versions.load_candidate, versions.switch_to):
            with pytest.raises(ArtifactError):
                await change(str(damaged))
            assert versions.candidate is None
            assert await version(client) == old

    run(check)


def test_a_candidate_that_was_given_up_while_it_loaded_answers_nobody(folders: tuple[str, str]) -> None:
    """A rollout that has waited for a replica long enough tells all to drop it; the late one would begin its trial."""
    first, second = folders

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        answering = versions.current
        late = asyncio.create_task(versions.start_canary(CanaryPlan(second, 0.5, 1.25, 1.0)))
        while not versions._lock.locked():
            await asyncio.sleep(0)
        versions.drop_candidate()
        with refused_with("cancelled"):
            await late
        assert (versions.candidate, versions.shadow_test, versions.weight) == (None, None, 0.0)
        assert versions.current is answering
        await versions.start_canary(CanaryPlan(second, 0.5, 1.25, 1.0))  # asked for anew
        assert versions.shadow_test is not None

    run(check)


def test_what_was_decided_is_a_version_and_not_a_folder(folders: tuple[str, str], tmp_path: Path) -> None:
    old, new = (rtrain.inference.artifact.read_artifact(Path(folder)).version for folder in folders)
    place = shutil.copytree(folders[0], tmp_path / "served")

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        for change in (
            versions.load_candidate,
            versions.switch_to,
        ):  # of a replica that starts when it has been replaced
            with refused_with("version_mismatch"):
                await change(str(place), new)
            assert (versions.current, versions.candidate) == (None, None)
        await versions.switch_to(str(place), old)
        shutil.rmtree(place)
        shutil.copytree(folders[1], place)
        assert await versions.load_candidate(str(place), old) == await version(client) == old
        assert await versions.load_candidate(str(place), new) == new
        assert await version(client) == old
        await versions.switch_to(str(place), new)
        assert await version(client) == new

    run(check)


def test_a_wish_that_was_taken_back_while_it_was_loaded_is_not_carried_out(folders: tuple[str, str]) -> None:
    first, second = folders

    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        await versions.switch_to(first)
        old = await version(client)
        for wishes in ([second, first], [second, first, second, first]):
            await asyncio.gather(*(versions.switch_to(folder) for folder in wishes))
            assert await version(client) == old
            assert versions.candidate is None
        await asyncio.gather(*(versions.switch_to(folder) for folder in (second, first, second)))
        assert await version(client) != old

    run(check)


def test_before_the_first_version_there_is_no_answer() -> None:
    async def check(versions: ModelSlot, client: httpx.AsyncClient) -> None:
        with pytest.raises(RequestError) as refused, versions.service_for(""):
            pass
        assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "1"})
        with pytest.raises(RequestError):  # over HTTP the registry has an answer
            await client.get("/v2")

    run(check)
