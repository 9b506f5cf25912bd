"""Several real (tiny) models behind one address: routing, authorization, counters."""

import asyncio
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
from tritonclient.grpc import service_pb2 as messages, service_pb2_grpc as interface
from tritonclient.utils import InferenceServerException

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve import middleware
from serve.auth import api_keys
from serve.deployment import start_endpoint
from serve.grpc import serve_grpc
from serve.ingress.address import find_free_address
from serve.ray_config import APPLICATION_NAME
from serve.registry import ModelRegistry
from serve.rollout import admin_socket
from serve.standalone import build_model_registry
from tests.serve.test_deployment import openvino_artifact
from tests.support.refusals import refused_with
from tests.support.serving import refusal
from tests.support.tiny import CORPUS, make_artifact

NAMES = ("mood", "topic")
QUESTION = {"inputs": CORPUS[0]}
INFER = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [CORPUS[0]]}]}
Check = Callable[[ModelRegistry, httpx.AsyncClient], Coroutine[Any, Any, None]]


def make_named_artifact(folder: Path, name: str) -> Path:
    """The artifact, by that name."""
    model_artifact = rtrain.inference.artifact.read_artifact(folder)
    rtrain.inference.artifact.write_artifact(
        folder, replace(model_artifact, name=name), lambda *_: [row["logits"] for row in model_artifact.golden]
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(make_named_artifact(make_artifact(root / name, seed=seed), name)) for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another version of the last one."""
    return str(make_named_artifact(make_artifact(tmp_path_factory.mktemp("second"), seed=2), NAMES[1]))


@pytest.fixture(scope="module")
def best(folders: dict[str, str]) -> dict[str, str]:
    """The label that each model gives to the question."""
    best_entries = {name: Predictor.load(Path(folder), 1)([CORPUS[0]])[0][0] for name, folder in folders.items()}
    assert len({(entry["label"], entry["score"]) for entry in best_entries.values()}) == len(NAMES)
    return {name: entry["label"] for name, entry in best_entries.items()}


def run(folders: dict[str, str], check: Check, settings: ServeConfig | None = None) -> None:
    async def main() -> None:
        models = build_model_registry(settings or ServeConfig(), folders)
        await models.apply(folders)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(models), base_url="http://localhost") as client:
            await check(models, client)
        for versions in models.slots.values():
            versions.close()

    asyncio.run(main())


@pytest.mark.parametrize("names", [NAMES[:1], NAMES], ids=["one model", "two models"])
def test_before_the_first_artifact_is_loaded_a_model_answers_503_in_the_form_of_errors(names: tuple[str, ...]) -> None:
    message = "no model is loaded yet; try again in a moment"

    async def main() -> None:
        models = build_model_registry(ServeConfig(), names)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(models), base_url="http://localhost") as client:
            answer = await client.post(f"/models/{NAMES[0]}/predict", json=QUESTION, headers={"x-request-id": "mine"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.headers["x-request-id"] == "mine"
            assert answer.json()["error"]["message"] == message
            answer = await client.post(f"/v2/models/{NAMES[0]}/infer", json=INFER)
            assert (answer.status_code, answer.json()) == (503, {"error": message})
            if len(names) == 1:
                assert (await client.post("/predict", json=QUESTION)).status_code == 503
            foreign = await client.post(f"/models/{NAMES[0]}/predict", json=QUESTION, headers={"host": "evil.example"})
            assert foreign.status_code == 421
        assert 'status="503"' in models.render_metrics()

    asyncio.run(main())


def test_each_model_answers_under_its_name_as_if_it_were_alone(folders: dict[str, str], best: dict[str, str]) -> None:
    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        for name, folder in folders.items():
            version = rtrain.inference.artifact.read_artifact(Path(folder)).version
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
    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        index = (await client.post("/v2/repository/index")).json()
        versions = [rtrain.inference.artifact.read_artifact(Path(folder)).version for folder in folders.values()]
        assert [(entry["name"], entry["version"]) for entry in index] == list(zip(NAMES, versions, strict=True))
        assert {entry["state"] for entry in index} == {"READY"}
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
        stalled = models.slots[NAMES[1]].current
        assert stalled is not None
        stalled.service.batcher.current_call_s = lambda: 1e9  # type: ignore[method-assign]
        ready = await client.get("/v2/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False})
        assert (await client.get(f"/v2/models/{NAMES[0]}/ready")).status_code == 200
        assert (await client.get(f"/v2/models/{NAMES[1]}/ready")).status_code == 503
        index = (await client.post("/v2/repository/index", json={"ready": True})).json()
        assert [entry["name"] for entry in index] == [NAMES[0]]
        del stalled.service.batcher.current_call_s

    run(folders, check)


def test_a_question_to_no_model_is_told_which_there_are(folders: dict[str, str]) -> None:
    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        reply = await client.post("/predict", json=QUESTION)
        assert refusal(reply) == (404, "not_found", None)
        assert "/models/NAME/predict, where NAME is mood or topic" in reply.text
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
    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        for path in ("", "/models/mood"):
            answer = await client.post(f"{path}/predict", json=QUESTION)
            assert (answer.status_code, answer.json()[0][0]["label"]) == (200, best["mood"])
        other = await client.get("/v2/models/other")
        assert refusal(other) == (404, "", "name")
        assert (await client.get("/v2")).headers["x-model-name"] == "mood"
        metrics = (await client.get("/metrics")).text.splitlines()
        assert 'rtrain_inputs_total{model="mood"} 2.0' in metrics

    run({"mood": folders["mood"]}, check)


def test_samples_say_whose_they_are(folders: dict[str, str]) -> None:
    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        for name, texts in (("mood", 1), ("topic", 3)):
            assert (await client.post(f"/models/{name}/predict", json={"inputs": ["a"] * texts})).status_code == 200
        await client.get("/v2/health/live")
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        for line in (
            'rtrain_inputs_total{model="mood"} 1.0',
            'rtrain_inputs_total{model="topic"} 3.0',
            'rtrain_requests_total{model="topic",route="/predict",status="200"} 1.0',
            'rtrain_requests_total{route="/v2/health/live",status="200"} 1.0',
        ):
            assert line in lines
        assert sum("# TYPE rtrain_requests_total counter" in line for line in lines) == 1

    run(folders, check)


def test_a_version_changes_beside_a_model_that_goes_on(folders: dict[str, str], second: str) -> None:
    old, new, other = (
        rtrain.inference.artifact.read_artifact(Path(entry)).version
        for entry in (folders["topic"], second, folders["mood"])
    )

    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        mood = models.slots["mood"].current
        await models.apply({**folders, "topic": second})
        index = (await client.post("/v2/repository/index")).json()
        assert [entry["version"] for entry in index] == [other, new]
        assert models.slots["mood"].current is mood
        assert (await client.post(f"/v2/models/topic/versions/{old}/infer", json=INFER)).status_code == 404
        with refused_with("model_mismatch"):
            await models.apply({"topic": second})

    run(folders, check)


def test_a_key_may_be_limited_to_models(folders: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    limited = api_keys.add_key(path, "shop", ("predict",), models=("topic",))
    unlimited_key = api_keys.add_key(path, "desk")

    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        async def send_request(key: str, url: str, **options: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client.request("POST" if options else "GET", url, headers=headers, **options)

        for name, status in (("topic", 200), ("mood", 403)):
            for url, body in ((f"/models/{name}/predict", QUESTION), (f"/v2/models/{name}/infer", INFER)):
                answer = await send_request(limited, url, json=body)
                assert answer.status_code == status
                assert (await send_request(unlimited_key, url, json=body)).status_code == 200
        for key, names in ((limited, ["topic"]), (unlimited_key, list(NAMES))):
            index = await send_request(key, "/v2/repository/index", json={})
            assert [entry["name"] for entry in index.json()] == names
        assert (await send_request(limited, "/models/mood")).status_code == 404
        assert (await send_request(limited, "/metrics")).status_code == 403
        for path in ("/", "/models.js", "/models/mood/", "/models/mood/page.js"):
            assert (await client.get(path)).status_code == 200
        for path in ("/models/mood", "/models/mood/info", "/models/mood/nowhere", "/models/other"):
            assert (await client.get(path)).status_code == 401

    run(folders, check, ServeConfig(keys=str(path)))


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_without_a_key_a_name_that_is_there_is_answered_like_one_that_is_not(
    folders: dict[str, str], names: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    api_keys.add_key(path, "shop")
    tails = [
        *("", "/", "/page.css", "/page.js", "/models.js", "/v2/health/live", "/v2/health/ready", "/info", "/metrics"),
        *("/predict", "/docs", "/openapi.json", "/nowhere", "/page.js/", "/models/mood/page.js"),
    ]

    async def check(models: ModelRegistry, client: httpx.AsyncClient) -> None:
        for tail in tails:
            for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT"):
                for root in ("/models/", "/v2/models/"):
                    mood, other = [await client.request(method, f"{root}{name}{tail}") for name in ("mood", "other")]
                    assert (mood.status_code, mood.content) == (other.status_code, other.content), (method, tail)
                    headers = [{**answer.headers, "x-request-id": ""} for answer in (mood, other)]
                    assert headers[0] == headers[1], (method, tail)

    run({name: folders[name] for name in names}, check, ServeConfig(keys=str(path)))


def test_over_grpc_each_is_asked_by_its_name(folders: dict[str, str], best: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    plain = api_keys.add_key(path, "shop", models=("topic",))
    settings = ServeConfig(keys=str(path))
    tensor = messages.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(CORPUS[0].encode())

    async def main() -> None:
        models = build_model_registry(settings, NAMES)
        await models.apply(folders)
        async with (
            serve_grpc(models, settings, 0) as port,
            serve_grpc(models, settings, 0, middleware.make_authenticator(settings)) as locked,
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
            assert [entry.name for entry in index.models] == list(NAMES)
            for call, message in (
                (stub.ModelInfer, messages.ModelInferRequest(model_name="other", inputs=[tensor])),
                (stub.ModelMetadata, messages.ModelMetadataRequest(name="other")),
                (stub.ModelMetadata, messages.ModelMetadataRequest(name="mood", version="other")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call(message)
                assert error.value.code() == grpc.StatusCode.NOT_FOUND
            stub = interface.GRPCInferenceServiceStub(asked_for_keys)
            metadata = (("authorization", f"Bearer {plain}"),)
            index = await stub.RepositoryIndex(messages.RepositoryIndexRequest(), metadata=metadata)
            assert [entry.name for entry in index.models] == ["topic"]
            for name, code in (("topic", None), ("mood", grpc.StatusCode.PERMISSION_DENIED)):
                call = stub.ModelInfer(messages.ModelInferRequest(model_name=name, inputs=[tensor]), metadata=metadata)
                if code is None:
                    assert (await call).model_name == name
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        await call
                    assert error.value.code() == code
        for versions in models.slots.values():
            versions.close()

    asyncio.run(main())


@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_two_models_are_served_and_each_is_changed_by_itself(tmp_path: Path) -> None:
    port = find_free_address("127.0.0.1", 0).port
    first, topic, second = (
        make_named_artifact(openvino_artifact(tmp_path / str(seed), seed), name)
        for seed, name in enumerate(("mood", "topic", "topic"))
    )
    mood, old, new = (rtrain.inference.artifact.read_artifact(folder).version for folder in (first, topic, second))
    renamed_folders = {"mood": first, "subject": topic}
    with (
        start_endpoint(renamed_folders, ServeConfig(port=0, grpc_port=port, ungated=True)) as endpoint,
        httpx.Client(base_url=endpoint.url) as client,
    ):

        def versions() -> dict[str, str]:
            return {entry["name"]: entry["version"] for entry in client.post("/v2/repository/index").json()}

        assert versions() == {"mood": mood, "subject": old}
        assert ray.serve.status().applications.keys() == {APPLICATION_NAME}
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as asking:
            assert [asking.is_model_ready(name) for name in ("mood", "subject")] == [True, True]
            with pytest.raises(InferenceServerException, match="NOT_FOUND"):
                asking.is_model_ready("topic")
        with refused_with("ambiguous"):
            endpoint.handle_command({"rollback": True})
        with refused_with("unknown_name"):
            endpoint.handle_command({"rollback": True, "model": "topic"})
        with refused_with("model_mismatch"):
            endpoint.handle_command({"update": str(second), "model": "mood"})
        assert (
            endpoint.handle_command({"update": str(second), "model": "subject"}) == f"{new} answers in place of {old}"
        )
        assert versions() == {"mood": mood, "subject": new}
        assert client.post("/models/subject/predict", json=QUESTION).headers["x-model-version"] == new
        text = admin_socket.format_status(json.loads(endpoint.handle_command({"status": True})))
        assert f"version    {mood} (1 of 1)" in text
        assert f"version    {new} (1 of 1)" in text
        assert endpoint.handle_command({"rollback": True, "model": "subject"}) == f"{old} answers in place of {new}"
        assert versions() == {"mood": mood, "subject": old}
        [only] = json.loads(endpoint.handle_command({"status": True, "model": "mood"}))["models"]
        assert (only["name"], only["replicas"][0]["version"]) == ("mood", mood)
