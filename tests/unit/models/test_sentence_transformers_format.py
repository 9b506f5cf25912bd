"""Sentence encoders: the pooling in their folders, and artifacts in their layout loaded by other programs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rtrain import config
from rtrain.compress import student as starting
from rtrain.config import DistillConfig, ModelConfig
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import Head
from rtrain.inference import artifact, predictor
from rtrain.models import builder, model_files, pooling
from rtrain.runs.export import find_sentence_pooling, write_model
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from tests.support.tiny import VOCABULARY, make_encoder, make_tokenizer

TASK = base.get_task("classification")
LABELS = ("a", "b", "c")
TEXTS = ("where is my parcel", "please cancel my subscription at the end of the month", "thank you")


def described(folder: Path, settings: dict[str, Any], path: str = "1_Pooling") -> Path:
    """A folder with nothing but what says how its encoder pools."""
    (folder / path).mkdir(parents=True)
    (folder / path / "config.json").write_text(json.dumps(settings))
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"path": path, "type": "sentence_transformers.models.Pooling"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


# ------------------------------------------------------------------------------------------------ a folder's pooling


@pytest.mark.parametrize(
    ("settings", "result"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["max", "cls"]}, "cls"),
        ({"pooling_mode": "lasttoken"}, None),
        ({"pooling_mode_lasttoken": True}, None),
        ({"word_embedding_dimension": 8}, "mean"),  # sentence-transformers' own default
    ],
)
@pytest.mark.parametrize("path", ["1_Pooling", "2_Pooling"])
def test_a_folder_says_how_its_encoder_pools(
    tmp_path: Path, settings: dict[str, Any], result: str | None, path: str
) -> None:
    assert pooling.read_pooling(described(tmp_path, settings, path)) == result
    if path == "1_Pooling":  # the file alone will do
        (tmp_path / "modules.json").unlink()
        assert pooling.read_pooling(tmp_path) == result


def test_other_folders_say_nothing(tmp_path: Path) -> None:
    assert pooling.read_pooling(make_encoder(tmp_path / "encoder")) is None
    folder = described(tmp_path / "s", {"pooling_mode": "cls"})
    (folder / "1_Pooling" / "config.json").unlink()
    assert pooling.read_pooling(folder) == "mean"  # sentence-transformers' default
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "x.SpladePooling"}]))
    assert pooling.read_pooling(folder) is None


@pytest.mark.parametrize(
    ("says", "task", "requested", "result"),
    [
        ("mean", "classification", "auto", "mean"),
        ("mean", "regression", "auto", "mean"),
        ("mean", "token_tags", "auto", "own"),
        ("mean", "masked_lm", "auto", "own"),
        ("mean", "classification", "own", "own"),
        ("cls", "classification", "auto", "own"),
        ("cls", "classification", "mean", "mean"),
        (None, "classification", "auto", "own"),
    ],
)
def test_auto_is_what_the_encoder_was_trained_for(
    tmp_path: Path, says: str | None, task: str, requested: str, result: str
) -> None:
    if says:
        described(tmp_path, {"pooling_mode": says})
    options = config.load_config("intent", {"task": task, "model.name": str(tmp_path), "model.pooling": requested})
    assert builder.resolve_pooling(options, tmp_path).recipe.model.pooling == result


def test_the_packaged_encoder_is_one_of_sentences(tmp_path: Path) -> None:
    assert config.load_config("intent").recipe.model.pooling == "auto"
    folder = builder.resolve_folder("minilm")
    assert pooling.read_pooling(folder) == "mean"
    assert builder.resolve_pooling(config.load_config("intent"), folder).recipe.model.pooling == "mean"
    # A copy of it that an earlier version had from the hub says nothing.
    assert builder.resolve_pooling(config.load_config("intent"), tmp_path).recipe.model.pooling == "mean"
    assert builder.resolve_pooling(config.load_config("entities"), folder).recipe.model.pooling == "own"


def with_dense(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"path": "2_Dense", "type": "x.models.Dense"}]))


def with_default_prompt(folder: Path) -> None:
    message = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(message))


def with_joined_pooling(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["mean", "max"]}))


@pytest.mark.parametrize("more", [with_dense, with_default_prompt, with_joined_pooling])
@pytest.mark.parametrize("says", ["mean", "cls"])
def test_what_else_makes_an_encoder_s_vectors_is_refused_until_it_is_left_out(
    tmp_path: Path, more: Callable[[Path], None], says: str
) -> None:
    more(described(tmp_path, {"pooling_mode": says}))
    names = {"model.name": str(tmp_path)}
    with pytest.raises(ConfigError) as caught:
        builder.resolve_pooling(config.load_config("intent", names), tmp_path)
    assert [problem.field for problem in caught.value.problems] == ["model.pooling"]
    for pool in ("mean", "own"):
        options = config.load_config("intent", {**names, "model.pooling": pool})
        assert builder.resolve_pooling(options, tmp_path).recipe.model.pooling == pool
    # A task without a vector of the text says nothing of how others should make one.
    tags = builder.resolve_pooling(config.load_config("entities", names), tmp_path).recipe
    assert find_sentence_pooling(tags, tmp_path) is None


@pytest.mark.parametrize(
    ("says", "task", "trained", "result"),
    [
        ("mean", "classification", "mean", "mean"),
        (None, "classification", "mean", "mean"),
        ("mean", "classification", "own", None),  # it reads the first token now
        ("cls", "classification", "own", "cls"),
        ("mean", "masked_lm", "own", "mean"),  # adapted to a domain, with the same pooling
        ("cls", "token_tags", "own", "cls"),
        (None, "masked_lm", "own", None),
    ],
)
def test_an_artefact_tells_others_what_its_encoder_is(
    tmp_path: Path, says: str | None, task: str, trained: str, result: str | None
) -> None:
    if says:
        described(tmp_path, {"pooling_mode": says})
    recipe = config.load_config("intent", {"task": task, "model.pooling": trained}).recipe
    assert find_sentence_pooling(recipe, tmp_path) == result


# ------------------------------------------------------------------------------------------------------- the artefact

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "electra": SMALL,
    "roberta": {**SMALL, "pad_token_id": 0},
    "distilbert": {"dim": 16, "hidden_dim": 16, "n_layers": 2, "n_heads": 2},
}


def family(kind: str, folder: Path) -> Path:
    """An encoder of a family with random weights, and with the tests' tokenizer in place of the family's."""
    make_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"})
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        instance = transformers.AutoConfig.for_model(
            kind, vocab_size=VOCABULARY, initializer_range=0.2, **FAMILIES[kind]
        )
        transformers.AutoModel.from_config(instance).save_pretrained(folder)
    return folder


def exported(network: Any, encoder: Path, folder: Path, mean: bool) -> Path:
    """An artefact of `network`, which started from `encoder`, as a run writes it."""
    facts = {pooling.FACT: "mean"} if mean else {}
    settings = {"model.pooling": "mean" if mean else "own", "data.max_tokens": 32, "data.window": None}
    write_model(network, encoder, folder, config.load_config("intent", settings).recipe, Head(LABELS, facts))
    instance = artifact.Artifact("x", "classification", LABELS, 32, "torch", facts=facts)
    artifact.write_artifact(
        folder, instance, predictor.compute_golden_logits, predictor.make_golden_inputs(TASK, Head(LABELS, facts))
    )
    return folder


@pytest.fixture(scope="module", params=list(FAMILIES))
def pooled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A network of each family that pools by mean, and its artefact."""
    folder = tmp_path_factory.mktemp(request.param)
    network: Any = builder.build_network(
        family(request.param, folder / "encoder"), TASK, LABELS, 0, ModelConfig(pooling="mean")
    ).eval()
    return network, exported(network, folder / "encoder", folder / "artifact", mean=True)


def test_transformers_alone_refuses_it(pooled: tuple[Any, Path]) -> None:
    """It would answer by the first token, or by a pooler that was never trained."""
    for settings in ({}, {"num_labels": 5}):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            transformers.AutoModelForSequenceClassification.from_pretrained(pooled[1], **settings)
    with pytest.raises(ValueError, match="ignore_mismatched_sizes"):
        transformers.pipeline("text-classification", model=str(pooled[1]))


def test_its_encoder_loads_in_sentence_transformers(pooled: tuple[Any, Path]) -> None:
    from sentence_transformers import SentenceTransformer

    network, folder = pooled
    theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    assert theirs.max_seq_length == 32
    tokenizer = load_tokenizer(folder, 32)
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            hidden = transformers.AutoModel.from_pretrained(folder)(
                input_ids=ids, attention_mask=torch.ones_like(ids)
            ).last_hidden_state[0]
            ours = network.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0, 0]
        torch.testing.assert_close(hidden.mean(0), ours, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(theirs.encode(text), ours.numpy(), rtol=1e-5, atol=1e-6)


def test_prompts_and_normalized_vectors_go_on(tmp_path: Path) -> None:
    import sentence_transformers

    encoder = family("bert", tmp_path / "encoder")
    described(encoder, {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True})
    modules = json.loads((encoder / "modules.json").read_text())
    modules.append({"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    overrides = [{"idx": place, "name": str(place), **module} for place, module in enumerate(modules)]
    (encoder / "modules.json").write_text(json.dumps(overrides))
    message = {"prompts": {"query": "where is "}, "similarity_fn_name": "dot"}
    (encoder / "config_sentence_transformers.json").write_text(json.dumps(message))
    network: Any = builder.build_network(encoder, TASK, LABELS, 0, ModelConfig(pooling="mean")).eval()
    folder = exported(network, encoder, tmp_path / "artifact", mean=True)
    before, after = (
        sentence_transformers.SentenceTransformer(str(item), device="cpu", local_files_only=True)
        for item in (encoder, folder)
    )
    assert after.similarity_fn_name == "dot"
    for prompt in (None, "query"):
        expected, actual = (item.encode(list(TEXTS), prompt_name=prompt) for item in (before, after))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(actual, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert pooling.find_unsupported(folder) == []


def test_ours_answers_with_it_and_trains_it_further(pooled: tuple[Any, Path], tmp_path: Path) -> None:
    network, folder = pooled
    ids = torch.tensor([load_tokenizer(folder, 32).encode(TEXTS[1]).ids])
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        expected = network(input_ids=ids, attention_mask=mask).logits[0]
    np.testing.assert_allclose(predictor.Predictor.load(folder).logits([TEXTS[1]])[0], expected, rtol=1e-5, atol=1e-6)
    # `--model RUN/artifact`: the pooling that it was trained with, and its own head, where the labels are the same.
    further = builder.resolve_pooling(config.load_config("intent", {"model.name": str(folder)}), folder).recipe.model
    assert further.pooling == "mean"
    for start in (folder, starting.create_student(folder, DistillConfig(layers=1), tmp_path)):
        repeated: Any = builder.build_network(start, TASK, LABELS, 9, ModelConfig(pooling="mean"))
        heads = {name for name in repeated.state_dict() if not name.startswith(network.base_model_prefix)}
        assert heads
        assert all(torch.equal(repeated.state_dict()[name], network.state_dict()[name]) for name in heads)
    other: Any = builder.build_network(folder, TASK, ("x", "y"), 9, further)
    last = [weight for name, weight in other.named_parameters() if name.endswith("weight")][-1]
    assert last.shape[0] == 2


def test_with_its_own_pooling_it_is_a_folder_of_transformers(tmp_path: Path) -> None:
    network: Any = builder.build_network(
        make_encoder(tmp_path / "encoder"), TASK, LABELS, 0, ModelConfig(pooling="own")
    )
    folder = exported(network, tmp_path / "encoder", tmp_path / "artifact", mean=False)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in network.state_dict().items())
    assert (
        builder.resolve_pooling(config.load_config("intent", {"model.name": str(folder)}), folder).recipe.model.pooling
        == "own"
    )


def test_a_head_of_another_shape_is_no_artefact_s(tmp_path: Path) -> None:
    """Read for answers, weights that do not fit are an error, never drawn anew."""
    network: Any = builder.build_network(make_encoder(tmp_path / "encoder"), TASK, LABELS, 0)
    network.save_pretrained(tmp_path / "a")
    document = json.loads((tmp_path / "a" / "config.json").read_text())
    document["id2label"] = {"0": "x", "1": "y"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, check=lambda error: error.code == "damaged"):
        model_files.load_network(transformers.AutoModelForSequenceClassification, tmp_path / "a")
