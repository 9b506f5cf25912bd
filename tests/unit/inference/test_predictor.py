"""Artefact and texts to answers: the same alone as in any company, and none where they are not the maker's."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rtrain.core import manifest
from rtrain.inference import artifact, predictor as inference_predictor
from rtrain.inference.artifact import GOLDEN_INPUTS, Artifact
from rtrain.inference.predictor import InputError, Predictor
from rtrain.models import device
from rtrain.tasks import base
from tests.support.refusing import refused
from tests.support.serving import HEADS, predictor_of
from tests.support.tiny import CORPUS, make_artifact, make_task_artifact

TEXTS = [*CORPUS, "a", "?", "where is my parcel " * 40, "日本", "x" * 200]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("made") / "artifact")


@pytest.fixture(scope="module")
def predictor(whole: Path) -> Predictor:
    return Predictor.load(whole, threads=1)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "artifact"))


# ------------------------------------------------------------------------------------------------------------- answers


def test_logits_are_those_of_transformers(whole: Path, predictor: Predictor) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(whole / "tokenizer.json"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(whole).eval()
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=64, return_tensors="pt", return_token_type_ids=True)
        with torch.inference_mode():
            expected = model(**inputs).logits.numpy()
        assert np.stack(predictor.logits([text])) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batch_rows", [1, 2, 5, 100])
def test_an_answer_does_not_depend_on_its_company(predictor: Predictor, batch_rows: int) -> None:
    alone = np.concatenate([predictor.logits([text]) for text in TEXTS])
    assert np.ptp(alone, axis=0).min() > 0.1  # the texts get different answers, so a swap of two would be seen
    assert np.abs(np.stack(predictor.logits(TEXTS, batch_rows)) - alone).max() < 1e-5
    assert np.abs(np.stack(predictor.logits(TEXTS[::-1], batch_rows)) - alone[::-1]).max() < 1e-5


@pytest.mark.parametrize("task", ["classification", "token_tags", "masked_lm", "span_qa"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16", 0.02)])
def test_an_engine_without_padding_answers_as_one_with(
    tmp_path: Path, task: str, precision: str, tolerance: float
) -> None:
    padded = predictor_of(tmp_path, task)
    with device.pretend_cuda():
        unpadded = Predictor(tmp_path, padded.artifact, threads=1, precision=precision)
    unpadded.check_golden()
    assert (padded.is_unpadded, unpadded.is_unpadded) == (False, True)
    inputs = inference_predictor.make_golden_inputs(padded.task, padded.head)
    inputs = [*inputs, *inputs[::-1]]  # of several lengths
    for batch_rows in (1, 100):
        for found, expected in zip(unpadded.logits(inputs, batch_rows), padded.logits(inputs), strict=True):
            assert found.shape == expected.shape
            assert found == pytest.approx(expected, abs=tolerance)
    assert next(unpadded.network[0].parameters()).dtype == torch.float32  # gradients are those of the float model


class Noted:
    """An engine that notes the shapes of its calls."""

    def __init__(self, engine: inference_predictor.Engine):
        self.engine, self.shapes = engine, list[tuple[int, int]]()

    def logits(self, inputs: Mapping[str, Any]) -> Any:
        self.shapes.append(inputs["input_ids"].shape)
        return self.engine.logits(inputs)


@pytest.mark.parametrize("task", ["classification", "token_tags"])  # an output for each row, and for each token
def test_calls_of_padded_shapes_answer_alike(tmp_path: Path, task: str) -> None:
    folder = make_task_artifact(tmp_path / "artifact", task, HEADS[task], seed=1)
    made = artifact.read_artifact(folder)
    engine = inference_predictor.TorchEngine(folder, made, 1)
    exact, noted = Predictor(folder, made, engine=engine), Noted(engine)
    few = Predictor(folder, replace(made, engine="openvino"), engine=noted)  # which plans by shape
    for count in range(1, len(TEXTS) + 1):
        encoded = exact.encode(TEXTS[-count:])
        found, expected = few.run(encoded), exact.run(encoded)
        assert len(found) == len(expected) == count
        assert all(np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5 for a, b in zip(found, expected, strict=True))
    assert {rows for rows, _ in noted.shapes} == {1, 2, 3, 4, 6, 8, 12, 16, 24}
    assert {columns for _, columns in noted.shapes} <= set(range(8, 65, 8))  # no longer than the model reads


def test_pairs_and_single_texts_answer_alike_together_and_alone(predictor: Predictor) -> None:
    inputs: list[base.Input] = [
        "where is my parcel",
        {"text": "where is my parcel", "text_pair": "it was due on monday"},
        {"text": "where is my parcel"},
        {"text": "where is my parcel", "text_pair": "the card was declined"},
    ]
    alone = np.concatenate([predictor.logits([value]) for value in inputs])
    assert np.abs(np.stack(predictor.logits(inputs)) - alone).max() < 1e-5
    assert np.array_equal(alone[0], alone[2])
    apart = [np.abs(alone[row] - alone[other]).max() for row, other in ((0, 1), (0, 3), (1, 3))]
    assert min(apart) > 1e-3


def test_answers_come_in_the_order_of_the_inputs(predictor: Predictor) -> None:
    found = predictor(TEXTS, {"top_k": 1})
    logits = np.stack(predictor.logits(TEXTS))
    assert [answer[0]["label"] for answer in found] == ["abc"[column] for column in logits.argmax(axis=1)]
    assert len({answer[0]["label"] for answer in found}) > 1
    assert [len(answer) for answer in predictor(TEXTS)] == [3] * len(TEXTS)


def test_a_model_without_token_types_answers_too(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact")
    config = transformers.DistilBertConfig(
        vocab_size=300, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=128
    )
    config.num_labels = 3
    transformers.DistilBertForSequenceClassification(config).save_pretrained(folder)
    made = Artifact("d", "classification", ("a", "b", "c"), 64, "torch")
    artifact.write_artifact(folder, made, inference_predictor.compute_golden_logits)
    assert Predictor.load(folder, threads=1).logits(["where is my parcel"])[0].shape == (3,)


# -------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "is empty; send a text"),
        (" \n\t", "is empty; send a text"),
        ({"text": ""}, "is empty; send a text"),
        ({"text": " ", "text_pair": "\t"}, "is empty; send a text"),
        ("bad \ud800", "is not valid Unicode (a lone surrogate); send UTF-8 text"),
        (None, "is no text; send a text"),
        (3, "is no text; send a text"),
        (["a", "b"], "is no text; send a text"),
        ({"text": None}, "holds something else than texts; send texts"),
        ({"text": "a", "text_pair": 3}, "holds something else than texts; send texts"),
        ({"text": "good", "text_pair": "bad \udfff"}, "is not valid Unicode (a lone surrogate); send UTF-8 text"),
    ],
)
def test_an_input_that_cannot_be_read_is_named_by_its_place(
    predictor: Predictor, value: base.Input, reason: str
) -> None:
    with pytest.raises(InputError) as caught:
        predictor(["fine", "fine too", value, ""])
    assert str(caught.value) == f"input 2 {reason}"
    assert caught.value.position == 2


# --------------------------------------------------------------------------------------------------------------- golden


def test_golden_answers_are_reproduced(whole: Path, predictor: Predictor) -> None:
    made = artifact.read_artifact(whole)
    expected = np.array([row["logits"] for row in made.golden])
    assert np.abs(np.stack(predictor.logits(GOLDEN_INPUTS)) - expected).max() < 1e-5
    predictor.check_golden()


def rewrite(folder: Path, change: Any) -> None:
    """Edit artifact.json and mend the manifest, so that only the answers can tell."""
    path = folder / artifact.FILE_NAME
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    manifest.write_manifest(folder)


def move_golden(folder: Path, by: float) -> None:
    def move(document: dict[str, Any]) -> None:
        document["golden"][3]["logits"][1] += by

    rewrite(folder, move)


def change_case(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(document))
    manifest.write_manifest(folder)


def replace_weights(folder: Path) -> None:
    other = make_artifact(folder.parent / "other", seed=5)
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    manifest.write_manifest(folder)


HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "moved": (lambda folder: move_golden(folder, 0.002), "other_answers"),
    "NaN": (lambda folder: move_golden(folder, float("nan")), "other_answers"),
    "weights": (replace_weights, "other_answers"),
    "tokenizer": (change_case, "other_answers"),
    "no golden answers": (
        lambda folder: rewrite(folder, lambda document: document.update(golden=[])),
        "damaged_artifact",
    ),
}


@pytest.mark.parametrize("name", HARM)
def test_an_artefact_that_answers_otherwise_is_refused(folder: Path, name: str) -> None:
    harm, code = HARM[name]
    harm(folder)
    with refused(code):
        Predictor.load(folder, threads=1)
