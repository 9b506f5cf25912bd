"""A table of positions that is made longer: texts of more tokens than the model was made for are read whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rtrain import config
from rtrain.config import ModelConfig
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import single_window_batch
from rtrain.inference import artifact, predictor as inference_predictor
from rtrain.inference.artifact import Artifact
from rtrain.models import builder, long_texts, unpadded
from rtrain.runs import prepare
from rtrain.tasks import base
from rtrain.trainer import step
from tests.support.tiny import make_encoder
from tests.unit.models.test_unpadded import ARCHITECTURES

TASK = base.get_task("classification")
NATIVE_TOKENS, MORE_TOKENS = 20, 70


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of each architecture that reads `OWN` tokens."""
    instance = tmp_path_factory.mktemp(request.param)
    options = ARCHITECTURES[request.param]()
    options.max_position_embeddings = NATIVE_TOKENS + long_texts.first_position(options.to_dict())
    torch.manual_seed(0)
    transformers.AutoModel.from_config(options).save_pretrained(instance)
    return instance


def built(folder: Path, max_tokens: int | None, pack: bool = False) -> Any:
    return (
        builder.build_network(folder, TASK, ("a", "b"), 0, ModelConfig(max_position_embeddings=max_tokens), pack=pack)
        .double()
        .eval()
    )


def ids(length: int) -> torch.Tensor:
    return torch.arange(length)[None] % 50 + 5


def table_of(network: Any) -> torch.Tensor:
    weight: torch.Tensor = network.base_model.embeddings.position_embeddings.weight
    return weight.detach()


@pytest.mark.parametrize("pack", [False, True])
def test_short_texts_are_read_as_before_and_long_ones_whole(folder: Path, pack: bool) -> None:
    local_part, longer = built(folder, None), built(folder, MORE_TOKENS, pack)
    assert unpadded.is_packed(longer) == pack
    start = long_texts.first_position(local_part.config.to_dict())
    rows = table_of(longer)[start:]
    assert longer.config.max_position_embeddings == start + MORE_TOKENS == start + len(rows)
    for place in range(MORE_TOKENS):
        assert rows[place].equal(table_of(local_part)[start + place % NATIVE_TOKENS])
    assert table_of(longer)[:start].equal(table_of(local_part)[:start])
    sizes = np.array([NATIVE_TOKENS, 7], dtype=np.int32)
    tokens = single_window_batch(
        np.arange(27, dtype=np.int32) % 50 + 5, sizes, sizes, np.zeros(2), np.arange(2, dtype=np.uint64)
    )
    with torch.inference_mode():
        for same in (local_part, longer):
            same.shapes = step.forward(same, tokens, local_part.config.pad_token_id or 0, "fp32")
        torch.testing.assert_close(longer.shapes, local_part.shapes, rtol=1e-10, atol=1e-12)
        assert longer(input_ids=ids(MORE_TOKENS)).logits.isfinite().all()
        for network, maximum in ((local_part, NATIVE_TOKENS), (longer, MORE_TOKENS)):
            with pytest.raises((IndexError, RuntimeError)):
                network(input_ids=ids(maximum + 1))


def test_an_artefact_reads_long_texts_by_each_engine(tmp_path: Path) -> None:
    """Transformers alone reads it too: nothing but the table's length is another."""
    encoder = make_encoder(tmp_path / "encoder")
    instance = builder.build_network(encoder, TASK, ("a", "b"), 0, ModelConfig(max_position_embeddings=300))
    instance.save_pretrained(tmp_path / "artifact")
    (tmp_path / "artifact" / "tokenizer.json").write_bytes((encoder / "tokenizer.json").read_bytes())
    artifact.write_artifact(
        tmp_path / "artifact",
        Artifact("long", TASK.name, ("a", "b"), 300, "torch"),
        inference_predictor.compute_golden_logits,
    )
    predictor = inference_predictor.Predictor.load(tmp_path / "artifact", threads=1)
    text = "the refund was late " * 100
    encoded = predictor.encode([text])[0]
    assert len(encoded.ids) == 300
    [answers] = predictor([text])
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "artifact").eval()
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([encoded.ids])).logits.softmax(-1)[0]
    assert sorted(item["score"] for item in answers) == pytest.approx(sorted(expected.tolist()), abs=1e-5)


def test_what_has_no_table_is_refused(tmp_path: Path) -> None:
    transformers.ModernBertConfig(max_position_embeddings=64).save_pretrained(tmp_path)
    [problem] = builder.check_architecture(tmp_path, 64, model_config=ModelConfig(max_position_embeddings=65))
    assert (problem.field, problem.code) == ("model.max_position_embeddings", "unsupported")
    assert builder.check_architecture(tmp_path, 64, model_config=ModelConfig(max_position_embeddings=64)) == []


def test_a_run_of_longer_texts_is_told_of_the_table(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path / "encoder")
    local_part = json.loads((encoder / "config.json").read_text())["max_position_embeddings"]
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"word {n},{'ab'[n % 2]}\n" for n in range(20)))
    values: dict[str, Any] = {"model.name": str(encoder), "data.path": str(rows), "data.max_tokens": 2 * local_part}
    with pytest.raises(ConfigError) as raised:
        prepare.check_run(config.load_config("intent", values))
    [problem] = raised.value.problems
    assert (problem.field, problem.code) == ("data.max_tokens", "out_of_range")
    prepare.check_run(config.load_config("intent", {**values, "model.max_position_embeddings": 2 * local_part}))


def test_a_graph_may_have_the_places_alone_that_its_texts_reach(folder: Path) -> None:
    network = built(folder, None)
    before, start = network.state_dict(), long_texts.first_position(network.config.to_dict())
    with torch.inference_mode():
        short, long = network(ids(9)).logits, network(ids(NATIVE_TOKENS)).logits
        with long_texts.truncate_positions(network, 9):
            assert len(table_of(network)) == start + 9
            assert torch.equal(network(ids(9)).logits, short)
            with pytest.raises((IndexError, RuntimeError)):
                network(ids(NATIVE_TOKENS))
        assert torch.equal(network(ids(NATIVE_TOKENS)).logits, long)
        with long_texts.truncate_positions(network, NATIVE_TOKENS + 1):
            assert len(table_of(network)) == start + NATIVE_TOKENS
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
