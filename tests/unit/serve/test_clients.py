"""Third-party clients against a real server on loopback, for each task; and the needs of a request router."""

import http.client
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from huggingface_hub import InferenceClient, constants
from starlette.types import ASGIApp, Receive, Scope, Send
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.ingress.address import find_free_address
from serve.schemas import open_inference
from serve.standalone import build_model_registry
from tests.support.serving import HEADS, listening
from tests.support.tiny import CORPUS, make_artifact, make_task_artifact

TEXT = "🙂 Anna Lund sold the brown box in Köln. 😀 The rest is for Thomas at the bank, who pays well."
"""Characters of four bytes stand before the match: positions are characters, not bytes or UTF-16 units."""
QUESTION = {"question": "who pays? 🙂", "context": TEXT}
INPUTS_BY_TASK: dict[str, Any] = {"span_qa": QUESTION, "masked_lm": "where is my [MASK]"}
"""Input of a task; `TEXT` for all others."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {task: make_task_artifact(tmp_path_factory.mktemp(task), task, HEADS[task], seed=1) for task in HEADS}


@pytest.fixture(scope="module")
def predictors(artifacts: dict[str, Path]) -> dict[str, Predictor]:
    return {task: Predictor.load(folder, threads=1) for task, folder in artifacts.items()}


def alone_with(settings: ServeConfig, folder: Path) -> ASGIApp:
    """The application of one process."""
    models = build_model_registry(settings, ["tiny"])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await models.apply({"tiny": str(folder)})
        await models(scope, receive, send)

    return app


@pytest.fixture(scope="module")
def addresses(artifacts: dict[str, Path]) -> Iterator[dict[str, str]]:
    """Those of an endpoint for each task; that of the classes speaks gRPC too, and so does that of questions."""
    with ExitStack() as stack:
        result = {}
        for task, folder in artifacts.items():
            speaks = task in ("classification", "span_qa")
            settings = ServeConfig(
                grpc_port=find_free_address("127.0.0.1", 0).port if speaks else None, max_body_bytes=50_000
            )
            result[task] = stack.enter_context(listening(alone_with(settings, folder)))
            if speaks:
                result[f"{task} grpc"] = f"127.0.0.1:{settings.grpc_port}"
        yield result


def post(address: str, inputs: object, **parameters: object) -> tuple[Any, dict[str, str]]:
    """The reply to a question of the standard library's client, and its headers."""
    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{address}/predict", body)) as reply:
        return json.load(reply), dict(reply.headers)


# ------------------------------------------------------------------------------------------------- Hugging Face, curl


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as the tests' own process is


@pytest.mark.parametrize("task", ["classification", "multi_label"])
def test_the_hugging_face_client_classifies(
    addresses: dict[str, str], predictors: dict[str, Predictor], hugging_face: None, task: str
) -> None:
    client = InferenceClient(model=f"{addresses[task]}/predict")
    [expected] = predictors[task]([TEXT])
    result = client.text_classification(TEXT)
    assert [(entry.label, round(entry.score, 4)) for entry in result] == [
        (entry["label"], round(entry["score"], 4)) for entry in expected
    ]
    assert [entry.label for entry in client.text_classification(TEXT, top_k=1)] == [expected[0]["label"]]


def test_the_hugging_face_client_asks_a_question(
    addresses: dict[str, str], predictors: dict[str, Predictor], hugging_face: None
) -> None:
    client = InferenceClient(model=f"{addresses['span_qa']}/predict")
    result: Any = client.question_answering(QUESTION["question"], QUESTION["context"])
    [expected] = predictors["span_qa"]([QUESTION])
    assert (result.answer, result.start, result.end) == (expected["answer"], expected["start"], expected["end"])
    assert result.answer == TEXT[result.start : result.end] != ""
    assert result.score == pytest.approx(expected["score"], abs=1e-5)


def test_the_hugging_face_client_tags_words(
    addresses: dict[str, str], predictors: dict[str, Predictor], hugging_face: None
) -> None:
    client = InferenceClient(model=f"{addresses['token_tags']}/predict")
    result = client.token_classification(TEXT)
    [expected] = predictors["token_tags"]([TEXT])
    assert [(entry.entity_group, entry.word, entry.start, entry.end) for entry in result] == [
        (entry["entity_group"], entry["word"], entry["start"], entry["end"]) for entry in expected
    ]
    assert result, "random weights name something"
    assert all(TEXT[entry.start : entry.end] == entry.word for entry in result)


def test_the_hugging_face_client_fills_a_mask(addresses: dict[str, str], hugging_face: None) -> None:
    client = InferenceClient(model=f"{addresses['masked_lm']}/predict")
    result = client.fill_mask("where is my [MASK]?", top_k=3)
    assert [entry.sequence for entry in result] == [f"where is my {entry.token_str}?" for entry in result]
    assert len(result) == 3
    sequences, _ = post(addresses["masked_lm"], "[MASK] and [MASK]", top_k=1)
    assert [entry["sequence"] for [entry] in sequences] == [
        f"{sequences[0][0]['token_str']} and [MASK]",
        f"[MASK] and {sequences[1][0]['token_str']}",
    ]


def test_the_hugging_face_client_sums_up(
    addresses: dict[str, str], predictors: dict[str, Predictor], hugging_face: None
) -> None:
    client = InferenceClient(model=f"{addresses['extractive_summary']}/predict")
    [expected] = predictors["extractive_summary"]([TEXT])
    assert client.summarization(TEXT).summary_text == expected["summary_text"] != ""


@pytest.mark.parametrize("task", sorted(HEADS))
def test_curl_gets_the_answer_of_each_task(
    addresses: dict[str, str], predictors: dict[str, Predictor], task: str
) -> None:
    query = INPUTS_BY_TASK.get(task, TEXT)
    command = ["curl", "-sf", f"{addresses[task]}/predict", "-H", "content-type: application/json"]
    ran = subprocess.run([*command, "-d", json.dumps({"inputs": query})], capture_output=True, check=True, timeout=30)
    [expected] = predictors[task]([query])
    result = json.loads(ran.stdout)
    assert shape(result) == shape(predictors[task].task.unwrap_single(expected))


def shape(answer: Any) -> Any:
    """An answer with its numbers rounded."""
    if isinstance(answer, dict):
        return {name: shape(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [shape(value) for value in answer]
    return round(answer, 4) if isinstance(answer, float) else answer


# ------------------------------------------------------------------------------------------ headers for routers


def test_a_monitor_may_ask_by_head(addresses: dict[str, str]) -> None:
    """Like GET without the body, on a connection that stays usable, and counted by its route."""
    connection = http.client.HTTPConnection(addresses["classification"].removeprefix("http://"), timeout=20)
    paths = ("/", "/info", "/v2/health/ready", "/v2/models/tiny", "/openapi.json", "/v2/models/other")
    header_names = ("content-type", "content-length", "content-security-policy", "x-model-name")
    with closing(connection):
        for path in paths:
            result = {}
            for method in ("HEAD", "GET"):
                connection.request(method, path)
                reply = connection.getresponse()
                result[method] = (reply.status, [reply.headers[name] for name in header_names])
                assert bool(reply.read()) == (method == "GET")
            assert result["HEAD"] == result["GET"]
        connection.request("HEAD", "/predict")
        reply = connection.getresponse()
        assert (reply.status, reply.headers["allow"], reply.read()) == (405, "POST", b"")
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    [ready] = [line for line in lines if line.startswith("rtrain_requests_total{") and "/health/ready" in line]
    assert float(ready.split()[-1]) >= 2


@pytest.mark.parametrize("text", [TEXT, "  Anna\t in  Köln ", "e\u0301té à Lyon, Anna!", "\uff21nna\u3000in 東京"])
def test_places_are_characters_of_the_exact_request(addresses: dict[str, str], text: str) -> None:
    entities, _ = post(addresses["token_tags"], text)
    assert all(text[entry["start"] : entry["end"]] == entry["word"] for entry in entities)
    answer, _ = post(addresses["span_qa"], {"question": "who?", "context": text})
    assert text[answer["start"] : answer["end"]] == answer["answer"]
    [summary], _ = post(addresses["extractive_summary"], text)
    assert all(text[entry["start"] : entry["end"]] == entry["text"] for entry in summary["sentences"])


def test_every_reply_names_the_revisions_of_its_parts(addresses: dict[str, str], tmp_path: Path) -> None:
    _, headers = post(addresses["classification"], TEXT)
    with urllib.request.urlopen(f"{addresses['classification']}/info") as reply:
        about = json.load(reply)
    parts = ("model", "tokenizer", "labels")
    assert {part: headers[f"x-{part}-version"] for part in parts} == about["revisions"]
    other = Predictor.load(make_artifact(tmp_path, ("a", "b", "d")), threads=1).revisions
    assert {part: other[part] == about["revisions"][part] for part in parts} == {
        "model": False,
        "tokenizer": True,
        "labels": False,
    }


# --------------------------------------------------------------------------------------------- Open Inference Protocol


def texts(triton: Any, name: str, values: list[str], *, binary: bool = True) -> Any:
    """A tensor of texts as Triton's client makes it."""
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    array = np.array([value.encode() for value in values], dtype=np.object_)
    if triton is tritonclient.http:
        tensor.set_data_from_numpy(array, binary_data=binary)
    else:
        tensor.set_data_from_numpy(array)
    return tensor


def best(predictor: Predictor, values: list[str]) -> list[tuple[str, Any]]:
    return [(row[0]["label"], pytest.approx(row[0]["score"], abs=1e-5)) for row in predictor(values)]


def text_of(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_http_client_works_as_it_is(
    addresses: dict[str, str], predictors: dict[str, Predictor], binary: bool
) -> None:
    triton_asks_over_http(addresses["classification"], predictors["classification"], binary)


def triton_asks_over_http(address: str, predictor: Predictor, binary: bool) -> None:
    """All that Triton's client can ask of an endpoint that serves this model alone."""
    name, version = predictor.artifact.name, predictor.artifact.version
    with tritonclient.http.InferenceServerClient(address.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, version)
        assert not client.is_model_ready("other")
        assert not client.is_model_ready(name, "0")
        assert client.get_server_metadata()["name"] == "rtrain"
        assert client.get_model_metadata(name, version)["versions"] == [version]
        index = [{"name": name, "version": version, "state": "READY", "reason": ""}]
        assert client.get_model_repository_index() == index
        values = [TEXT, *CORPUS[:2]]
        tensor = texts(tritonclient.http, "text", values, binary=binary)
        outputs = [tritonclient.http.InferRequestedOutput("label"), tritonclient.http.InferRequestedOutput("score")]
        for model_version, requested_outputs in (("", None), (version, outputs)):
            reply = client.infer(name, [tensor], model_version, requested_outputs, request_id="7")
            assert reply.get_response()["id"] == "7"
            result = zip(map(text_of, reply.as_numpy("label")), reply.as_numpy("score").tolist(), strict=True)
            assert list(result) == best(predictor, values)
        with pytest.raises(InferenceServerException, match="version: "):
            client.infer(name, [tensor], "0")
        with pytest.raises(InferenceServerException, match=r"inputs\.0\.data\.0: "):
            client.infer(name, [texts(tritonclient.http, "text", [" "])])


def test_a_reply_over_grpc_tells_the_versions_of_the_model_s_parts(
    addresses: dict[str, str], predictors: dict[str, Predictor]
) -> None:
    predictor = predictors["classification"]
    question = service_pb2.ModelInferRequest(
        model_name="tiny", raw_input_contents=[open_inference.pack_texts([TEXT.encode()])]
    )
    question.inputs.add(name="text", datatype="BYTES", shape=[1])
    with grpc.insecure_channel(addresses["classification grpc"]) as channel:
        _, call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.with_call(question, timeout=20)
    metadata = {name: value for name, value in call.trailing_metadata() if name.startswith("x-")}
    assert metadata == {
        "x-model-name": "tiny",
        **{f"x-{part}-version": digest for part, digest in predictor.revisions.items()},
    }
    assert set(predictor.revisions) == {"model", "tokenizer", "labels"}


def test_tritons_grpc_client_works_as_it_is(addresses: dict[str, str], predictors: dict[str, Predictor]) -> None:
    triton_asks_over_grpc(addresses["classification grpc"], predictors["classification"])


def triton_asks_over_grpc(address: str, predictor: Predictor) -> None:
    name, version = predictor.artifact.name, predictor.artifact.version
    with tritonclient.grpc.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, version)
        metadata = client.get_model_metadata(name, as_json=True)
        assert metadata["versions"] == [version]
        assert [tensor["name"] for tensor in metadata["outputs"]] == ["label", "score", "labels", "scores"]
        assert client.get_server_metadata(as_json=True)["name"] == "rtrain"
        [model] = client.get_model_repository_index(as_json=True)["models"]
        assert (model["name"], model["version"], model["state"]) == (name, version, "READY")
        values = [TEXT, *CORPUS[:2]]
        outputs = [tritonclient.grpc.InferRequestedOutput("label")]
        for model_version, requested_outputs in (("", None), (version, outputs)):
            tensor = texts(tritonclient.grpc, "text", values)
            reply = client.infer(name, [tensor], model_version, requested_outputs, request_id="7")
            assert reply.get_response().id == "7"
            assert list(map(text_of, reply.as_numpy("label"))) == [label for label, _ in best(predictor, values)]
            chances = reply.as_numpy("score")
            assert (
                chances is None
                if requested_outputs
                else chances.tolist() == [score for _, score in best(predictor, values)]
            )


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        (("other", ["text"]), "NOT_FOUND", "name: "),
        (("tiny", ["text"], "0"), "NOT_FOUND", "version: "),
        (("tiny", [" "]), "INVALID_ARGUMENT", "inputs.0.data.0: "),
        (("tiny", ["a"] * 257), "RESOURCE_EXHAUSTED", "inputs.0.data: "),
        (("tiny", ["a" * 200_000]), "RESOURCE_EXHAUSTED", ""),
    ],
)
def test_a_refusal_over_grpc_has_its_code(
    addresses: dict[str, str], arguments: tuple[Any, ...], code: str, field: str
) -> None:
    name, values, *version = arguments
    with (
        tritonclient.grpc.InferenceServerClient(addresses["classification grpc"]) as client,
        pytest.raises(InferenceServerException) as refused,
    ):
        client.infer(name, [texts(tritonclient.grpc, "text", values)], *version)
    assert str(refused.value.status()) == f"StatusCode.{code}"
    assert str(refused.value.message()).startswith(field)


def test_what_grpc_lacks_is_said_to_be_unimplemented(addresses: dict[str, str]) -> None:
    with (
        tritonclient.grpc.InferenceServerClient(addresses["classification grpc"]) as client,
        pytest.raises(InferenceServerException, match="UNIMPLEMENTED"),
    ):
        client.load_model("tiny")


@pytest.mark.parametrize("triton", [tritonclient.http, tritonclient.grpc])
def test_a_question_is_two_tensors_in_any_order(
    addresses: dict[str, str], predictors: dict[str, Predictor], triton: Any
) -> None:
    address = addresses["span_qa grpc" if triton is tritonclient.grpc else "span_qa"].removeprefix("http://")
    with triton.InferenceServerClient(address) as client:
        metadata = client.get_model_metadata("tiny", **({"as_json": True} if triton is tritonclient.grpc else {}))
        assert [tensor["name"] for tensor in metadata["inputs"]] == ["question", "context"]
        columns = {name: [QUESTION[name], CORPUS[0]] for name in ("context", "question")}
        reply = client.infer("tiny", [texts(triton, name, values) for name, values in columns.items()])
        result = [json.loads(text_of(answer)) for answer in reply.as_numpy("answer")]
        query: Any = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        assert shape(result) == shape(predictors["span_qa"](query))
        with pytest.raises(InferenceServerException, match=r"inputs\.0\.name: "):
            client.infer("tiny", [texts(triton, name, ["a"]) for name in ("question", "text")])
        with pytest.raises(InferenceServerException, match=r"inputs\.1\.shape: "):
            client.infer("tiny", [texts(triton, "question", ["a"]), texts(triton, "context", ["a", "b"])])
