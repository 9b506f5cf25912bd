"""Training the used rows of a word embedding gives the weights of training all of them."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain.config import Recipe, load_config
from rtrain.core.ragged import TokenBatch
from rtrain.models import network_parts, used_vocabulary
from rtrain.parallel.ddp import DDPStrategy
from rtrain.trainer import optimizers, step
from tests.support.tiny import VOCABULARY
from tests.unit.trainer.test_step import LOSS, cut, make_network, make_rows, make_still_encoder

STEPS = 40
SETTINGS = {"optim.weight_decay": 0.1, "optim.lr": 5e-3, "optim.max_grad_norm": 0.3, "optim.warmup": 0.1}


def make_recipe(**optim: Any) -> Recipe:
    return load_config("intent", {**SETTINGS, **{f"optim.{name}": value for name, value in optim.items()}}).recipe


def draw_rows(count: int, seed: int) -> TokenBatch:
    """Rows of the first half of the vocabulary."""
    rows = make_rows(count, seed)
    return TokenBatch(**{**vars(rows), "ids": 5 + (rows.ids - 5) % (VOCABULARY // 2 - 5)})


def train(network: torch.nn.Module, recipe: Recipe, touched_rows: bool) -> list[float]:
    """Train `STEPS` steps; return the norms of the gradients."""
    strategy = DDPStrategy(network, touched_rows=touched_rows)
    optimizer = optimizers.build_run_optimizer(strategy, recipe)
    runner = step.StepRunner(strategy, optimizer, LOSS, pad_id=0, max_grad_norm=recipe.optim.max_grad_norm)
    norms = []
    for number in range(STEPS):
        optimizers.set_learning_rate(optimizer, optimizers.learning_rate(recipe, number, STEPS))
        norms.append(runner.run_step(cut(draw_rows(9, number), [4, 5])).gradient_norm)
    return norms


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return make_network(make_still_encoder(tmp_path_factory.mktemp("encoder")))


@pytest.mark.parametrize("touched_rows", [True, False])
@pytest.mark.parametrize("optim", [{}, {"name": "radam"}, {"layerwise_lr_decay": 0.8}, {"weight_decay": 0.0}])
def test_weights_are_those_of_training_all_rows(
    initial: torch.nn.Module, optim: dict[str, Any], touched_rows: bool
) -> None:
    recipe, complete, restricted = make_recipe(**optim), copy.deepcopy(initial), copy.deepcopy(initial)
    used_ids = {int(number) for seed in range(STEPS) for number in draw_rows(9, seed).ids}
    vocabulary = used_vocabulary.select_vocabulary(restricted, used_ids | {VOCABULARY - 1}, 1)
    assert vocabulary is not None
    used_vocabulary.restrict_embedding(restricted, vocabulary)
    assert len(restricted.state_dict()[vocabulary.name]) == len(vocabulary.ids) < VOCABULARY
    expected_norms = train(complete, recipe, touched_rows)
    assert train(restricted, recipe, touched_rows) == pytest.approx(expected_norms, rel=1e-11)
    start, expected, weights = (
        {name: value.detach() for name, value in network.named_parameters()}
        for network in (initial, complete, restricted)
    )
    table: Any = initial.get_input_embeddings()  # type: ignore[operator]
    factor = network_parts.lr_factors(initial, recipe.optim.layerwise_lr_decay)[table.weight]
    decay = optimizers.decay_product(recipe, STEPS, STEPS, factor)
    assert (decay == 1.0) is (recipe.optim.weight_decay == 0.0)
    weights[vocabulary.name] = vocabulary.expand_rows(weights[vocabulary.name], start[vocabulary.name], decay)
    assert weights.keys() == expected.keys()
    moved = torch.cat([(expected[name] - start[name]).flatten() for name in expected]).norm()
    apart = torch.cat([(expected[name] - weights[name]).flatten() for name in expected]).norm()
    assert apart <= 1e-10 * moved
    unused = np.setdiff1d(np.arange(VOCABULARY), vocabulary.ids)
    assert torch.allclose(weights[vocabulary.name][unused], expected[vocabulary.name][unused], rtol=1e-12, atol=0)


def test_an_unused_token_is_refused_and_padding_is_kept(initial: torch.nn.Module) -> None:
    network = copy.deepcopy(initial)
    vocabulary = used_vocabulary.select_vocabulary(network, {7, 8}, 1)
    assert vocabulary is not None
    assert vocabulary.ids.tolist() == [0, 7, 8]
    used_vocabulary.restrict_embedding(network, vocabulary)
    embedding: Any = network.get_input_embeddings()  # type: ignore[operator]
    table: Any = initial.get_input_embeddings()  # type: ignore[operator]
    assert torch.equal(embedding(torch.tensor([8, 0, 7])), table(torch.tensor([8, 0, 7])))
    with pytest.raises(IndexError):
        embedding(torch.tensor([9]))


def test_a_gradient_is_expanded_with_zeros() -> None:
    vocabulary = used_vocabulary.UsedVocabulary("weight", np.array([1, 3]), 5)
    gradient = vocabulary.expand_gradient(torch.ones(2, 4))
    assert gradient.sum(dim=1).tolist() == [0, 4, 0, 4, 0]


def test_frozen_tables_and_those_with_few_unused_weights_are_trained_whole(tmp_path: Path) -> None:
    encoder = make_still_encoder(tmp_path)
    assert used_vocabulary.select_vocabulary(make_network(encoder, "encoder"), {1}, 1) is None
    network = make_network(encoder)
    width = network.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    unused = (VOCABULARY - 2) * width
    assert used_vocabulary.select_vocabulary(network, {1}, unused) is not None
    assert used_vocabulary.select_vocabulary(network, {1}, unused + 1) is None
    assert used_vocabulary.select_vocabulary(network, range(VOCABULARY), 0) is None
