"""The application in this process, with a real (tiny) model: replies, the page, OpenAPI, metrics."""

import asyncio
import importlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rtrain.config import ServeConfig
from rtrain.core import manifest
from rtrain.core.ragged import EncodedRow, Outputs
from rtrain.inference import artifact
from rtrain.inference.artifact import ArtifactError
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from serve.auth import api_keys
from serve.batching.scheduler import bucket_length
from tests.support.serving import (
    HEADS,
    INFER,
    LABELS,
    TEXT,
    Gate,
    call,
    client,
    predict,
    predictor_of,
    refusal,
    scores,
    tensor,
)
from tests.support.tiny import CORPUS, make_artifact, make_task_artifact

jsonschema: Any = importlib.import_module("jsonschema")  # Ray's own dependency; it comes without types

# ------------------------------------------------------------------------------------------------------------- answers


def test_texts_are_answered_in_order_with_all_labels_best_first(app: ModelApp, predictor: Predictor) -> None:
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


def test_top_k_limits_the_labels(app: ModelApp) -> None:
    everything = predict(app, TEXT)
    assert predict(app, TEXT, top_k=1) == [everything[0][:1]]
    assert predict(app, TEXT, top_k=99) == everything
    response = call(app, "POST", "/predict", json={"inputs": TEXT, "parameters": {"top_k": None}})
    assert response.json() == everything


def test_a_pair_is_answered_as_a_pair_and_its_neighbours_as_singles(app: ModelApp, predictor: Predictor) -> None:
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
    queue = app.service.batcher
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


def test_the_openapi_document_describes_every_route_and_its_bodies(app: ModelApp) -> None:
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


def test_a_request_is_read_as_the_rows_of_the_training(tmp_path: Path) -> None:
    data = {"text": ["subject", "body"], "features": ["channel", "product"], "strip_html": True}
    folder = make_task_artifact(tmp_path / "model", "classification", HEADS["classification"], data=data)
    app = build_app(Predictor.load(folder, threads=1), ServeConfig())
    written = f"channel: mail\nproduct: card\n{TEXT}"
    features = {"product": "card", "channel": "mail"}
    request = {"text": f"<p>{TEXT}</p><script>x</script>", "features": features}
    assert predict(app, request) == predict(app, written) != predict(app, TEXT)
    assert predict(app, f"<p>{TEXT}</p>") == predict(app, TEXT)
    assert call(app, "GET", "/info").json()["columns"]["text"] == "subject and body"
    for wrong in ({"color": "red"}, {"channel": 5}, "mail"):
        reply = call(app, "POST", "/predict", json={"inputs": ["a", {"text": "b", "features": wrong}]})
        assert reply.status_code == 422
        assert reply.json()["error"]["field"].startswith("inputs.1")
    for blank in ("<p></p>", {"text": "<p></p>", "features": features}):
        assert call(app, "POST", "/predict", json={"inputs": blank}).status_code == 422
    long = {"text": "a", "features": {"channel": "x" * 2_000_000}}
    assert call(app, "POST", "/predict", json={"inputs": long}).status_code == 413


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


@pytest.mark.parametrize("declared", [None, "10", "0"])
def test_the_body_is_cut_off_at_its_limit_whatever_length_it_declares(app: ModelApp, declared: str | None) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 100_000
            yield b" " * 100_000

    headers = {} if declared is None else {"content-length": declared}
    response = call(app, "POST", "/predict", content=endless(), headers=headers)
    assert refusal(response) == (413, "too_large", None)
    assert sent <= 1_200_000


def test_an_unexpected_error_is_logged_and_answered_without_internals(
    app: ModelApp, predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise LookupError("/secret/path")

    monkeypatch.setattr(predictor.task, "decode", broken)
    response = call(app, "POST", "/predict", json={"inputs": TEXT}, headers={"x-request-id": "mine"})
    assert refusal(response) == (500, "internal", None)
    assert "secret" not in response.text
    assert response.headers["x-model-name"] == "tiny"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert [
        (record.levelno, record.getMessage()) for record in caplog.records if record.name == "serve.middleware"
    ] == [(logging.ERROR, "unexpected error in POST '/predict' (request mine)")]
    assert "/secret/path" in caplog.text


def test_a_model_that_answers_nan_is_an_error_of_the_server(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = predictor.run
    monkeypatch.setattr(predictor, "run", lambda encoded, **options: np.asarray(run(encoded, **options)) * float("nan"))
    response = call(build_app(predictor, ServeConfig()), "POST", "/predict", json={"inputs": TEXT})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")


def test_a_text_that_breaks_the_engine_fails_only_its_own_request(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, poison = predictor.run, predictor.encode(["poison"])[0].ids

    def breaking(encoded: list[EncodedRow], **options: int) -> Outputs:
        if any(row.ids == poison for row in encoded):
            raise MemoryError("a secret of the engine")
        return run(encoded, **options)

    monkeypatch.setattr(predictor, "run", breaking)
    app = build_app(predictor, ServeConfig())
    texts = ["one", "poison", "two", "three"]

    async def main() -> list[httpx.Response]:
        async with client(app) as session:
            return await asyncio.gather(*(session.post("/predict", json={"inputs": text}) for text in texts))

    responses = asyncio.run(main())
    assert [response.status_code for response in responses] == [200, 500, 200, 200]
    assert refusal(responses[1]) == (500, "internal", None)
    assert "secret" not in responses[1].text
    assert "a secret of the engine" in caplog.text
    expected = [predict(app, text)[0] for text in ("one", "two", "three")]
    assert scores([responses[place].json()[0] for place in (0, 2, 3)]) == pytest.approx(scores(expected), abs=1e-5)


def test_a_model_describes_itself(app: ModelApp, predictor: Predictor) -> None:
    def tensors(*names: tuple[str, str]) -> list[dict[str, object]]:
        shapes = {"labels": [-1, -1], "scores": [-1, -1]}
        return [{"name": name, "datatype": datatype, "shape": shapes.get(name, [-1])} for name, datatype in names]

    assert call(app, "GET", "/v2/models/tiny").json() == {
        "name": "tiny",
        "versions": [predictor.artifact.version],
        "platform": "rtrain_torch",
        "inputs": tensors(("text", "BYTES")),
        "outputs": tensors(("label", "BYTES"), ("score", "FP32"), ("labels", "BYTES"), ("scores", "FP32")),
    }
    assert len(predictor.artifact.version) == 12


@pytest.mark.parametrize(("data", "shape"), [(list(CORPUS[:2]), [2]), ([[text] for text in CORPUS[:2]], [2, 1])])
def test_infer_gives_the_best_label_of_each_text(
    app: ModelApp, predictor: Predictor, data: object, shape: list[int]
) -> None:
    best = [row[0] for row in predictor(CORPUS[:2])]
    response = call(app, "POST", "/v2/models/tiny/infer", json={"id": "7", "inputs": [tensor(data, shape)]})
    assert response.status_code == 200
    answer = response.json()
    assert answer.pop("outputs") == [
        {"name": "label", "datatype": "BYTES", "shape": [2], "data": [row["label"] for row in best]},
        {
            "name": "score",
            "datatype": "FP32",
            "shape": [2],
            "data": pytest.approx([row["score"] for row in best], abs=1e-5),
        },
    ]
    assert answer == {"model_name": "tiny", "model_version": predictor.artifact.version, "id": "7"}


def test_infer_gives_the_outputs_that_were_asked_for_and_ignores_what_other_servers_read(app: ModelApp) -> None:
    document = {
        "inputs": [{**tensor([TEXT], [1]), "parameters": {"content_type": "str"}}],
        "outputs": [{"name": "label", "parameters": {"binary_data": False}}],
        "parameters": {"binary_data_output": False},
    }
    answer = call(app, "POST", "/v2/models/tiny/infer", json=document).json()
    assert [output["name"] for output in answer["outputs"]] == ["label"]
    assert sorted(answer) == ["model_name", "model_version", "outputs"]


@pytest.mark.parametrize("task", sorted(HEADS))
def test_an_output_that_the_model_lacks_is_refused_before_it_works(task: str, tmp_path: Path) -> None:
    predictor = predictor_of(tmp_path, task)
    app = build_app(predictor, ServeConfig())
    described = call(app, "GET", "/v2/models/tiny").json()
    had = [output["name"] for output in described["outputs"]]
    inputs = [{**tensor([TEXT], [1]), "name": tensor_docs["name"]} for tensor_docs in described["inputs"]]
    for name in ("label", "score", "labels", "scores", "answer"):
        document = {"inputs": inputs, "outputs": [{"name": had[0]}, {"name": name}]}
        response = call(app, "POST", "/v2/models/tiny/infer", json=document)
        if name in had:
            assert {output["name"] for output in response.json()["outputs"]} == {had[0], name}
            continue
        assert refusal(response) == (422, "", "outputs.1.name")
    calls = app.service.batcher.stats.calls
    assert calls == len(had)


@pytest.mark.parametrize("task", sorted(HEADS))
def test_an_answer_as_text_is_the_one_that_predict_gives(task: str, tmp_path: Path) -> None:
    """All labels above the threshold of a model of several labels, for one."""
    app = build_app(predictor_of(tmp_path, task), ServeConfig())
    described = call(app, "GET", "/v2/models/tiny").json()
    if [tensor_docs["name"] for tensor_docs in described["outputs"]] != ["answer"]:
        return
    names = [tensor_docs["name"] for tensor_docs in described["inputs"]]
    query = TEXT if len(names) == 1 else dict.fromkeys(names, TEXT)
    inputs = [{**tensor([TEXT], [1]), "name": name} for name in names]
    outputs = call(app, "POST", "/v2/models/tiny/infer", json={"inputs": inputs}).json()["outputs"][0]["data"]
    [expected] = call(app, "POST", "/predict", json={"inputs": [query]}).json()
    assert [json.loads(output) for output in outputs] == [expected]


def test_a_full_queue_is_answered_503_with_retry_after_and_those_in_it_are_served(
    predictor: Predictor, gate: Gate
) -> None:
    app = build_app(predictor, ServeConfig(max_queued_inputs=2))
    queue = app.service.batcher

    async def main() -> None:
        async with client(app) as session:
            accepted = [asyncio.create_task(session.post("/predict", json={"inputs": TEXT}))]
            await gate.entered()
            accepted.append(asyncio.create_task(session.post("/predict", json={"inputs": [TEXT, TEXT]})))
            while queue.queued_rows < 2:
                await asyncio.sleep(0.001)
            for path, document in (("/predict", {"inputs": TEXT}), (INFER, {"inputs": [tensor([TEXT], [1])]})):
                refused = await session.post(path, json=document)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
            gate.open()
            answers = await asyncio.gather(*accepted)
            assert [(answer.status_code, len(answer.json())) for answer in answers] == [(200, 1), (200, 2)]

    asyncio.run(main())
    assert gate.rows == 3


def test_a_request_past_its_deadline_is_answered_504_whatever_the_client_asks_for(
    predictor: Predictor, gate: Gate
) -> None:
    app = build_app(predictor, ServeConfig(request_timeout_s=0.05))
    headers = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1", "timeout": "60"}

    async def main() -> None:
        async with client(app) as session:
            engine_has_it = asyncio.create_task(session.post("/predict", json={"inputs": TEXT}, headers=headers))
            await gate.entered()
            waits = await session.post("/predict", json={"inputs": [TEXT, TEXT]}, headers=headers)
            for late in (await engine_has_it, waits):
                assert refusal(late) == (504, "deadline_exceeded", None)
            gate.open()
            assert (await session.get("/v2/health/live")).json() == {"live": True}

    asyncio.run(main())
    assert gate.rows == 1


def test_the_texts_of_a_client_that_left_never_reach_the_engine(predictor: Predictor, gate: Gate) -> None:
    app = build_app(predictor, ServeConfig())
    queue = app.service.batcher

    async def main() -> None:
        async with client(app) as session:
            first = asyncio.create_task(session.post("/predict", json={"inputs": TEXT}))
            await gate.entered()
            gone = asyncio.create_task(session.post("/predict", json={"inputs": [TEXT, CORPUS[0]]}))
            while queue.queued_rows < 2:
                await asyncio.sleep(0.001)
            gone.cancel()
            await asyncio.wait([gone])
            assert queue.queued_rows == 0
            gate.open()
            assert (await first).status_code == 200

    asyncio.run(main())
    assert (gate.rows, queue.stats.dropped_rows) == (1, 2)
    assert 'rtrain_requests_total{model="tiny",route="/predict",status="499"} 1.0' in app.service.render_metrics()


def test_readiness_ends_where_an_engine_call_outlasts_the_deadline(predictor: Predictor, gate: Gate) -> None:
    app = build_app(predictor, ServeConfig(request_timeout_s=0.05))

    async def main() -> None:
        async with client(app) as session:
            assert (await session.post("/predict", json={"inputs": TEXT})).status_code == 504
            while (stalled := await session.get("/v2/health/ready")).status_code == 200:
                await asyncio.sleep(0.001)
            assert (stalled.status_code, stalled.json()) == (503, {"ready": False})
            stalled = await session.get("/v2/models/tiny/ready")
            assert (stalled.status_code, stalled.json()) == (503, {"name": "tiny", "ready": False})
            assert (await session.get("/v2/health/live")).status_code == 200
            gate.open()
            while (await session.get("/v2/health/ready")).status_code != 200:
                await asyncio.sleep(0.001)

    asyncio.run(main())
