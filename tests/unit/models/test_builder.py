"""Settings of a network, and refused models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rtrain.config import ModelConfig
from rtrain.core.errors import ConfigError
from rtrain.models import builder
from rtrain.tasks import base
from tests.support.tiny import make_encoder

TASK = base.get_task("classification")
IDS = torch.tensor([[1, 5, 6, 7, 2, 0], [1, 5, 2, 0, 0, 0]])
MASK = (IDS != 0).long()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.mark.parametrize(("requested_rates", "applied_rates"), [(None, 0.1), (0.0, 0.0), (0.25, 0.25)])
def test_attention_dropout_is_the_recipe_s_or_the_model_s(
    encoder: Path, requested_rates: float | None, applied_rates: float
) -> None:
    network = builder.build_network(encoder, TASK, ("a", "b"), 0, ModelConfig(attention_dropout=requested_rates))
    local_part = transformers.AutoConfig.from_pretrained(encoder).attention_probs_dropout_prob
    assert network.config.attention_probs_dropout_prob == (local_part if requested_rates is None else applied_rates)
    assert {module.p for name, module in network.named_modules() if name.endswith("attention.self.dropout")} == {
        local_part if requested_rates is None else applied_rates
    }


@pytest.mark.parametrize("requested_rates", [None, 0.0, 0.25])
def test_dropout_of_hidden_values_is_the_recipe_s_or_the_model_s(encoder: Path, requested_rates: float | None) -> None:
    network = builder.build_network(
        encoder, TASK, ("a", "b"), 0, ModelConfig(dropout=requested_rates, attention_dropout=0.5)
    )
    local_part = transformers.AutoConfig.from_pretrained(encoder).hidden_dropout_prob
    rates = {name: module.p for name, module in network.named_modules() if isinstance(module, torch.nn.Dropout)}
    attention = {name for name in rates if name.endswith("attention.self.dropout")}
    assert len(rates.keys() - attention) > 3  # embeddings, two of each layer, the head
    assert {rates[name] for name in rates.keys() - attention} == {
        local_part if requested_rates is None else requested_rates
    }
    assert {rates[name] for name in attention} == {0.5}


@pytest.mark.parametrize(
    ("config", "requested_name"),
    [(transformers.FNetConfig, {"attention_dropout": 0.0}), (transformers.T5Config, {"dropout": 0.0})],
)
def test_a_model_without_a_dropout_refuses_a_setting(
    tmp_path: Path, config: Any, requested_name: dict[str, Any]
) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as raised:
        builder.build_network(tmp_path, TASK, ("a", "b"), 0, ModelConfig(**requested_name))
    [problem] = raised.value.problems
    assert [problem.field] == [f"model.{name}" for name in requested_name]
    assert problem.code == "unsupported"


@pytest.mark.parametrize(
    ("kind", "settings", "is_refused"),
    [
        ("gpt2", {}, True),
        ("gpt2", {"pad_token_id": 0}, True),
        ("qwen2", {}, True),
        ("t5", {}, True),
        ("bart", {}, True),
        ("bert", {"is_decoder": True}, True),
        ("bert", {}, False),
        ("modernbert", {}, False),
        ("deberta-v2", {}, False),
        ("fnet", {}, False),
        ("xlnet", {}, False),
    ],
)
def test_models_that_write_text_are_refused_by_name(
    tmp_path: Path, kind: str, settings: dict[str, Any], is_refused: bool
) -> None:
    transformers.AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    fields = [problem.field for problem in builder.check_architecture(tmp_path, 16)]
    assert fields == ["model.name"] * is_refused
    assert builder.check_architecture(tmp_path, 16, is_resumed=True) == []


@pytest.mark.parametrize(("kind", "reads"), [("roberta", 18), ("mpnet", 18), ("bert", 20)])
def test_a_model_reads_as_many_tokens_as_it_has_positions_for(tmp_path: Path, kind: str, reads: int) -> None:
    """RoBERTa and its kin leave out those up to that of padding: 514 positions are 512 tokens."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    settings = transformers.AutoConfig.for_model(
        kind, vocab_size=9, pad_token_id=1, max_position_embeddings=20, **sizes
    )
    settings.save_pretrained(tmp_path)
    network = transformers.AutoModel.from_config(settings)
    network(input_ids=torch.full((1, reads), 5))
    with pytest.raises((IndexError, RuntimeError)):
        network(input_ids=torch.full((1, reads + 1), 5))
    assert builder.check_architecture(tmp_path, reads) == []
    [problem] = builder.check_architecture(tmp_path, reads + 1)
    assert (problem.field, problem.code) == ("data.max_tokens", "out_of_range")
    assert builder.check_architecture(tmp_path, 20, is_resumed=True) == []  # earlier versions allowed it
    assert builder.check_architecture(tmp_path, 21, is_resumed=True) != []


def test_attention_by_plain_products_answers_as_the_fused_one_does(encoder: Path) -> None:
    plain: Any = transformers.AutoModelForSequenceClassification.from_pretrained(encoder).eval()
    builder.select_attention(plain, training=True)
    assert torch.cuda.is_available() or plain.config._attn_implementation == "eager"
    fused: Any = transformers.AutoModelForSequenceClassification.from_pretrained(encoder, attn_implementation="sdpa")
    fused.load_state_dict(plain.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(
            plain(input_ids=IDS, attention_mask=MASK).logits,
            fused.eval()(input_ids=IDS, attention_mask=MASK).logits,
            rtol=1e-5,
            atol=1e-6,
        )
