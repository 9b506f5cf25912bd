"""Other devices, tested without one: tensors move to the model's device, kernels get valid arguments.

torch's `meta` device computes shapes alone, and refuses operations with tensors of another device as a GPU does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.core import env
from rtrain.core.errors import ConfigError
from rtrain.models import attention, builder, device, pack_layout
from rtrain.tasks import base
from rtrain.torch_internals import FlashOptions, Qkv, SequenceBounds
from rtrain.trainer import step
from tests.support.packing import LENGTHS, rows
from tests.support.tiny import make_encoder

META = torch.device("meta")
HEADS, DIM = 3, 8


def test_transports_are_named_by_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device.process_group_backend(kind) for kind in ("cpu", "gpu")] == ["gloo", "cpu:gloo,cuda:nccl"]
    monkeypatch.setenv(env.FAKE_GPUS_ENV, "1")  # they are not there
    assert [device.process_group_backend(kind) for kind in ("cpu", "gpu")] == ["gloo", "gloo"]
    assert device.can_use_gpus()


# ------------------------------------------------------------------------------------------------- the run's own choice


@pytest.mark.parametrize(
    ("requested", "workers", "min_workers", "gpus", "choice"),
    [
        ("auto", 2, None, 0, ("cpu", 2)),
        ("auto", 2, None, 2, ("gpu", 2)),
        ("auto", 2, None, 8, ("gpu", 2)),
        ("auto", 2, None, 1, ("gpu", 1)),
        ("gpu", 4, 2, 3, ("gpu", 3)),
        ("cpu", 2, None, 8, ("cpu", 2)),
    ],
)
def test_gpus_are_taken_where_there_are_any(
    requested: str, workers: int, min_workers: int | None, gpus: int, choice: tuple[str, int]
) -> None:
    actual = device.choose_device(requested, workers, min_workers, gpus, gpus_usable=True)
    assert (actual.device, actual.workers) == choice
    assert bool(actual.message) == (actual.workers < workers)


def test_gpus_that_this_torch_cannot_use_are_told_of_and_refused_where_they_were_asked_for() -> None:
    actual = device.choose_device("auto", 2, None, 4, gpus_usable=False)
    assert (actual.device, actual.workers) == ("cpu", 2)
    assert actual.message
    with pytest.raises(ConfigError, check=lambda error: [item.code for item in error.problems] == ["unsupported"]):
        device.choose_device("gpu", 2, None, 4, gpus_usable=False)


@pytest.mark.parametrize(("min_workers", "gpus"), [(None, 0), (2, 1)])
def test_gpus_that_cannot_be_had_are_refused(min_workers: int | None, gpus: int) -> None:
    for usable in {True, bool(gpus)}:  # without GPUs, the build of torch is not the reason
        with pytest.raises(ConfigError, check=lambda error: [item.code for item in error.problems] == ["too_few_gpus"]):
            device.choose_device("gpu", 4, min_workers, gpus, gpus_usable=usable)


@pytest.mark.parametrize("task", ["classification", "token_tags"])
def test_passes_put_their_tensors_where_the_model_is(tmp_path: Path, task: str) -> None:
    """Packed models only: for padding Transformers reads values of the mask, and `meta` has no values."""
    labels = ("O", "B-x", "I-x") if task == "token_tags" else ("a", "b")
    network: Any = builder.build_network(make_encoder(tmp_path / "encoder"), base.get_task(task), labels, 0)
    builder.move_to_device(network, META)
    network.train()
    logits = step.forward(network, rows(LENGTHS), 0, "fp32")
    assert logits.shape == (sum(LENGTHS) if task == "token_tags" else len(LENGTHS), len(labels))
    logits.sum().backward()
    assert all(parameter.grad.device == META for parameter in network.parameters() if parameter.grad is not None)


def test_a_model_that_pads_trains_by_plain_products_on_a_cpu_alone(tmp_path: Path) -> None:
    network: Any = builder.build_network(
        make_encoder(tmp_path / "encoder"), base.get_task("classification"), ("a", "b"), 0, pack=False
    )
    assert network.config._attn_implementation == "eager"
    builder.select_attention(network, training=False)
    assert network.config._attn_implementation == "sdpa"
    builder.move_to_device(network, torch.device("cpu"))
    assert network.config._attn_implementation == "eager"
    builder.move_to_device(network, META)
    assert network.config._attn_implementation == "sdpa"


# ----------------------------------------------------------------------------------------------------------- attention

HOPPER, TURING = (9, 0), (7, 5)


@pytest.mark.parametrize(
    ("device_type", "capability", "dtype", "dim", "dropout", "trains", "kernel"),
    [
        ("cuda", HOPPER, "bfloat16", 64, 0.0, True, "varlen"),
        ("cuda", HOPPER, "float16", 32, 0.0, False, "varlen"),
        ("cuda", (8, 0), "bfloat16", 256, 0.0, True, "varlen"),
        ("cuda", HOPPER, "bfloat16", 64, 0.1, True, "varlen"),
        ("cuda", HOPPER, "float32", 64, 0.0, True, "fused"),
        ("cuda", TURING, "float16", 64, 0.0, True, "fused"),  # flash attention begins with Ampere
        ("cuda", HOPPER, "bfloat16", 60, 0.0, True, "fused"),
        ("cuda", HOPPER, "bfloat16", 264, 0.0, True, "fused"),
        ("cpu", (0, 0), "bfloat16", 64, 0.0, True, "plain"),
        ("cpu", (0, 0), "bfloat16", 64, 0.1, True, "plain"),
        ("cpu", (0, 0), "bfloat16", 64, 0.0, False, "fused"),
        ("meta", (0, 0), "bfloat16", 64, 0.0, True, "fused"),
    ],
)
def test_attention_by_device_and_format(
    device_type: str, capability: tuple[int, int], dtype: str, dim: int, dropout: float, trains: bool, kernel: str
) -> None:
    assert attention.select_kernel(device_type, capability, dtype, dim, dropout=dropout, training=trains) == kernel


def window_after_window(qkv: Qkv, bounds: SequenceBounds, options: FlashOptions) -> tuple[torch.Tensor, ...]:
    """`flash_forward`, one window after another: the kernel itself runs on GPUs only."""
    (query, key, value), (cu_seqlens, _, max_seqlen, _) = qkv, bounds
    assert (cu_seqlens.dtype, int(cu_seqlens[-1]), options) == (torch.int32, len(query), FlashOptions(0.3))
    spans = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
    assert max_seqlen == max(end - begin for begin, end in spans)
    actual = []
    for begin, end in spans:
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[begin:end]) * options.scale
        actual.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[begin:end]))
    return (torch.cat(actual),)


def vectors(tokens: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As a layer of Transformers makes them: [1, heads, tokens, dim], views of [1, tokens, heads, dim]."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, tokens, HEADS, DIM, **options).transpose(1, 2) for _ in range(3))
    return query, key, value


def test_a_variable_length_kernel_answers_as_the_padded_groups_do(set_sizes: Callable[..., None]) -> None:
    set_sizes(GROUP_WASTE={"cpu": 500})
    options = pack_layout.make_layout(rows(LENGTHS), HEADS, torch.device("cpu"))
    assert len(options.groups) > 2
    answers, gradients = [], []
    for kernel in (None, window_after_window):
        query, key, value = parts = [
            part.detach().requires_grad_() for part in vectors(sum(LENGTHS), dtype=torch.float64)
        ]
        if kernel is None:
            answer, _ = attention.packed_attention(
                torch.nn.Module(), query, key, value, None, scaling=0.3, layout=options
            )
        else:
            answer = attention.varlen_attention((query, key, value), options, FlashOptions(0.3), kernel)
        answer.square().sum().backward()
        answers.append(answer)
        gradients.append([part.grad for part in parts])
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-10, atol=1e-12)
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rate", "window", "has_band"), [(0.0, None, False), (0.1, 2, False), (0.0, 16, True), (0.1, 16, True)]
)
def test_torch_s_variable_length_kernel_takes_what_it_is_given(rate: float, window: int | None, has_band: bool) -> None:
    """Shapes alone, forward and backward: the kernel itself runs on a GPU."""
    lengths = [300, 40, 3] if has_band else LENGTHS
    layout = pack_layout.make_layout(rows(lengths), HEADS, META, window if has_band else None)
    parts = [part.detach().requires_grad_() for part in vectors(sum(lengths), dtype=torch.bfloat16, device=META)]
    answer = attention.varlen_attention((parts[0], parts[1], parts[2]), layout, FlashOptions(0.3, rate, window))
    assert (answer.shape, answer.dtype) == ((1, sum(lengths), HEADS, DIM), torch.bfloat16)
    answer.float().sum().backward()
    assert [part.grad.shape for part in parts if part.grad is not None] == [parts[0].shape] * 3
    assert {"groups", "global_tokens"}.isdisjoint(vars(layout))  # this kernel does not read them
