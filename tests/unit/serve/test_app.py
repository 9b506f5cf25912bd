"""The application in this process, with a real (tiny) model: replies, the page, OpenAPI, metrics."""

import asyncio
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rtrain.config import ServeConfig
from rtrain.core import manifest
from rtrain.inference import artifact
from rtrain.inference.artifact import ArtifactError
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from serve.auth import api_keys
from serve.batching.scheduler import bucket_length
from tests.support import serving
from tests.support.serving import HEADS, INFER, LABELS, TEXT, Gate, call, client, predict, predictor_of, scores, tensor
from tests.support.tiny import CORPUS, make_artifact, make_task_artifact

jsonschema: Any = importlib.import_module("jsonschema")  # Ray's own dependency; it comes without types

app, gate, predictor = serving.app, serving.gate, serving.predictor  # fixtures

# ------------------------------------------------------------------------------------------------------------- answers


def test_texts_are_answered_in_order_with_all_labels_best_first(app: FastAPI, predictor: Predictor) -> None:
    answer = predict(app, list(CORPUS))
    assert len(answer) == len(CORPUS)
    for prediction, expected in zip(answer, predictor(CORPUS), strict=True):
        assert [score["label"] for score in prediction] == [score["label"] for score in expected]
        assert [score["score"] for score in prediction] == pytest.approx(
            [score["score"] for score in expected], abs=1e-5
        )
        assert sum(score["score"] for score in prediction) == pytest.approx(1)


def test_of_many_labels_a_hundred_are_answered_by_default(tmp_path: Path) -> None:
    labels = tuple(f"{number:03}" for number in range(130))
    app = build_app(Predictor.load(make_artifact(tmp_path / "artifact", labels), threads=1), ServeConfig())
    [everything] = predict(app, TEXT, top_k=130)
    assert len(everything) == 130
    assert predict(app, TEXT) == [everything[:100]]
    document = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}],
        "outputs": [{"name": "labels"}],
    }
    reply = call(app, "POST", "/v2/models/tiny/infer", json=document).json()
    assert reply["outputs"][0]["data"] == [entry["label"] for entry in everything[:100]]


def test_top_k_limits_the_labels(app: FastAPI) -> None:
    everything = predict(app, TEXT)
    assert predict(app, TEXT, top_k=1) == [everything[0][:1]]
    assert predict(app, TEXT, top_k=99) == everything
    response = call(app, "POST", "/predict", json={"inputs": TEXT, "parameters": {"top_k": None}})
    assert response.json() == everything


def test_a_pair_is_answered_as_a_pair_and_its_neighbours_as_singles(app: FastAPI, predictor: Predictor) -> None:
    pair = {"text": TEXT, "text_pair": "at the door"}
    separate_answers = [
        predict(app, inputs)[0] for inputs in (TEXT, pair, {"text": CORPUS[1]}, {"text": TEXT, "text_pair": None})
    ]
    together = predict(app, [TEXT, pair, {"text": CORPUS[1]}, {"text": TEXT, "text_pair": None}])
    assert scores(together) == pytest.approx(scores(separate_answers), abs=1e-5)
    assert scores([separate_answers[0]]) != pytest.approx(scores([separate_answers[1]]), abs=1e-3)
    assert separate_answers[0] == separate_answers[3]


def neighbours() -> list[str]:
    return [" ".join(CORPUS[number % len(CORPUS)].split()[: 1 + number]) for number in range(15)]


def test_an_answer_does_not_depend_on_other_requests_in_its_engine_call(predictor: Predictor, gate: Gate) -> None:
    app = build_app(predictor, ServeConfig())
    queue = app.state.service.batcher
    neighbor_requests = neighbours()
    texts = [*neighbor_requests[:7], TEXT, *neighbor_requests[7:]]

    async def main() -> list[httpx.Response]:
        async with client(app) as session:
            first = asyncio.create_task(session.post("/predict", json={"inputs": TEXT}))
            await gate.entered()
            tasks = [asyncio.create_task(session.post("/predict", json={"inputs": text})) for text in texts]
            while queue.queued_rows < len(texts):
                await asyncio.sleep(0.001)
            gate.open()
            return await asyncio.gather(first, *tasks)

    first_answer, *together = asyncio.run(main())
    assert [response.status_code for response in together] == [200] * 16
    assert scores([together[7].json()[0]]) == pytest.approx(scores(first_answer.json()), abs=1e-5)
    buckets = {bucket_length(len(row.ids)) for row in predictor.encode(texts)}
    assert queue.stats.calls == 1 + len(buckets) == 3


def test_no_app_without_the_golden_answers(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path, LABELS)
    document = json.loads((folder / "artifact.json").read_text())
    document["golden"][0]["logits"][0] += 1
    (folder / "artifact.json").write_text(json.dumps(document))
    manifest.write_manifest(folder)
    with pytest.raises(ArtifactError):
        Predictor.load(folder, threads=1)


# ---------------------------------------------------------------------------------------------- page, OpenAPI, metrics


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1", 200), ("localhost", 200), ("::1", 200), ("0.0.0.0", 404), ("example.org", 404)]
)
def test_docs_are_for_loopback_only(predictor: Predictor, host: str, status: int) -> None:
    app = build_app(predictor, ServeConfig(host=host))
    assert [call(app, "GET", path).status_code for path in ("/docs", "/redoc")] == [status, 404]
    assert call(app, "GET", "/openapi.json").status_code == 200


def test_the_openapi_document_describes_every_route_and_its_bodies(app: FastAPI) -> None:
    document = call(app, "GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {path: sorted(methods) for path, methods in document["paths"].items()} == {
        "/": ["get"],
        "/info": ["get"],
        "/metrics": ["get"],
        "/page.css": ["get"],
        "/page.js": ["get"],
        "/predict": ["post"],
        "/v2": ["get"],
        "/v2/health/live": ["get"],
        "/v2/health/ready": ["get"],
        "/v2/models/{name}": ["get"],
        "/v2/models/{name}/infer": ["post"],
        "/v2/models/{name}/ready": ["get"],
        "/v2/models/{name}/versions/{version}": ["get"],
        "/v2/models/{name}/versions/{version}/infer": ["post"],
        "/v2/models/{name}/versions/{version}/ready": ["get"],
        "/v2/repository/index": ["post"],
    }
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    references = [value for key, value in walk(document) if key == "$ref"]
    assert references
    schemas = document["components"]["schemas"]
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(schemas)
    assert "HTTPValidationError" not in schemas
    for described in schemas.values():
        jsonschema.Draft202012Validator.check_schema(described)
    examples: list[tuple[str, Any]] = [
        ("PredictRequest", {"inputs": [TEXT, {"text": TEXT, "text_pair": None}], "parameters": {"top_k": 1}}),
        ("PredictReply", predict(app, TEXT)),
        ("InferRequest", {"inputs": [tensor([TEXT], [1])]}),
        ("InferReply", call(app, "POST", INFER, json={"inputs": [tensor([TEXT], [1])]}).json()),
        ("ModelMetadata", call(app, "GET", "/v2/models/tiny").json()),
        ("IndexRequest", {"ready": True}),
        ("RepositoryIndex", call(app, "POST", "/v2/repository/index").json()),
        ("ModelInfo", call(app, "GET", "/info").json()),
        ("ErrorReply", call(app, "GET", "/nowhere").json()),
        ("InferError", call(app, "GET", "/v2/models/other").json()),
    ]
    for name, example in examples:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.validate(example, schema, jsonschema.Draft202012Validator)


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield str(key), child
        yield from walk(child)


def test_metrics_count_requests_rows_and_calls(predictor: Predictor) -> None:
    app = build_app(predictor, ServeConfig(max_batch_size=2))
    predict(app, [TEXT, TEXT, TEXT])
    call(app, "POST", "/predict", content=b"{")
    call(app, "GET", "/nowhere")
    call(app, "GET", "/also/nowhere")
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    for line in (
        'rtrain_requests_total{model="tiny",route="/predict",status="200"} 1.0',
        'rtrain_requests_total{model="tiny",route="/predict",status="400"} 1.0',
        'rtrain_requests_total{model="tiny",route="other",status="404"} 2.0',
        'rtrain_request_duration_seconds_count{model="tiny",route="/predict"} 2.0',
        'rtrain_inputs_total{model="tiny"} 3.0',
        'rtrain_batch_size_bucket{le="1.0",model="tiny"} 1.0',
        'rtrain_batch_size_bucket{le="2.0",model="tiny"} 2.0',
        'rtrain_batch_size_sum{model="tiny"} 3.0',
        'rtrain_queued_inputs{model="tiny"} 0.0',
        'rtrain_queued_tokens{model="tiny"} 0.0',
    ):
        assert line in lines
    for name in ("rtrain_engine_seconds_total", "rtrain_engine_tokens_total"):
        assert [float(line.split()[1]) > 0 for line in lines if line.startswith(f'{name}{{model="tiny"}} ')] == [True]


def test_masks_whose_answer_would_be_gigabytes_are_refused(tmp_path: Path) -> None:
    """It has the whole text for each word of each mask."""
    app = build_app(predictor_of(tmp_path / "words", "masked_lm"), ServeConfig())
    text = "[MASK] " + "x" * 100_000
    answer = call(app, "POST", "/predict", json={"inputs": text, "parameters": {"top_k": 200}})
    assert (answer.status_code, answer.json()["error"]["field"]) == (413, "parameters.top_k")
    assert "20,001,400 characters long in all; 5,000,000 are the most" in answer.json()["error"]["message"]
    assert call(app, "POST", "/predict", json={"inputs": [text] * 11}).status_code == 413
    assert call(app, "POST", "/predict", json={"inputs": text}).status_code == 200
    assert call(app, "POST", "/predict", json={"inputs": "a [MASK]", "parameters": {"top_k": 10**9}}).status_code == 200


def test_a_model_that_was_trained_on_pairs_names_both_tensors(tmp_path: Path) -> None:
    head = HEADS["classification"]
    folder = make_task_artifact(tmp_path / "pairs", "classification", head, data={"text": "one", "text_pair": "two"})
    app = build_app(Predictor.load(folder, threads=1), ServeConfig())
    names = [
        model_input["name"]
        for model_input in call(app, "GET", f"/v2/models/{artifact.read_artifact(folder).name}").json()["inputs"]
    ]
    assert names == call(app, "GET", "/info").json()["fields"] == ["text", "text_pair"]


def test_who_has_no_key_learns_no_model_s_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = api_keys.add_key(path, "shop")
    app = build_app(predictor_of(tmp_path / "model", "classification"), ServeConfig(keys=str(path)))
    auth_headers = {"authorization": f"Bearer {key}"}
    for place, asks in (("/", False), ("/v2", True), ("/v2/health/live", False), ("/info", True)):
        without_key, with_key = (
            call(app, "GET", place, headers=request_headers).headers for request_headers in ({}, auth_headers)
        )
        assert ("x-model-name" in without_key, "x-model-name" in with_key) == (False, asks)
        assert "x-request-id" in without_key
