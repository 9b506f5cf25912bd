"""A finished artefact with fewer pieces, float and int8: the same answers bit for bit, but to texts of other pieces."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from rtrain import artifact
from rtrain.artifact import GOLDEN_INPUTS, ArtifactError
from rtrain.compress import openvino_graph, vocabulary
from rtrain.errors import UserError
from rtrain.network import trimming
from rtrain.predict import Predictor, golden_logits
from tests.tiny import CORPUS, make_artifact
from tests.vocabularies import ROWS, STRANGE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("whole") / "artifact")


@pytest.fixture(scope="module")
def int8(whole: Path) -> Path:
    """The int8 artefact of the same model."""
    made, folder = artifact.read(whole), whole.parent / "artifact-int8"
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copyfile(whole / name, folder / name)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(whole).eval()
    tokenizer = Predictor.load(whole).tokenizer
    rows = [np.array([tokenizer.encode(row).ids]) for row in ROWS]
    samples = [
        {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)} for row in rows
    ]
    openvino_graph.export(network, samples[0]).calibrated(samples).write(folder / "model.int8.xml")
    return _complete(folder, made, "openvino")


def _complete(folder: Path, made: artifact.Artifact, engine: str) -> Path:
    artifact.write(folder, replace(made, engine=engine, golden=()), golden_logits)
    return folder


@pytest.mark.parametrize("engine", ["float", "int8"])
def test_a_trimmed_artefact_answers_kept_pieces_bit_for_bit(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue({"float": "whole", "int8": "int8"}[engine])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = trimming.kept(folder, trimming.used_by(tokenizer, ROWS))
    texts = [*CORPUS, *(text for text in STRANGE if text.strip("\u0000\u200b\ufeff"))]
    shown = vocabulary.trim(folder, ids, tmp_path / "out", texts)
    before, after = Predictor.load(folder), Predictor.load(tmp_path / "out")
    assert len(shown.outputs) == len(texts)
    assert 0 < len(shown.changed) < len(texts) - len(ROWS) + 1
    assert not set(shown.changed) & set(range(len(ROWS)))
    for position, text in enumerate(texts):
        one, other = before.logits([text])[0], after.logits([text])[0]
        assert np.array_equal(other, shown.outputs[position])
        assert np.array_equal(one, other) or position in shown.changed
    made = artifact.read(tmp_path / "out")
    counted = {"pieces": len(ids), "of": 200, "rows": len(texts), "identical": len(texts) - len(shown.changed)}
    told = made.lineage["vocabulary"]
    assert {name: told[name] for name in counted} == counted
    assert told["changed"] == len(shown.changed) >= told["flips"]
    assert made.lineage["parent"] == artifact.read(folder).version != made.version
    sizes = [sum(path.stat().st_size for path in place.rglob("*")) for place in (folder, tmp_path / "out")]
    assert sizes[1] < sizes[0]


def test_an_answer_that_is_another_is_found(whole: Path, tmp_path: Path) -> None:
    """The proof fails where two pieces were swapped."""
    tokenizer = tokenizers.Tokenizer.from_file(str(whole / "tokenizer.json"))
    ids = trimming.kept(whole, trimming.used_by(tokenizer, ROWS))
    made = artifact.read(whole)
    vocabulary.trim(whole, ids, tmp_path / "out", ROWS)
    swapped = list(ids)
    first, second = tokenizer.encode(ROWS[0]).ids[1:3]
    one, other = ids.index(first), ids.index(second)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    trimming.trim(whole, swapped, tmp_path / "weights")
    shutil.copyfile(tmp_path / "weights" / "model.safetensors", tmp_path / "out" / "model.safetensors")
    after = Predictor(tmp_path / "out", made)
    with pytest.raises(ArtifactError, match="text 0 has the same pieces and another answer"):
        vocabulary.prove(Predictor(whole, made), after, ROWS, trimming.old_ids(ids))


def test_a_graph_without_a_table_of_pieces_is_refused(int8: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no table of 12,345 lines"):
        vocabulary.cut_graph(int8 / "model.int8.xml", [0, 1], 12_345, tmp_path / "out.xml")


def test_golden_inputs_are_answered_by_the_smallest_vocabulary(whole: Path, tmp_path: Path) -> None:
    """Their words are mostly not those of any user's rows."""
    ids = trimming.kept(whole, [])
    vocabulary.trim(whole, ids, tmp_path / "out")
    assert len(Predictor.load(tmp_path / "out")(list(GOLDEN_INPUTS))) == len(GOLDEN_INPUTS)
