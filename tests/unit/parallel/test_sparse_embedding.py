"""Which word embeddings have a gradient of rows, and what passes outside of an update find."""

import copy
from pathlib import Path

import pytest
import torch
import transformers

from rtrain.models import builder
from rtrain.parallel import ddp
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks import base
from tests.support.tiny import make_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def test_a_classifier_s_table_has_rows_and_a_tied_one_has_not(encoder: Path) -> None:
    classifier = builder.build_network(encoder, base.get_task("classification"), ("a", "b"), 0)
    actual = ddp.find_embedding(classifier)
    assert actual is not None
    assert actual[0] == "bert.embeddings.word_embeddings.weight"
    tied = builder.build_network(encoder, base.get_task("masked_lm"), (), 0)
    assert ddp.find_embedding(tied) is None
    assert DDPStrategy(tied).touched_rows is None


def test_a_frozen_table_has_no_gradient(encoder: Path) -> None:
    classifier = builder.build_network(encoder, base.get_task("classification"), ("a", "b"), 0)
    classifier.get_input_embeddings().weight.requires_grad_(False)
    assert ddp.find_embedding(classifier) is None


def test_networks_of_other_kinds_are_left_alone() -> None:
    assert ddp.find_embedding(torch.nn.Linear(2, 2)) is None


def gradient_of(embedding: torch.nn.Embedding) -> torch.Tensor | None:
    return embedding.weight.grad


def test_look_ups_outside_of_an_update_are_those_of_any_embedding() -> None:
    embedding = torch.nn.Embedding(9, 3, padding_idx=0)
    touched = ddp.TouchedRows(embedding)
    ids = torch.tensor([[1, 4, 0], [4, 4, 8]])
    embedding(ids).square().sum().backward()
    expected = embedding.weight.grad
    assert expected is not None
    expected = expected.clone()
    assert not expected[0].any()
    touched.begin_step()
    assert gradient_of(embedding) is None
    touched.is_recording = True
    embedding(ids).square().sum().backward()
    assert gradient_of(embedding) is None  # until the update is complete
    touched.set_mean_gradient(DDPStrategy(torch.nn.Linear(1, 1)))
    actual = gradient_of(embedding)
    assert actual is not None
    assert torch.equal(actual, expected)
    touched.begin_step()
    embedding(torch.tensor([2])).sum().backward()
    touched.set_mean_gradient(DDPStrategy(torch.nn.Linear(1, 1)))
    assert actual.any(dim=1).tolist() == [False, False, True] + [False] * 6


def test_a_copy_of_a_network_gathers_rows_of_its_own() -> None:
    network = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )
    other = copy.deepcopy(network)
    exchange, second = DDPStrategy(network), DDPStrategy(other)
    for item in (exchange, second):
        item.begin_step()
    with exchange.micro_batch(is_last=True):
        network(torch.tensor([[3, 4]])).logits.sum().backward()
    assert network.get_input_embeddings().weight.grad is not None
    assert other.get_input_embeddings().weight.grad is None
