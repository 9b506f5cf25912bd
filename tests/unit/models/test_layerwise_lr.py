"""Layer-wise decay: the power of each weight, by architecture, and the learning rate in the kernel."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from rtrain.config import OptimConfig
from rtrain.core.errors import ConfigError
from rtrain.models import network_parts
from rtrain.trainer import optimizers

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
DECAY = 0.5
"""A power of 2: its powers are exact."""


def layers_of(prefix: str, layers: int) -> dict[str, int]:
    return {f"{prefix}.{number}.": layers - number for number in range(layers)}


BERT = transformers.BertConfig(**SMALL, num_hidden_layers=3)
# Prefix of a weight's name -> the power of the decay: 1 for the last of L layers, L + 1 for the embeddings.
POWERS: dict[str, tuple[transformers.PreTrainedConfig, dict[str, int]]] = {
    "bert": (BERT, {"bert.embeddings.": 4, **layers_of("bert.encoder.layer", 3), "bert.pooler.": 0, "classifier.": 0}),
    "albert": (  # all of its layers are one
        transformers.AlbertConfig(**SMALL, num_hidden_layers=3, embedding_size=4),
        {
            "albert.embeddings.": 2,
            "albert.encoder.embedding_hidden_mapping_in.": 2,
            **layers_of("albert.encoder.albert_layer_groups", 1),
            "albert.pooler.": 0,
            "classifier.": 0,
        },
    ),
    "modernbert": (
        transformers.ModernBertConfig(**SMALL, num_hidden_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        {"model.embeddings.": 4, **layers_of("model.layers", 3), "model.final_norm.": 0, "head.": 0, "classifier.": 0},
    ),
}


def power(name: str, powers: Mapping[str, int]) -> int:
    [actual] = [value for prefix, value in powers.items() if name.startswith(prefix)]
    return actual


@pytest.mark.parametrize("kind", POWERS)
def test_powers_by_architecture(kind: str) -> None:
    config, powers = POWERS[kind]
    network: Any = transformers.AutoModelForSequenceClassification.from_config(config)
    actual = network_parts.lr_factors(network, DECAY)
    names = {name: actual[parameter] for name, parameter in network.named_parameters()}
    assert names == {name: DECAY ** power(name, powers) for name in names}
    # No line of the table above is without its weights.
    assert all(any(name.startswith(prefix) for name in names) for prefix in powers)
    assert len(names) > 15


def test_weights_that_a_language_model_head_shares_are_embeddings() -> None:
    network: Any = transformers.BertForMaskedLM(BERT)
    decoder = network.cls.predictions.decoder
    assert decoder.weight is network.bert.embeddings.word_embeddings.weight
    actual = network_parts.lr_factors(network, DECAY)
    assert actual[decoder.weight] == DECAY**4
    assert actual[decoder.bias] == 1.0
    assert actual[network.cls.predictions.transform.dense.weight] == 1.0


def test_a_network_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, check=lambda error: [item.code for item in error.problems] == ["unsupported"]):
        optimizers.build_optimizer(torch.nn.Sequential(torch.nn.Linear(2, 2)), OptimConfig(layerwise_lr_decay=0.5))


# -------------------------------------------------------------------------------------------------------- in a training


def make_bert(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.BertForSequenceClassification(BERT).eval()


def test_groups_are_by_factor_and_decay() -> None:
    network = make_bert()
    optimizer = optimizers.build_optimizer(network, OptimConfig(lr=0.5, layerwise_lr_decay=DECAY, weight_decay=0.125))
    names = {parameter: name for name, parameter in network.named_parameters()}
    groups = optimizer.param_groups
    seen = [(group["lr_factor"], group["weight_decay"]) for group in groups]
    assert seen == [(DECAY**number, decay) for number in range(5) for decay in (0.125, 0.0)]
    for group in groups:
        assert {DECAY ** power(names[item], POWERS["bert"][1]) for item in group["params"]} == {group["lr_factor"]}
        assert {item.dim() > 1 for item in group["params"]} == {group["weight_decay"] > 0}
        assert group["lr"] == 0.5 * group["lr_factor"]
    assert sorted(names[item] for group in groups for item in group["params"]) == sorted(names.values())
    optimizers.set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in groups] == [0.25 * DECAY**number for number in range(5) for _ in range(2)]
