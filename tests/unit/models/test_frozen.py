"""A frozen encoder: not a bit of it changes, its pass costs no graph and has no dropout, and the head is trained."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rtrain.config import DistillConfig, ModelConfig
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head
from rtrain.models import builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks import base
from rtrain.trainer import losses, optimizers, step
from tests.support.tiny import _config, make_encoder, make_masked, make_tokenizer
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import LABELS, TASK, cut, make_network, make_rows, make_still_encoder, norm, trained
from tests.unit.trainer.test_trainer import UPDATES, Ran, fingerprint, recipe_of, start, update_name

ground = test_trainer.ground  # fixture


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout and a pooler."""
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def trained_names(network: Any) -> set[str]:
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


def hidden_of(network: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder's answer and the logits of one pass."""
    seen = []
    handle = network.base_model.register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state))
    logits = step.forward(network, rows, 0, "fp32")
    handle.remove()
    return seen[0], logits


# ---------------------------------------------------------------------------------------------------------------- parts


def test_the_head_s_gradient_is_that_of_a_whole_training(tmp_path: Path) -> None:
    still = make_still_encoder(tmp_path / "encoder")
    rows = make_rows(9)
    complete, every = trained(make_network(still), [rows])
    done, head = trained(make_network(still, "encoder"), cut(rows, [4, 5]))
    assert set(head) == {"classifier.weight", "classifier.bias"} < set(every)
    assert all((head[name] - every[name]).abs().max() < 1e-14 for name in head)
    assert done.loss == pytest.approx(complete.loss, rel=1e-12)
    assert done.gradient_norm == pytest.approx(norm(head), rel=1e-12)
    assert done.gradient_norm < complete.gradient_norm


def test_the_encoder_s_pass_has_no_graph_and_no_dropout(encoder: Path) -> None:
    rows = make_rows(4)
    plain: Any = builder.build_network(encoder, TASK, LABELS, seed=0)
    network: Any = builder.build_network(encoder, TASK, LABELS, seed=0, model_config=ModelConfig(freeze="encoder"))
    for item in (plain, network, copy.deepcopy(network)):
        item.train()
        first, second = hidden_of(item, rows), hidden_of(item, rows)
        assert (first[0].grad_fn is None) == (item is not plain)
        assert torch.equal(first[0], second[0]) == (item is not plain)
        assert not torch.equal(first[1], second[1])  # the head's own dropout
        assert first[1].requires_grad


def test_weights_that_the_folder_lacks_are_trained(tmp_path: Path) -> None:
    """As of a masked language model's encoder, which has no pooler."""
    make_tokenizer(tmp_path)
    transformers.BertModel(_config(), add_pooling_layer=False).save_pretrained(tmp_path)
    network: Any = builder.build_network(tmp_path, TASK, LABELS, seed=0, model_config=ModelConfig(freeze="encoder"))
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert trained_names(network) == {*pooler, "classifier.weight", "classifier.bias"}
    rows = make_rows(4)
    first, second = hidden_of(network.train(), rows)[0], hidden_of(network, rows)[0]
    assert torch.equal(first, second)
    assert first.grad_fn is None
    _, actual = trained(network, [rows])
    assert set(actual) == trained_names(network)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_a_tied_output_embedding_stays_with_the_encoder(tmp_path: Path, kind: str) -> None:
    make_masked(tmp_path, kind)
    task, head = base.get_task("masked_lm"), Head((), {"mask_id": 4, "special": [0, 1, 2, 3, 4], "vocabulary": 300})
    network: Any = builder.build_network(tmp_path, task, (), seed=0, model_config=ModelConfig(freeze="encoder"))
    names = trained_names(network)
    assert len(names) == 5  # a matrix and its bias, a normalisation's two vectors, a bias for each word
    assert not any(name.startswith(f"{network.base_model_prefix}.") for name in names)
    vectors = network.get_output_embeddings().weight
    assert vectors is network.get_input_embeddings().weight
    before = {name: value.clone() for name, value in network.state_dict().items()}
    tokens = task.prepare(make_rows(20), head, 0, 0)
    optimizer = optimizers.build_optimizer(network, recipe_of(tmp_path).optim)
    done = step.StepRunner(
        DDPStrategy(network), optimizer, losses.make_loss(task, DistillConfig(), head), pad_id=0
    ).run_step([tokens])
    assert np.isfinite(done.loss)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed >= names
    assert not any(name.endswith((".decoder.weight", "projector.weight")) for name in changed)
    assert not any(name.startswith(f"{network.base_model_prefix}.") for name in changed)


def test_a_model_without_a_head_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, check=lambda error: error.code == "unsupported"):
        builder.freeze_encoder(transformers.BertModel(_config()), ())

    class Bare(transformers.BertPreTrainedModel):
        def __init__(self, settings: transformers.BertConfig):
            super().__init__(settings)
            self.bert = transformers.BertModel(settings)
            self.post_init()  # type: ignore[no-untyped-call]

    with pytest.raises(UserError, check=lambda error: error.code == "unsupported"):
        builder.freeze_encoder(Bare(_config()), ())


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def straight(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    run = tmp_path_factory.mktemp("straight")
    return start(ground, run, save_every=1, freeze="encoder"), run


def test_a_run_changes_its_head_and_not_a_bit_of_its_encoder(ground: Path, straight: tuple[Ran, Path]) -> None:
    ran, run = straight
    assert ran.outcome is not None
    first = builder.build_network(ground / "encoder", TASK, LABELS, recipe_of(ground).train.seed).state_dict()
    read = load_file(ground / "encoder" / "model.safetensors")
    for weights in (load_file(run / "checkpoints" / update_name(UPDATES) / "model.safetensors"), first):
        encoder = {name.removeprefix("bert."): value for name, value in weights.items() if name.startswith("bert.")}
        assert encoder.keys() == read.keys()
        assert all(torch.equal(value, read[name]) for name, value in encoder.items())
    last = ran.network.state_dict()
    assert all(not torch.equal(last[name], first[name]) for name in ("classifier.weight", "classifier.bias"))


@pytest.mark.parametrize("kill", [1, 4])
def test_a_killed_frozen_run_resumes_to_the_undisturbed_run_bit_for_bit(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path, kill: int
) -> None:
    undisturbed, run = straight
    assert start(ground, tmp_path, save_every=1, kill=kill, freeze="encoder").outcome is None
    resumed = start(ground, tmp_path, save_every=1, freeze="encoder")
    assert resumed.recorder.of("started")[0]["step"] == kill
    assert resumed.outcome == undisturbed.outcome
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)
