"""The mean of a text's tokens in place of its first one's vector, for every way in which heads read an encoder."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rtrain import config
from rtrain.config import ModelConfig
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head
from rtrain.inference import artifact, predictor
from rtrain.models import builder, model_files, pooling
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from tests.support.tiny import make_encoder, make_tokenizer

TASK = base.get_task("classification")
IDS = torch.tensor([[1, 5, 6, 7, 2, 0], [1, 5, 2, 0, 0, 0]])
MASK = (IDS != 0).long()
SMALL: dict[str, Any] = {"vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def mean_of(network: Any) -> torch.Tensor:
    """The mean of the last layer over the tokens that are there, computed apart."""
    hidden: list[torch.Tensor] = []
    layers = network.base_model.transformer if network.config.model_type == "distilbert" else network.base_model.encoder
    handle = layers.register_forward_hook(lambda module, inputs, output: hidden.append(output[0]))
    network(input_ids=IDS, attention_mask=MASK)
    handle.remove()
    return torch.stack([rows[: int(mask.sum())].mean(0) for rows, mask in zip(hidden[0], MASK, strict=True)])


def test_a_bert_s_head_reads_the_mean(encoder: Path) -> None:
    network: Any = builder.build_network(encoder, TASK, ("a", "b"), 0, ModelConfig(pooling="mean")).eval()
    assert not [name for name in network.state_dict() if "pooler" in name]
    with torch.inference_mode():
        actual = network(input_ids=IDS, attention_mask=MASK).logits
        torch.testing.assert_close(actual, network.classifier(mean_of(network)))
        local_part = (
            builder.build_network(encoder, TASK, ("a", "b"), 0).eval()(input_ids=IDS, attention_mask=MASK).logits
        )
    assert (actual - local_part).abs().max() > 1e-3


def roberta() -> transformers.PreTrainedModel:
    options = transformers.RobertaConfig(hidden_size=16, intermediate_size=16, pad_token_id=0, **SMALL)
    return transformers.RobertaForSequenceClassification(options)


def distilbert() -> transformers.PreTrainedModel:
    options = transformers.DistilBertConfig(vocab_size=300, dim=16, hidden_dim=16, n_layers=2, n_heads=2)
    return transformers.DistilBertForSequenceClassification(options)


@pytest.mark.parametrize("make", [roberta, distilbert])
def test_heads_that_read_the_first_place_get_the_mean_there(make: Any) -> None:
    torch.manual_seed(0)
    network: Any = make().eval()
    read: list[torch.Tensor] = []
    pooling.pool_by_mean(network)
    first = network.classifier if hasattr(network.classifier, "out_proj") else network.pre_classifier
    first.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    with torch.inference_mode():
        network(input_ids=IDS, attention_mask=MASK)
        mean = mean_of(network)
    seen = read[0][:, 0] if read[0].ndim == 3 else read[0]
    torch.testing.assert_close(seen, mean)


def test_an_artefact_answers_as_it_was_trained(encoder: Path, tmp_path: Path) -> None:
    network: Any = builder.build_network(encoder, TASK, ("a", "b"), 0, ModelConfig(pooling="mean"))
    draft, head = tmp_path / "draft", Head(("a", "b"), {pooling.FACT: "mean"})
    network.save_pretrained(draft)
    make_tokenizer(draft)
    instance = artifact.Artifact(
        name="x", task="classification", labels=("a", "b"), max_tokens=16, engine="torch", facts=head.facts
    )
    artifact.write_artifact(draft, instance, predictor.compute_golden_logits, predictor.make_golden_inputs(TASK, head))
    [actual] = predictor.Predictor.load(draft).logits(["where is my parcel"])
    ids = torch.tensor([load_tokenizer(draft, 16).encode("where is my parcel").ids])
    with torch.inference_mode():
        expected = network.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_pool_is_refused(tmp_path: Path) -> None:
    network = transformers.BertModel(transformers.BertConfig(hidden_size=16, intermediate_size=16, **SMALL))
    with pytest.raises(UserError, check=lambda error: error.code == "unsupported"):
        pooling.pool_by_mean(network)
    [problem] = builder.check_model_settings(config.load_config("entities", {"model.pooling": "mean"}).recipe)
    assert (problem.field, problem.code) == ("model.pooling", "conflicting_settings")
    assert builder.check_model_settings(config.load_config("intent", {"model.pooling": "mean"}).recipe) == []


def test_networks_are_made_one_at_a_time(tmp_path: Path) -> None:
    """Two threads that load at once would leave transformers' own functions replaced, and tie no weights any more."""
    folder, inside, maximum = make_encoder(tmp_path / "encoder"), list[int](), list[int]()

    class Auto:
        @staticmethod
        def from_pretrained(*given: Any, **named: Any) -> Any:
            inside.append(1)
            time.sleep(0.05)
            maximum.append(len(inside))
            inside.pop()
            return transformers.AutoModelForMaskedLM.from_pretrained(*given, **named)

    with ThreadPoolExecutor(3) as pool:
        instance = list(pool.map(lambda number: model_files.load_network(Auto, folder)[0], range(3)))
    assert maximum == [1, 1, 1]
    assert all(item.get_output_embeddings().weight is item.get_input_embeddings().weight for item in instance)
