"""Local attention with a first token that reads all: packed as padded, exported, and never answered by others' code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rtrain import config
from rtrain.compress import student
from rtrain.config import DistillConfig, ModelConfig
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import single_window_batch
from rtrain.data.store.store import Store
from rtrain.inference import artifact, predictor as inference_predictor
from rtrain.inference.artifact import Artifact
from rtrain.models import attention, builder, long_texts, model_files, pack_layout, unpadded
from rtrain.planning import memory_estimate
from rtrain.runs import prepare
from rtrain.tasks import base
from rtrain.trainer import step
from tests.conftest import write_rows
from tests.support import quantizing
from tests.support.packing import HEADS, LENGTHS, agree, pairwise, rows
from tests.support.tiny import make_encoder, make_store
from tests.unit.inference.test_long_texts import text_of
from tests.unit.models.test_modern import CHUNKINGS
from tests.unit.models.test_unpadded import ARCHITECTURES

REACH = 4
TASK = base.get_task("classification")


def make_network(architecture: str, head: str, reach: int | None, packs: bool) -> Any:
    """A network in float64, without dropout."""
    torch.manual_seed(1)
    options = ARCHITECTURES[architecture]()
    options.num_labels = 2 if head == "ForQuestionAnswering" else 4
    options.initializer_range = 0.3  # so that a token which reads one too many has visibly another answer
    network: Any = getattr(transformers, f"{architecture}{head}")(options).double().eval()
    if reach is not None:
        long_texts.set_attention_window(network, reach)
    if packs:
        unpadded.enable_packing(network, HEADS[head])
    builder.select_attention(network, training=True)
    return network


@pytest.mark.parametrize(
    ("architecture", "head", "chunking"),
    pairwise(ARCHITECTURES, ["ForSequenceClassification", "ForTokenClassification"], CHUNKINGS),
)
def test_answers_and_gradients_are_those_with_padding(
    architecture: str, head: str, chunking: str, set_sizes: Callable[..., None]
) -> None:
    """Windows of 1 to 64 tokens; most are longer than the attention window."""
    set_sizes(GROUP_WASTE={"cpu": 500}, **CHUNKINGS[chunking])
    plain, packs = (make_network(architecture, head, REACH, packs) for packs in (False, True))
    assert plain.config._attn_implementation == long_texts.ATTENTION_NAME
    agree(plain, packs, head, plain.config.pad_token_id or 0)
    tokens, pad = rows(LENGTHS), plain.config.pad_token_id or 0
    without_window = step.forward(make_network(architecture, head, None, packs=True), tokens, pad, "fp32")
    assert float((without_window - step.forward(packs, tokens, pad, "fp32")).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("packs", [False, True])
def test_where_a_token_reaches_the_text_s_ends_all_read_all(packs: bool) -> None:
    tokens = rows(LENGTHS)
    actual = [
        step.forward(make_network("Bert", "ForSequenceClassification", reach, packs), tokens, 0, "fp32")
        for reach in (max(LENGTHS) - 1, None)
    ]
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-10, atol=1e-12)


def test_a_token_reads_its_neighbours_and_the_first_one_which_reads_all(set_sizes: Callable[..., None]) -> None:
    """The layout's pieces, told apart by values that are one for one token and zero for all others."""
    set_sizes(MAX_CHUNK_TOKENS=8)
    sizes = [37, 18, 9, 7, 5, 3, 1]
    options = pack_layout.make_layout(rows(sizes), 2, torch.device("cpu"), REACH)
    count = sum(sizes)
    unit = torch.eye(count, dtype=torch.float64).expand(1, 2, count, count)
    same = torch.zeros(1, 2, count, count, dtype=torch.float64)
    actual, _ = attention.packed_attention(torch.nn.Module(), same, same, unit, None, layout=options)
    assert options.global_tokens is not None
    assert (options.global_tokens.num_windows, options.global_tokens.num_keys) == (3, 37)
    window = torch.repeat_interleave(torch.tensor(sizes))
    places = torch.cat([torch.arange(size) for size in sizes])
    read = (window[:, None] == window) & long_texts.window_mask(places[:, None], places, REACH)
    expected = read / read.sum(1, keepdim=True).double()
    torch.testing.assert_close(actual[0].transpose(0, 1), expected.expand(2, -1, -1), rtol=1e-12, atol=0)


def test_what_a_text_costs_grows_with_its_length() -> None:
    def squares(tokens: int) -> int:
        options = pack_layout.make_layout(rows([tokens]), 1, torch.device("cpu"), 64)
        groups = [*options.windowed_groups(64), *([options.global_tokens] if options.global_tokens else [])]
        return sum(group.num_windows * group.width * group.num_keys for group in groups)

    assert squares(8192) == 64 * 128 * 257 + 8192
    assert squares(8192) == 4 * squares(2048)


# ------------------------------------------------------------------------------------------------------------ artefacts


def make_artifact(folder: Path, longest: int, reach: int = REACH) -> tuple[Path, Store]:
    """A network of random weights, for texts of so many tokens, with rows."""
    encoder = make_encoder(folder / "encoder")
    texts = [(text_of(1 + (longest * number) // 40, number), "ab"[number % 2]) for number in range(40)]
    data = {"data.path": str(write_rows(folder / "rows.csv", texts)), "data.max_tokens": longest}
    store = make_store(config.load_config("intent", data).recipe, encoder, folder)
    network = builder.build_network(
        encoder, TASK, ("a", "b"), 1, ModelConfig(max_position_embeddings=longest, attention_window=reach)
    )
    model_files.save_weights(network, folder / "artifact", guard_head=True)
    (folder / "artifact" / "tokenizer.json").write_bytes((encoder / "tokenizer.json").read_bytes())
    facts = {**store.manifest.head.facts, long_texts.FACT: reach}
    source = Artifact("long", TASK.name, ("a", "b"), longest, "torch", facts=facts)
    artifact.write_artifact(folder / "artifact", source, inference_predictor.compute_golden_logits)
    return folder / "artifact", store


def test_an_artefact_answers_as_it_was_trained_by_each_engine(tmp_path: Path) -> None:
    folder, store = make_artifact(tmp_path, 300)
    text, predictor = text_of(400), inference_predictor.Predictor.load(folder, threads=1)
    encoded = predictor.encode([text])[0]
    ids = np.asarray(encoded.ids, dtype=np.int32)
    packs: Any = builder.build_network(folder, TASK, ("a", "b"), 0).eval()  # by itself it knows how far it reads
    assert (len(ids), long_texts.attention_window(packs.config), unpadded.is_packed(packs)) == (300, REACH, True)
    size = np.array([len(ids)], dtype=np.int32)
    reference = step.forward(
        packs, single_window_batch(ids, size, size, np.zeros(1), np.zeros(1, dtype=np.uint64)), 0, "fp32"
    )
    scores = {item["label"]: item["score"] for item in predictor([text])[0]}
    assert [scores["a"], scores["b"]] == pytest.approx(reference.softmax(-1)[0].tolist(), abs=1e-5)
    int8 = quantizing.complete(quantizing.Made(folder, store), tmp_path / "int8", calibration_rows=8)
    exact, output = (item([text])[0] for item in (predictor, inference_predictor.Predictor.load(int8, threads=1)))
    assert [item["label"] for item in output] == [item["label"] for item in exact]
    assert [item["score"] for item in output] == pytest.approx([item["score"] for item in exact], abs=0.02)
    assert artifact.read_artifact(int8).facts[long_texts.FACT] == REACH


def test_others_refuse_its_head(tmp_path: Path) -> None:
    folder, _ = make_artifact(tmp_path, 60)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_student_reads_as_far_as_its_teacher(tmp_path: Path) -> None:
    folder, _ = make_artifact(tmp_path, 60)
    start = student.create_student(folder, DistillConfig(layers=1), tmp_path / "students")
    assert long_texts.attention_window(builder.build_network(start, TASK, ("a", "b"), 0).config) == REACH
    further = builder.build_network(start, TASK, ("a", "b"), 0, ModelConfig(attention_window=9))
    assert long_texts.attention_window(further.config) == 9


# ------------------------------------------------------------------------------------------------------------- settings


def test_memory_of_long_texts_is_foretold_without_their_squares(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path)
    options = ModelConfig(max_position_embeddings=4096, attention_window=32, attention_dropout=0.0)
    actual = [
        memory_estimate.trace_micro_batch(encoder, TASK, options, [length]).activations for length in (1024, 4096)
    ]
    assert actual[1] < 4.2 * actual[0]


def test_architectures_with_a_way_of_their_own_are_refused(tmp_path: Path) -> None:
    transformers.ModernBertConfig(max_position_embeddings=64).save_pretrained(tmp_path)
    [problem] = builder.check_architecture(tmp_path, 64, model_config=ModelConfig(attention_window=16))
    assert (problem.field, problem.value, problem.fix) == ("model.attention_window", 16, "write null")
    assert "attention of modernbert cannot be made local" in problem.reason
    data = write_rows(tmp_path / "rows.csv", [("one", "a"), ("two", "b")] * 20)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(np.int64(2).tobytes() + b"{}")
    overrides = {
        "model.name": str(tmp_path),
        "data.path": str(data),
        "data.max_tokens": 64,
        "model.attention_window": 16,
    }
    with pytest.raises(
        ConfigError, check=lambda error: [item.field for item in error.problems] == ["model.attention_window"]
    ):
        prepare.check_run(config.load_config("intent", overrides))


def test_it_changes_a_run_s_identity_where_it_is_set() -> None:
    plain = config.load_config("intent", {}).recipe
    assert "attention_window" not in plain.weight_settings()["model"]
    assert config.load_config("intent", {"model.attention_window": 128}).recipe.recipe_digest() != plain.recipe_digest()
