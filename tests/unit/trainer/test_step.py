"""One update: the gradient of the mean loss over all of its rows, however they lie in passes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from rtrain.config import DistillConfig, ModelConfig
from rtrain.core.ragged import Head, TokenBatch, single_window_batch
from rtrain.models import builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks import base
from rtrain.trainer import losses, step
from tests.support.tiny import VOCABULARY, make_encoder

LABELS = ("a", "b", "c")
TASK = base.get_task("classification")
LOSS = losses.make_loss(TASK, DistillConfig())
Gradients = dict[str, torch.Tensor]


def make_rows(count: int, seed: int = 0) -> TokenBatch:
    """Rows of 1 to 20 random tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 21, count).astype(np.int32)
    return single_window_batch(
        ids=random.integers(5, VOCABULARY, lengths.sum()).astype(np.int32),
        window_lengths=lengths,
        pair_start=(lengths - lengths // 3).astype(np.int32),
        targets=random.integers(0, len(LABELS), count),
        row_ids=np.arange(count, dtype=np.uint64),
        teacher_logits=np.empty((count, 0), dtype=np.float32),
    )


def pick(tokens: TokenBatch, rows: Sequence[int]) -> TokenBatch:
    """Some of the rows."""
    return tokens.take(rows)


def cut(tokens: TokenBatch, sizes: Sequence[int]) -> list[TokenBatch]:
    """The rows in passes of the given sizes."""
    ends = np.cumsum(sizes)
    assert ends[-1] == len(tokens)
    return [pick(tokens, range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def make_still_encoder(folder: Path, layers: int = 2) -> Path:
    """The tiny encoder without dropout."""
    path = make_encoder(folder, layers=layers) / "config.json"
    document = json.loads(path.read_text())
    document |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    path.write_text(json.dumps(document))
    return folder


def make_network(encoder: Path, freeze: Literal["none", "encoder"] = "none") -> torch.nn.Module:
    """The encoder with a head of three labels, in float64."""
    network: torch.nn.Module = builder.build_network(
        encoder, TASK, LABELS, seed=0, model_config=ModelConfig(freeze=freeze)
    )
    return network.double().train()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def network(encoder: Path) -> torch.nn.Module:
    return make_network(encoder)


def gradients(network: torch.nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def trained(
    network: torch.nn.Module, passes: Sequence[TokenBatch], clip_norm: float | None = None
) -> tuple[step.StepResult, Gradients]:
    """What `run_step` reports, and the gradients it leaves; the weights stay."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    done = step.StepRunner(DDPStrategy(network), optimizer, LOSS, pad_id=0, max_grad_norm=clip_norm).run_step(passes)
    return done, gradients(network)


def by_hand(network: torch.nn.Module, tokens: TokenBatch) -> tuple[float, Gradients]:
    """The mean loss and its gradient, row after row, without padding, passes or an `DDPStrategy`."""
    starts = np.concatenate([[0], np.cumsum(tokens.window_lengths)])
    network.zero_grad()
    rows = []
    for row, target in enumerate(tokens.targets):
        ids = torch.tensor([tokens.ids[starts[row] : starts[row + 1]].tolist()])
        types = (torch.arange(ids.shape[1]) >= int(tokens.pair_start[row])).long()[None]
        logits = network(input_ids=ids, token_type_ids=types).logits[0]
        rows.append(torch.logsumexp(logits, dim=0) - logits[int(target)])
    mean = torch.stack(rows).mean()
    mean.backward()
    return mean.item(), gradients(network)


def distance(found: Gradients, expected: Gradients) -> float:
    """|found - expected| / |expected| over all tensors jointly."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return float(np.sqrt(apart / sum(float(value.square().sum()) for value in expected.values())))


def norm(found: Gradients) -> float:
    return float(torch.stack([value.square().sum() for value in found.values()]).sum().sqrt())


def test_gradient_is_that_of_the_mean_loss_over_all_rows(network: torch.nn.Module) -> None:
    rows = make_rows(13)
    loss, expected = by_hand(network, rows)
    done, actual = trained(network, cut(rows, [5, 1, 4, 3]))
    assert actual.keys() == {name for name, _ in network.named_parameters()}
    assert distance(actual, expected) < 1e-12
    for name, value in expected.items():  # each tensor alone too: a wrong small one would drown in the joint figure
        assert norm({name: actual[name] - value}) <= 1e-9 * max(norm({name: value}), 1e-6 * norm(expected)), name
    assert done.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("sizes", [[1] * 13, [12, 1], [1, 12], [6, 7], [2, 3, 8], [4, 4, 4, 1]])
def test_any_split_into_passes_gives_the_same_gradient(network: torch.nn.Module, sizes: list[int]) -> None:
    rows = make_rows(13)
    complete, expected = trained(network, [rows])
    done, actual = trained(network, cut(rows, sizes))
    assert distance(actual, expected) < 1e-12
    assert done.loss == pytest.approx(complete.loss, rel=1e-12)
    assert (done.micro_batches, done.rows) == (len(sizes), 13)


def test_what_an_update_reports(network: torch.nn.Module) -> None:
    rows = make_rows(6)
    passes = cut(rows, [4, 2])
    done, actual = trained(network, passes)
    assert passes[0].window_lengths.max() > passes[0].window_lengths.min()
    assert (done.rows, done.micro_batches, done.real_tokens) == (6, 2, int(rows.window_lengths.sum()))
    assert done.padded_tokens == done.real_tokens  # none is padding
    assert done.gradient_norm == pytest.approx(norm(actual), rel=1e-12)


def test_a_gradient_above_the_limit_is_scaled_to_it(network: torch.nn.Module) -> None:
    rows = make_rows(6)
    _, complete = trained(network, [rows])
    length = norm(complete)
    done, actual = trained(network, [rows], clip_norm=length / 4)
    # torch divides by (norm + 1e-6), so that the clipped norm is a millionth of a norm short.
    assert norm(actual) == pytest.approx(length / 4 * length / (length + 1e-6), rel=1e-12)
    assert distance({name: 4 * value for name, value in actual.items()}, complete) < 1e-5
    assert done.gradient_norm == pytest.approx(length, rel=1e-12)  # reported as it was


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_stops_before_the_weights_change(network: torch.nn.Module, value: float) -> None:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    class Broken(losses.RunLoss):
        def __call__(self, logits: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
            return super().__call__(logits, tokens) * value

    broken = Broken(TASK, DistillConfig(), Head())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.raises(step.NonFinite):
        step.StepRunner(DDPStrategy(network), optimizer, broken, pad_id=0).run_step([make_rows(3)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_rows_that_are_not_the_update_s_stop_before_the_weights_change(network: torch.nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    rows = make_rows(7)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    expected = step.sum_row_ids(rows.row_ids)
    for wrong in ([pick(rows, [0, 1, 2]), pick(rows, [4, 5, 6])], [*cut(rows, [4, 3]), pick(rows, [1])]):
        with pytest.raises(step.WrongRows):
            step.StepRunner(DDPStrategy(network), optimizer, LOSS, pad_id=0).run_step(wrong, expected_row_sum=expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    step.StepRunner(DDPStrategy(network), optimizer, LOSS, pad_id=0).run_step(
        cut(rows, [4, 3]), expected_row_sum=expected
    )


def test_row_sums_wrap_whatever_the_passes(network: torch.nn.Module) -> None:
    ids = np.array([2**64 - 1, 2**63, 5], dtype=np.uint64)
    assert step.sum_row_ids(ids) == -(2**63) + 4
    rows, optimizer = replace(make_rows(3), row_ids=ids), torch.optim.SGD(network.parameters(), lr=0.0)
    for parts in ([3], [2, 1], [1, 1, 1]):
        step.StepRunner(DDPStrategy(network), optimizer, LOSS, pad_id=0).run_step(
            cut(rows, parts), expected_row_sum=step.sum_row_ids(ids)
        )


def test_bf16_is_near_fp32_and_its_loss_is_fp32(network: torch.nn.Module) -> None:
    rows = make_rows(3)
    exact = step.forward(network.float(), rows, 0, "fp32")
    half = step.forward(network, rows, 0, "bf16")
    assert half.dtype == torch.bfloat16
    assert 0 < (half.float() - exact).abs().max().item() < 0.1
    assert LOSS(half, rows).dtype == torch.float32
    assert LOSS(exact.double(), rows).dtype == torch.float64
