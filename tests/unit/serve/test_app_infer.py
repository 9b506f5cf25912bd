"""The Open Inference Protocol: metadata, readiness, and texts as JSON or in Triton's binary form."""

import json
import struct
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from tests.support import serving
from tests.support.serving import HEADS, TEXT, call, predictor_of, refusal, tensor
from tests.support.tiny import CORPUS

app, predictor = serving.app, serving.predictor  # fixtures


def test_server_and_model_describe_themselves(app: FastAPI, predictor: Predictor) -> None:
    def tensors(*names: tuple[str, str]) -> list[dict[str, object]]:
        shapes = {"labels": [-1, -1], "scores": [-1, -1]}
        return [{"name": name, "datatype": datatype, "shape": shapes.get(name, [-1])} for name, datatype in names]

    assert call(app, "GET", "/v2").json() == {"name": "rtrain", "version": "0.1.0", "extensions": []}
    assert call(app, "GET", "/v2/health/live").json() == {"live": True}
    assert call(app, "GET", "/v2/health/ready").json() == {"ready": True}
    assert call(app, "GET", "/v2/models/tiny/ready").json() == {"name": "tiny", "ready": True}
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
    app: FastAPI, predictor: Predictor, data: object, shape: list[int]
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


def test_infer_gives_the_outputs_that_were_asked_for_and_ignores_what_other_servers_read(app: FastAPI) -> None:
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
    calls = app.state.service.batcher.stats.calls
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


def binary_request(app: FastAPI, data: bytes, shape: list[int], json_length: str | None = None) -> httpx.Response:
    """As Triton's client sends texts by default: JSON, then each text's length and bytes."""
    described = {"name": "text", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    document = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": json_length or str(len(document))}
    return call(app, "POST", "/v2/models/tiny/infer", content=document + data, headers=headers)


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def test_infer_reads_texts_in_tritons_binary_form(app: FastAPI) -> None:
    texts = [*CORPUS[:2], "¿dónde está?"]
    expected = call(app, "POST", "/v2/models/tiny/infer", json={"inputs": [tensor(texts, [3])]})
    response = binary_request(app, packed(*(text.encode() for text in texts)), [3])
    assert (response.status_code, response.json()) == (200, expected.json())
