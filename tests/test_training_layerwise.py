"""Layer-wise decay: which power each weight has, by architecture, and what becomes of it on the way to the kernel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rtrain.checkpoints import checkpoint
from rtrain.checkpoints.checkpoint import State
from rtrain.config import Model, Optim
from rtrain.errors import ConfigError
from rtrain.network import model
from rtrain.tasks import base
from rtrain.training import layerwise, optim
from tests.tiny import make_encoder

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
DECAY = 0.5
"""A power of 2: its powers are exact."""


def layers_of(prefix: str, layers: int) -> dict[str, int]:
    return {f"{prefix}.{number}.": layers - number for number in range(layers)}


BERT = transformers.BertConfig(**SMALL, num_hidden_layers=3)
# What each weight's name begins with -> the power of the decay. Of L layers the last is 1, the embeddings L + 1.
POWERS: dict[str, tuple[transformers.PreTrainedConfig, dict[str, int]]] = {
    "bert": (
        BERT,
        {"bert.embeddings.": 4, **layers_of("bert.encoder.layer", 3), "bert.pooler.": 0, "classifier.": 0},
    ),
    "roberta": (
        transformers.RobertaConfig(**SMALL, num_hidden_layers=2),
        {"roberta.embeddings.": 3, **layers_of("roberta.encoder.layer", 2), "classifier.": 0},
    ),
    "distilbert": (
        transformers.DistilBertConfig(vocab_size=50, dim=8, n_heads=2, hidden_dim=16, n_layers=4),
        {
            "distilbert.embeddings.": 5,
            **layers_of("distilbert.transformer.layer", 4),
            "pre_classifier.": 0,
            "classifier.": 0,
        },
    ),
    "electra": (
        transformers.ElectraConfig(**SMALL, num_hidden_layers=3, embedding_size=4),
        {
            "electra.embeddings.": 4,
            "electra.embeddings_project.": 4,
            **layers_of("electra.encoder.layer", 3),
            "classifier.": 0,
        },
    ),
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
        {
            "model.embeddings.": 4,
            **layers_of("model.layers", 3),
            "model.final_norm.": 0,
            "head.": 0,
            "classifier.": 0,
        },
    ),
}


def power(name: str, powers: Mapping[str, int]) -> int:
    [found] = [value for prefix, value in powers.items() if name.startswith(prefix)]
    return found


@pytest.mark.parametrize("kind", POWERS)
def test_powers_by_architecture(kind: str) -> None:
    config, powers = POWERS[kind]
    network: Any = transformers.AutoModelForSequenceClassification.from_config(config)
    found = layerwise.factors(network, DECAY)
    names = {name: found[parameter] for name, parameter in network.named_parameters()}
    assert names == {name: DECAY ** power(name, powers) for name in names}
    # No line of the table above is without its weights.
    assert all(any(name.startswith(prefix) for name in names) for prefix in powers)
    assert len(names) > 15


def test_without_decay_all_factors_are_1_for_any_network() -> None:
    network = torch.nn.Linear(2, 2)
    assert layerwise.factors(network, 1.0) == {network.weight: 1.0, network.bias: 1.0}


def test_weights_that_a_language_model_head_shares_are_embeddings() -> None:
    network: Any = transformers.BertForMaskedLM(BERT)
    decoder = network.cls.predictions.decoder
    assert decoder.weight is network.bert.embeddings.word_embeddings.weight
    found = layerwise.factors(network, DECAY)
    assert found[decoder.weight] == DECAY**4
    assert found[decoder.bias] == 1.0
    assert found[network.cls.predictions.transform.dense.weight] == 1.0


def test_a_network_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        optim.build(torch.nn.Sequential(torch.nn.Linear(2, 2)), Optim(layer_decay=0.5))
    assert str(caught.value) == (
        "optim.layer_decay=0.5: Sequential has no list of layers, by which the learning rate could fall; write 1.0"
    )


# -------------------------------------------------------------------------------------------------------- in a training


def make_bert(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.BertForSequenceClassification(BERT).eval()


def train(network: Any, optimizer: torch.optim.Optimizer, first: int, updates: int) -> None:
    for number in range(first, first + updates):
        ids = torch.arange(1, 13).reshape(2, 6) + number
        optim.set_rate(optimizer, 0.01 / (number + 1))
        optimizer.zero_grad()
        network(input_ids=ids).logits.square().sum().backward()
        optimizer.step()


def test_groups_are_by_factor_and_decay() -> None:
    network = make_bert()
    optimizer = optim.build(network, Optim(lr=0.5, layer_decay=DECAY, weight_decay=0.125))
    names = {parameter: name for name, parameter in network.named_parameters()}
    groups = optimizer.param_groups
    seen = [(group["lr_factor"], group["weight_decay"]) for group in groups]
    assert seen == [(DECAY**number, decay) for number in range(5) for decay in (0.125, 0.0)]
    for group in groups:
        assert {DECAY ** power(names[one], POWERS["bert"][1]) for one in group["params"]} == {group["lr_factor"]}
        assert {one.dim() > 1 for one in group["params"]} == {group["weight_decay"] > 0}
        assert group["lr"] == 0.5 * group["lr_factor"]
    assert sorted(names[one] for group in groups for one in group["params"]) == sorted(names.values())
    optim.set_rate(optimizer, 0.25)
    assert [group["lr"] for group in groups] == [0.25 * DECAY**number for number in range(5) for _ in range(2)]


def test_the_first_step_of_a_weight_is_as_long_as_its_learning_rate() -> None:
    """AdamW moves every weight by lr x sign(g) at first, so that steps are the learning rates themselves."""
    network = make_bert()
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    optimizer = optim.build(network, Optim(layer_decay=DECAY, weight_decay=0.0))
    optim.set_rate(optimizer, 0.5)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in network.named_parameters():
        step = 0.5 * DECAY ** power(name, POWERS["bert"][1])
        assert torch.allclose(before[name] - parameter, torch.tensor(step), rtol=1e-5, atol=0), name


@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_a_checkpoint_resumes_bit_for_bit_and_needs_no_groups(tmp_path: Path, name: str) -> None:
    """The file has moments by parameter name; the groups come from the settings, also from those of a mistaken run."""
    chosen = Optim.model_validate({"name": name, "layer_decay": DECAY})
    network = make_bert()
    optimizer = optim.build(network, chosen)
    train(network, optimizer, 0, 4)
    path = checkpoint.save(tmp_path, network, optimizer, State(4, "00", None, None))
    ends = []
    for settings in (chosen, Optim.model_validate({"name": name, "layer_decay": 0.25})):
        other = make_bert(seed=1)
        resumed = optim.build(other, settings)
        checkpoint.load(path, other, resumed)
        train(other, resumed, 4, 4)
        ends.append(other.state_dict())
    train(network, optimizer, 4, 4)
    assert [all(torch.equal(value, end[key]) for key, value in network.state_dict().items()) for end in ends] == [
        True,
        False,
    ]


@pytest.mark.parametrize("pooling", ["own", "mean"])
def test_of_a_frozen_encoder_the_head_learns_at_the_full_rate(tmp_path: Path, pooling: str) -> None:
    chosen = Model.model_validate({"freeze": "encoder", "pooling": pooling})
    network: Any = model.build(make_encoder(tmp_path / "e"), base.get("classification"), ("a", "b"), 0, chosen)
    groups = optim.build(network, Optim(layer_decay=DECAY)).param_groups
    assert {group["lr_factor"] for group in groups} == {1.0}
    assert {one for group in groups for one in group["params"]} == set(network.classifier.parameters())
