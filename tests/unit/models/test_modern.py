"""ModernBERT without padding: local and global attention, rotary positions; answers and gradients are those with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers

from rtrain.config import ModelConfig
from rtrain.models import attention, builder, pack_layout, unpadded
from rtrain.tasks import base
from rtrain.trainer import step
from tests.support.packing import HEADS, LENGTHS, WORDS, agree, pairwise, rows

REACH = 4
"""Tokens that a token reads on either side, in two layers of three."""


def config(**settings: Any) -> transformers.ModernBertConfig:
    return transformers.ModernBertConfig(
        **{
            **{"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4},
            **{"num_attention_heads": 3, "max_position_embeddings": 8192, "local_attention": 2 * REACH},
            **{"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3},
            # Wider than usual, so that a token which reads one too many has visibly another answer.
            **{"initializer_range": 0.3, "num_labels": 4},
            **settings,
        }
    )


def pair(head: str, **settings: Any) -> tuple[Any, Any]:
    """A network and its packed twin, in float64, without dropout. The padded one uses torch's fused attention: plain
    products answer padding without visible keys with NaN."""
    instance = []
    for packs in (False, True):
        torch.manual_seed(1)
        options = config(**settings)
        options.num_labels = 2 if head == "ForQuestionAnswering" else 4
        network: Any = getattr(transformers, f"ModernBert{head}")(options).double().eval()
        network.set_attn_implementation("sdpa")
        if packs:
            assert unpadded.supports_packing(network)
            reads = "mean" if settings.get("classifier_pooling") == "mean" else "first"
            unpadded.enable_packing(network, reads if HEADS[head] == "first" else HEADS[head])
        instance.append(network)
    return instance[0], instance[1]


CHUNKINGS = {
    "whole": {"MAX_CHUNK_TOKENS": 128, "MAX_PLAIN_CONTEXT": 512},
    "pieces": {"MAX_CHUNK_TOKENS": 2 * REACH, "MAX_PLAIN_CONTEXT": 512},
    "fused": {"MAX_CHUNK_TOKENS": 2 * REACH, "MAX_PLAIN_CONTEXT": 1},
}
"""Whole windows under a mask; chunks; chunks by torch's kernel."""


@pytest.mark.parametrize(("head", "chunking", "pooling"), pairwise(HEADS, CHUNKINGS, ["cls", "mean"]))
def test_answers_and_gradients_are_those_with_padding(
    head: str, chunking: str, pooling: str, set_sizes: Callable[..., None]
) -> None:
    """Windows of 1 to 64 tokens; most are longer than the attention window."""
    set_sizes(GROUP_WASTE={"cpu": 500}, **CHUNKINGS[chunking])
    plain, packs = pair(head, classifier_pooling=pooling)
    agree(plain, packs, head)


def test_a_token_reads_no_further_than_it_may(set_sizes: Callable[..., None]) -> None:
    """The layout's pieces, told apart by values that are one for one token and zero for all others."""
    set_sizes(MAX_CHUNK_TOKENS=8)
    sizes = [37, 18, 9, 5, 3, 1]
    options = pack_layout.make_layout(rows(sizes), 2, torch.device("cpu"))
    groups = options.windowed_groups(REACH)
    assert [group.has_shared_keys for group in groups] == [True, False]
    assert (groups[0].num_windows, groups[0].width, groups[0].num_keys) == (5 + 3 + 2, 8, 8 + 2 * REACH)
    count = sum(sizes)
    unit = torch.eye(count, dtype=torch.float64).expand(1, 2, count, count)
    same = torch.zeros(1, 2, count, count, dtype=torch.float64)
    actual, _ = attention.packed_attention(
        torch.nn.Module(), same, same, unit, None, layout=options, sliding_window=REACH + 1
    )
    places, window = torch.arange(count), torch.repeat_interleave(torch.tensor(sizes))
    is_near = (window[:, None] == window) & ((places[:, None] - places).abs() <= REACH)
    expected = is_near / is_near.sum(1, keepdim=True).double()
    torch.testing.assert_close(actual[0].transpose(0, 1), expected.expand(2, -1, -1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("reads", "dropout", "trains", "kernel"),
    [(512, 0.0, True, "plain"), (513, 0.0, True, "fused"), (513, 0.1, True, "plain"), (9, 0.0, False, "fused")],
)
def test_long_windows_are_trained_by_the_kernel_that_keeps_no_square(
    reads: int, dropout: float, trains: bool, kernel: str
) -> None:
    options = attention.select_kernel("cpu", (0, 0), "float32", 64, dropout=dropout, training=trains, max_context=reads)
    assert options == kernel


def test_a_pass_without_rows_has_a_gradient_of_zero() -> None:
    _, packs = pair("ForSequenceClassification")
    (step.forward(packs, step.idle_micro_batch(0), 0, "fp32") * 0).sum().backward()
    gradients = [item.grad for item in packs.parameters() if item.grad is not None]
    assert gradients
    assert not any(bool(item.any()) for item in gradients)


@pytest.mark.parametrize("training", [True, False])
def test_padding_that_reads_no_text_answers_with_numbers(training: bool) -> None:
    """Padding longer than the attention window, in an unpacked network."""
    torch.manual_seed(1)
    network: Any = transformers.ModernBertForSequenceClassification(config()).eval()
    builder.select_attention(network, training=training)
    tokens = rows([40, 2])
    actual = step.forward(network, tokens, 0, "fp32")
    assert torch.isfinite(actual).all()
    reference = step.forward(network, tokens.take([1]), 0, "fp32")
    torch.testing.assert_close(actual[1:], reference, rtol=1e-5, atol=1e-5)


def test_a_packed_network_may_be_asked_with_padding_and_without_a_mask() -> None:
    plain, packs = pair("ForSequenceClassification")
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, WORDS, (2, 40)))
    mask = (torch.arange(40) < torch.tensor([[40], [7]])).long()
    with torch.inference_mode():
        for overrides in ({}, {"attention_mask": mask}):
            torch.testing.assert_close(
                packs(ids, **overrides).logits, plain(ids, **overrides).logits, rtol=1e-10, atol=1e-12
            )


@pytest.mark.parametrize("classifier_pooling", ["cls", "mean"])
@pytest.mark.parametrize("pooling", ["own", "mean"])
def test_heads_read_the_requested_pooling(
    tmp_path: Path, classifier_pooling: str, pooling: Literal["own", "mean"]
) -> None:
    """A head that takes the mean by itself, and `model.pooling=mean`; packed and padded."""
    torch.manual_seed(1)
    transformers.ModernBertModel(config(classifier_pooling=classifier_pooling)).save_pretrained(tmp_path)
    tokens, actual = rows(LENGTHS), {}
    for packs in (True, False):
        options = ModelConfig(pooling=pooling)
        network: Any = (
            builder.build_network(tmp_path, base.get_task("classification"), ("a", "b"), 0, options, pack=packs)
            .double()
            .eval()
        )
        assert unpadded.is_packed(network) is packs
        actual[packs] = step.forward(network, tokens, 0, "fp32")
        # The encoder alone for the first window, and the head on its first answer or their mean.
        encoder: Any = network.base_model
        encoder._forward_hooks.clear()
        hidden = encoder(torch.from_numpy(tokens.ids[: LENGTHS[0]].astype(np.int64))[None]).last_hidden_state
        read = hidden.mean(1) if "mean" in (classifier_pooling, pooling) else hidden[:, 0]
        expected = network.classifier(network.head(read))
        torch.testing.assert_close(actual[packs][:1], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(actual[True], actual[False], rtol=1e-10, atol=1e-12)
