"""Which word embeddings have a gradient of rows, and what passes outside of an update find."""

import copy
from pathlib import Path

import pytest
import torch
import transformers

from rtrain.models import builder
from rtrain.parallel import sparse_embedding
from rtrain.parallel.ddp import Replicated
from rtrain.tasks import base
from tests.tiny import make_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def test_a_classifier_s_table_has_rows_and_a_tied_one_has_not(encoder: Path) -> None:
    classifier = builder.build(encoder, base.get("classification"), ("a", "b"), 0)
    found = sparse_embedding.table_of(classifier)
    assert found is not None
    assert found[0] == "bert.embeddings.word_embeddings.weight"
    tied = builder.build(encoder, base.get("masked_lm"), (), 0)
    assert sparse_embedding.table_of(tied) is None
    assert Replicated(tied).rows is None


def test_a_frozen_table_has_no_gradient(encoder: Path) -> None:
    classifier = builder.build(encoder, base.get("classification"), ("a", "b"), 0)
    classifier.get_input_embeddings().weight.requires_grad_(False)
    assert sparse_embedding.table_of(classifier) is None


def test_networks_of_other_kinds_are_left_alone() -> None:
    assert sparse_embedding.table_of(torch.nn.Linear(2, 2)) is None


def gradient_of(embedding: torch.nn.Embedding) -> torch.Tensor | None:
    return embedding.weight.grad


def test_look_ups_outside_of_an_update_are_those_of_any_embedding() -> None:
    embedding = torch.nn.Embedding(9, 3, padding_idx=0)
    touched = sparse_embedding.TouchedRows(embedding)
    ids = torch.tensor([[1, 4, 0], [4, 4, 8]])
    embedding(ids).square().sum().backward()
    expected = embedding.weight.grad
    assert expected is not None
    expected = expected.clone()
    assert not expected[0].any()
    touched.begin()
    assert gradient_of(embedding) is None
    touched.gathers = True
    embedding(ids).square().sum().backward()
    assert gradient_of(embedding) is None  # until the update is complete
    touched.complete(Replicated(torch.nn.Linear(1, 1)))
    found = gradient_of(embedding)
    assert found is not None
    assert torch.equal(found, expected)
    touched.begin()
    embedding(torch.tensor([2])).sum().backward()
    touched.complete(Replicated(torch.nn.Linear(1, 1)))
    assert found.any(dim=1).tolist() == [False, False, True] + [False] * 6


def test_a_copy_of_a_network_gathers_rows_of_its_own() -> None:
    network = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )
    other = copy.deepcopy(network)
    exchange, second = Replicated(network), Replicated(other)
    for one in (exchange, second):
        one.begin()
    with exchange.during(last=True):
        network(torch.tensor([[3, 4]])).logits.sum().backward()
    assert network.get_input_embeddings().weight.grad is not None
    assert other.get_input_embeddings().weight.grad is None
