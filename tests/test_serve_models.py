"""Several real (tiny) models behind one address: who answers which path, to whom, and what is counted of it."""

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import ray
import tritonclient.grpc
from fastapi import FastAPI
from tritonclient.grpc import service_pb2 as messages, service_pb2_grpc as interface
from tritonclient.utils import InferenceServerException

import rtrain.inference.artifact
from rtrain.config import Serve
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from serve.auth import api_keys, middleware
from serve.deployment import start
from serve.grpc import serving
from serve.ingress.address import free_address
from serve.model import Lasting
from serve.ray_config import APPLICATION
from serve.registry import Models, build_desk
from serve.rollout import admin_socket
from tests.refusals import refused_with
from tests.serving import refusal
from tests.test_serve_deployment import openvino_artifact
from tests.tiny import CORPUS, make_artifact

NAMES = ("mood", "topic")
QUESTION = {"inputs": CORPUS[0]}
INFER = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [CORPUS[0]]}]}
Check = Callable[[Models, httpx.AsyncClient], Coroutine[Any, Any, None]]


def named(folder: Path, name: str) -> Path:
    """The artefact, by that name."""
    made = rtrain.inference.artifact.read(folder)
    rtrain.inference.artifact.write(folder, replace(made, name=name), lambda *_: [row["logits"] for row in made.golden])
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(named(make_artifact(root / name, seed=seed), name)) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another version of the last one."""
    return str(named(make_artifact(tmp_path_factory.mktemp("second"), seed=2), NAMES[1]))


@pytest.fixture(scope="module")
def best(folders: dict[str, str]) -> dict[str, str]:
    """The label that each model gives to the question."""
    found = {name: Predictor.load(Path(folder), 1)([CORPUS[0]])[0][0] for name, folder in folders.items()}
    assert len({(one["label"], one["score"]) for one in found.values()}) == len(NAMES)
    return {name: one["label"] for name, one in found.items()}


def models_of(settings: Serve, names: tuple[str, ...] = NAMES) -> Models:
    door = middleware.door(settings)
    lasting = {name: Lasting(settings, door) for name in names}

    async def make(name: str, folder: Path) -> FastAPI:
        predictor = await asyncio.to_thread(Predictor.load, folder, 1)
        predictor.artifact = replace(predictor.artifact, name=name)
        return build_app(predictor, settings, lasting=lasting[name])

    return Models(lasting, make, functools.partial(build_desk, settings=settings, door=door))


def run(folders: dict[str, str], check: Check, settings: Serve | None = None) -> None:
    async def main() -> None:
        models = models_of(settings or Serve(), tuple(folders))
        await models.become(folders)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(models), base_url="http://localhost") as client:
            await check(models, client)
        for versions in models.versions.values():
            versions.close()

    asyncio.run(main())


def test_each_model_answers_under_its_name_as_if_it_were_alone(folders: dict[str, str], best: dict[str, str]) -> None:
    async def check(models: Models, client: httpx.AsyncClient) -> None:
        for name, folder in folders.items():
            version = rtrain.inference.artifact.read(Path(folder)).version
            answer = await client.post(f"/models/{name}/predict", json=QUESTION)
            assert answer.json()[0][0]["label"] == best[name]
            assert (answer.headers["x-model-name"], answer.headers["x-model-version"]) == (name, version)
            for path in (
                f"/v2/models/{name}",
                f"/v2/models/{name}/versions/{version}",
                f"/models/{name}/v2/models/{name}",
            ):
                infer = await client.post(f"{path}/infer", json=INFER)
                assert infer.json()["model_name"] == name
                assert infer.json()["outputs"][0]["data"] == [best[name]]
                assert (await client.get(f"{path}/ready")).json() == {"name": name, "ready": True}
                assert (await client.get(path)).json()["versions"] == [version]
            assert (await client.get(f"/models/{name}/info")).json()["name"] == name
            page = await client.get(f"/models/{name}", follow_redirects=True)
            assert (page.url.path, "<title>Try the model</title>" in page.text) == (f"/models/{name}/", True)
            document = (await client.get(f"/models/{name}/openapi.json")).json()
            assert "/predict" in document["paths"]
            assert document["servers"] == [{"url": f"/models/{name}"}]

    run(folders, check)


def test_the_address_tells_of_all_its_models(folders: dict[str, str]) -> None:
    async def check(models: Models, client: httpx.AsyncClient) -> None:
        index = (await client.post("/v2/repository/index")).json()
        versions = [rtrain.inference.artifact.read(Path(folder)).version for folder in folders.values()]
        assert [(one["name"], one["version"]) for one in index] == list(zip(NAMES, versions, strict=True))
        assert {one["state"] for one in index} == {"READY"}
        assert (await client.get("/v2/health/ready")).json() == {"ready": True}
        plain = await client.get("/v2")
        assert plain.json()["name"] == "rtrain"
        assert "x-model-name" not in plain.headers
        assert plain.headers["x-request-id"]
        assert "<title>Models</title>" in (await client.get("/")).text
        assert (await client.get("/models.js")).status_code == 200
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "/v2/repository/index" in paths
        assert "/predict" not in paths
        stalled = models.versions[NAMES[1]].current
        assert stalled is not None
        stalled.service.batcher.stalled_s = lambda: 1e9  # type: ignore[method-assign]
        ready = await client.get("/v2/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False})
        assert (await client.get(f"/v2/models/{NAMES[0]}/ready")).status_code == 200
        assert (await client.get(f"/v2/models/{NAMES[1]}/ready")).status_code == 503
        index = (await client.post("/v2/repository/index", json={"ready": True})).json()
        assert [one["name"] for one in index] == [NAMES[0]]
        del stalled.service.batcher.stalled_s

    run(folders, check)


def test_a_question_to_no_model_is_told_which_there_are(folders: dict[str, str]) -> None:
    async def check(models: Models, client: httpx.AsyncClient) -> None:
        asked = await client.post("/predict", json=QUESTION)
        assert refusal(asked) == (404, "not_found", None)
        assert "/models/NAME/predict, where NAME is mood or topic" in asked.text
        for path in ("/models/other", "/models/other/predict"):
            assert refusal(await client.get(path)) == (404, "not_found", "name")
        assert refusal(await client.post("/v2/models/other/infer", json=INFER)) == (404, "", "name")
        version = await client.post("/v2/models/mood/versions/other/infer", json=INFER)
        assert refusal(version) == (404, "", "version")
        # Each model's errors have the form of the path behind its name.
        assert refusal(await client.get("/models/mood/v2/nowhere"))[:2] == (404, "")
        assert (await client.get("/models/mood/nowhere")).json()["error"]["type"] == "not_found"
        assert (await client.get("/nowhere")).status_code == 404

    run(folders, check)


def test_one_model_alone_answers_at_the_root_and_under_its_name(folders: dict[str, str], best: dict[str, str]) -> None:
    async def check(models: Models, client: httpx.AsyncClient) -> None:
        for path in ("", "/models/mood"):
            answer = await client.post(f"{path}/predict", json=QUESTION)
            assert (answer.status_code, answer.json()[0][0]["label"]) == (200, best["mood"])
        other = await client.get("/v2/models/other")
        assert refusal(other) == (404, "", "name")
        assert (await client.get("/v2")).headers["x-model-name"] == "mood"
        metrics = (await client.get("/metrics")).text.splitlines()
        assert 'rtrain_rows_total{model="mood"} 2.0' in metrics

    run({"mood": folders["mood"]}, check)


def test_samples_say_whose_they_are(folders: dict[str, str]) -> None:
    async def check(models: Models, client: httpx.AsyncClient) -> None:
        for name, texts in (("mood", 1), ("topic", 3)):
            assert (await client.post(f"/models/{name}/predict", json={"inputs": ["a"] * texts})).status_code == 200
        await client.get("/v2/health/live")
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        for line in (
            'rtrain_rows_total{model="mood"} 1.0',
            'rtrain_rows_total{model="topic"} 3.0',
            'rtrain_requests_total{model="topic",route="/predict",status="200"} 1.0',
            'rtrain_requests_total{route="/v2/health/live",status="200"} 1.0',
        ):
            assert line in lines
        assert sum("# TYPE rtrain_requests_total counter" in line for line in lines) == 1

    run(folders, check)


def test_a_version_changes_beside_a_model_that_goes_on(folders: dict[str, str], second: str) -> None:
    old, new, other = (
        rtrain.inference.artifact.read(Path(one)).version for one in (folders["topic"], second, folders["mood"])
    )

    async def check(models: Models, client: httpx.AsyncClient) -> None:
        mood = models.versions["mood"].current
        await models.become({**folders, "topic": second})
        index = (await client.post("/v2/repository/index")).json()
        assert [one["version"] for one in index] == [other, new]
        assert models.versions["mood"].current is mood
        assert (await client.post(f"/v2/models/topic/versions/{old}/infer", json=INFER)).status_code == 404
        with refused_with("other_model"):
            await models.become({"topic": second})

    run(folders, check)


def test_a_key_may_be_limited_to_models(folders: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    limited = api_keys.add(path, "shop", ("predict",), models=("topic",))
    whole = api_keys.add(path, "desk")

    async def check(models: Models, client: httpx.AsyncClient) -> None:
        async def asked(key: str, url: str, **given: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client.request("POST" if given else "GET", url, headers=headers, **given)

        for name, status in (("topic", 200), ("mood", 403)):
            for url, body in ((f"/models/{name}/predict", QUESTION), (f"/v2/models/{name}/infer", INFER)):
                answer = await asked(limited, url, json=body)
                assert answer.status_code == status
                assert (await asked(whole, url, json=body)).status_code == 200
        for key, names in ((limited, ["topic"]), (whole, list(NAMES))):
            index = await asked(key, "/v2/repository/index", json={})
            assert [one["name"] for one in index.json()] == names
        assert (await asked(limited, "/models/mood")).status_code == 404
        assert (await asked(limited, "/metrics")).status_code == 403
        for path in ("/", "/models.js", "/models/mood/", "/models/mood/page.js"):
            assert (await client.get(path)).status_code == 200
        for path in ("/models/mood", "/models/mood/info", "/models/mood/nowhere", "/models/other"):
            assert (await client.get(path)).status_code == 401

    run(folders, check, Serve(keys=str(path)))


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_without_a_key_a_name_that_is_there_is_answered_like_one_that_is_not(
    folders: dict[str, str], names: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    api_keys.add(path, "shop")
    tails = [
        *("", "/", "/page.css", "/page.js", "/models.js", "/v2/health/live", "/v2/health/ready", "/info", "/metrics"),
        *("/predict", "/docs", "/openapi.json", "/nowhere", "/page.js/", "/models/mood/page.js"),
    ]

    async def check(models: Models, client: httpx.AsyncClient) -> None:
        for tail in tails:
            for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT"):
                for root in ("/models/", "/v2/models/"):
                    there, other = [await client.request(method, f"{root}{name}{tail}") for name in ("mood", "other")]
                    assert (there.status_code, there.content) == (other.status_code, other.content), (method, tail)
                    headers = [{**answer.headers, "x-request-id": ""} for answer in (there, other)]
                    assert headers[0] == headers[1], (method, tail)

    run({name: folders[name] for name in names}, check, Serve(keys=str(path)))


def test_over_grpc_each_is_asked_by_its_name(folders: dict[str, str], best: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    plain = api_keys.add(path, "shop", models=("topic",))
    settings = Serve(keys=str(path))
    tensor = messages.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(CORPUS[0].encode())

    async def main() -> None:
        models = models_of(settings)
        await models.become(folders)
        async with (
            serving(models, settings, 0) as port,
            serving(models, settings, 0, middleware.door(settings)) as locked,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{locked}") as asked_for_keys,
        ):
            stub = interface.GRPCInferenceServiceStub(channel)
            for name in NAMES:
                reply = await stub.ModelInfer(messages.ModelInferRequest(model_name=name, inputs=[tensor]))
                assert (reply.model_name, reply.raw_output_contents[0][4:]) == (name, best[name].encode())
                assert (await stub.ModelReady(messages.ModelReadyRequest(name=name))).ready
            assert (await stub.ServerReady(messages.ServerReadyRequest())).ready
            index = await stub.RepositoryIndex(messages.RepositoryIndexRequest())
            assert [one.name for one in index.models] == list(NAMES)
            for call, message in (
                (stub.ModelInfer, messages.ModelInferRequest(model_name="other", inputs=[tensor])),
                (stub.ModelMetadata, messages.ModelMetadataRequest(name="other")),
                (stub.ModelMetadata, messages.ModelMetadataRequest(name="mood", version="other")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as found:
                    await call(message)
                assert found.value.code() == grpc.StatusCode.NOT_FOUND
            stub = interface.GRPCInferenceServiceStub(asked_for_keys)
            metadata = (("authorization", f"Bearer {plain}"),)
            index = await stub.RepositoryIndex(messages.RepositoryIndexRequest(), metadata=metadata)
            assert [one.name for one in index.models] == ["topic"]
            for name, code in (("topic", None), ("mood", grpc.StatusCode.PERMISSION_DENIED)):
                call = stub.ModelInfer(messages.ModelInferRequest(model_name=name, inputs=[tensor]), metadata=metadata)
                if code is None:
                    assert (await call).model_name == name
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as found:
                        await call
                    assert found.value.code() == code
        for versions in models.versions.values():
            versions.close()

    asyncio.run(main())


@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_two_models_are_served_and_each_is_changed_by_itself(tmp_path: Path) -> None:
    port = free_address("127.0.0.1", 0).port
    first, topic, second = (
        named(openvino_artifact(tmp_path / str(seed), seed), name)
        for seed, name in enumerate(("mood", "topic", "topic"))
    )
    mood, old, new = (rtrain.inference.artifact.read(folder).version for folder in (first, topic, second))
    given = {"mood": first, "subject": topic}
    with (
        start(given, Serve(port=0, grpc_port=port, ungated=True)) as endpoint,
        httpx.Client(base_url=endpoint.url) as client,
    ):

        def versions() -> dict[str, str]:
            return {one["name"]: one["version"] for one in client.post("/v2/repository/index").json()}

        assert versions() == {"mood": mood, "subject": old}
        assert ray.serve.status().applications.keys() == {APPLICATION}
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as asking:
            assert [asking.is_model_ready(name) for name in ("mood", "subject")] == [True, True]
            with pytest.raises(InferenceServerException, match="NOT_FOUND"):
                asking.is_model_ready("topic")
        with refused_with("ambiguous"):
            endpoint.change({"rollback": True})
        with refused_with("unknown_name"):
            endpoint.change({"rollback": True, "model": "topic"})
        with refused_with("other_model"):
            endpoint.change({"update": str(second), "model": "mood"})
        assert endpoint.change({"update": str(second), "model": "subject"}) == f"{new} answers in place of {old}"
        assert versions() == {"mood": mood, "subject": new}
        assert client.post("/models/subject/predict", json=QUESTION).headers["x-model-version"] == new
        text = admin_socket.format_status(json.loads(endpoint.change({"status": True})))
        assert f"version    {mood} (1 of 1)" in text
        assert f"version    {new} (1 of 1)" in text
        assert endpoint.change({"rollback": True, "model": "subject"}) == f"{old} answers in place of {new}"
        assert versions() == {"mood": mood, "subject": old}
        [only] = json.loads(endpoint.change({"status": True, "model": "mood"}))["models"]
        assert (only["name"], only["replicas"][0]["version"]) == ("mood", mood)
