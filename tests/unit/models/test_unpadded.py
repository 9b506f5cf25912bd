"""Encoders without padding: answers and gradients are those with it, for every architecture and head that is packed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

from rtrain.config import ModelConfig
from rtrain.core.errors import ConfigError
from rtrain.models import attention, builder, dropout, pack_layout, tp_plan, unpadded
from rtrain.tasks import base
from rtrain.trainer import step
from tests.support.packing import HEADS, LENGTHS, WORDS, agree, rows
from tests.support.tiny import make_encoder, make_modern

SMALL: dict[str, Any] = {
    **{"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 3, "max_position_embeddings": 80},
}
DISTILBERT: dict[str, Any] = {
    **{"vocab_size": WORDS, "dim": 24, "hidden_dim": 32, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 80}
}
ARCHITECTURES: dict[str, Any] = {
    "Bert": lambda: transformers.BertConfig(**SMALL),
    "Roberta": lambda: transformers.RobertaConfig(**SMALL, type_vocab_size=2, pad_token_id=1),
    "XLMRoberta": lambda: transformers.XLMRobertaConfig(**SMALL, type_vocab_size=1, pad_token_id=1),
    "Camembert": lambda: transformers.CamembertConfig(**SMALL, type_vocab_size=2, pad_token_id=1),
    "Electra": lambda: transformers.ElectraConfig(**SMALL, embedding_size=24),
    "DistilBert": lambda: transformers.DistilBertConfig(**DISTILBERT),
}


def pair(architecture: str, head: str) -> tuple[Any, Any]:
    """A network and its packed twin, in float64, trained without dropout."""
    instance = []
    for packs in (False, True):
        torch.manual_seed(1)
        options = ARCHITECTURES[architecture]()
        options.num_labels = 2 if head == "ForQuestionAnswering" else 4
        network: Any = getattr(transformers, f"{architecture}{head}")(options).double().eval()
        network.set_attn_implementation("eager")
        if packs:
            assert unpadded.supports_packing(network)
            unpadded.enable_packing(network, HEADS[head])
        instance.append(network)
    return instance[0], instance[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("head", HEADS)
def test_answers_and_gradients_are_those_with_padding(
    architecture: str, head: str, set_sizes: Callable[..., None]
) -> None:
    set_sizes(GROUP_WASTE={"cpu": 500})
    plain, packs = pair(architecture, head)
    agree(plain, packs, head, plain.config.pad_token_id or 0)


def test_the_mean_is_that_with_padding(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "encoder")
    network: Any = builder.build_network(
        folder, base.get_task("classification"), ("a", "b"), 0, ModelConfig(pooling="mean")
    )
    assert unpadded.is_packed(network)
    tokens = rows(LENGTHS)
    actual = step.forward(network.double().eval(), tokens, 0, "fp32")
    network.config._attn_implementation = "eager"
    network.rtrain_packed_attention = False
    assert not unpadded.is_packed(network)
    torch.testing.assert_close(actual, step.forward(network, tokens, 0, "fp32"), rtol=1e-10, atol=1e-12)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=80))
@settings(deadline=None)
def test_groups_are_neighbours_and_waste_little(lengths: list[int]) -> None:
    longest_first = np.array(sorted(lengths, reverse=True), dtype=np.int32)
    groups = pack_layout.group_windows(longest_first, max_waste=900)
    assert [place for begin, end in groups for place in range(begin, end)] == list(range(len(lengths)))
    for begin, end in groups:
        squares = longest_first[begin:end].astype(int) ** 2
        assert sum(squares[0] - squares) <= 900


def test_a_layout_finds_every_token_again() -> None:
    tokens = rows(LENGTHS)
    actual = pack_layout.make_layout(tokens, 3, torch.device("cpu"))
    assert sorted(actual.order.tolist()) == list(range(sum(LENGTHS)))
    assert np.diff(actual.cu_seqlens).tolist() == actual.sizes.tolist() == sorted(LENGTHS, reverse=True)
    assert (actual.cu_seqlens.dtype, int(actual.cu_seqlens[0]), actual.max_seqlen) == (torch.int32, 0, max(LENGTHS))
    for group in actual.groups:
        vectors = torch.arange((group.stop - group.start) * 3)
        assert torch.equal(vectors[group.gather][group.scatter], vectors)


@pytest.mark.parametrize(
    ("sizes", "attention_window", "sliding_window"),
    [([5, 3, 3, 1], None, None), ([9, 3, 3, 1], None, 3), ([9, 6, 3, 1], 2, None)],
)
def test_the_gradient_of_attention_with_dropout_is_the_one_of_its_answer(
    sizes: list[int], attention_window: int | None, sliding_window: int | None, set_sizes: Callable[..., None]
) -> None:
    """Whole windows, chunks, and chunks with a global first token."""
    set_sizes(MAX_CHUNK_TOKENS=4)
    layout = pack_layout.make_layout(rows(sizes), 2, torch.device("cpu"), attention_window)
    module = torch.nn.Module()

    def answer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seed: int = 0) -> torch.Tensor:
        torch.manual_seed(seed)  # the same masks for every call
        options: dict[str, Any] = {"dropout": 0.3, "layout": layout, "sliding_window": sliding_window}
        return attention.packed_attention(module, query, key, value, None, **options)[0]

    shape = (1, 2, sum(sizes), 2)
    query, key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(answer, (query, key, value))
    assert not torch.equal(answer(query, key, value, seed=1), answer(query, key, value))
    module.eval()
    assert torch.equal(answer(query, key, value, seed=1), answer(query, key, value))


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_every_window_of_every_group_answers_for_itself(kind: torch.dtype, tolerance: float) -> None:
    """Answers and gradients, beside those of each window alone in float64; groups of 1 to 31 tokens, which half
    precision computes otherwise from 16 on, and of more."""
    options = pack_layout.make_layout(rows([120, 117, 31, 25, 18, 18, 17, 16, 9, 2, 1]), 2, torch.device("cpu"))
    assert len(options.groups) > 1
    torch.manual_seed(0)
    shape = (1, 2, int(options.sizes.sum()), 8)
    parts = [torch.randn(shape, dtype=torch.float64).to(kind).requires_grad_() for _ in range(3)]
    reference = [part.detach().double().requires_grad_() for part in parts]
    actual = attention.packed_attention(torch.nn.Module(), parts[0], parts[1], parts[2], None, layout=options)[0]
    query, key, value = (part.split(options.sizes.tolist(), 2) for part in reference)
    entry = [torch.softmax(q @ k.transpose(2, 3) * 8**-0.5, -1) @ v for q, k, v in zip(query, key, value, strict=True)]
    expected = torch.cat(entry, 2).transpose(1, 2)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    (actual.double() * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for part, other in zip(parts, reference, strict=True):
        assert part.grad is not None
        torch.testing.assert_close(part.grad.double(), other.grad, rtol=4 * tolerance, atol=4 * tolerance)


def test_other_architectures_are_padded() -> None:
    options = transformers.MPNetConfig(**SMALL)
    network = transformers.MPNetForSequenceClassification(options)
    assert not unpadded.supports_packing(network)
    tokens = rows([3, 7])
    assert unpadded.count_computed_tokens(network, tokens.window_lengths) == 14
    assert step.forward(network, tokens, 1, "fp32").shape == (2, 2)


# ------------------------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_mask_is_zero_or_the_inverse_of_what_is_kept(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    actual = dropout.draw_mask((700, 301), 0.1, kind)
    assert actual.dtype == kind
    assert actual.shape == (700, 301)
    assert set(actual.unique().tolist()) == {0.0, torch.tensor(1 / 0.9, dtype=kind).item()}
    share = float((actual == 0).double().mean())
    assert abs(share - 0.1) < 5 * (0.1 * 0.9 / actual.numel()) ** 0.5
    columns = (actual == 0).double().mean(0)
    assert float(columns.std()) < 1.5 * (0.1 * 0.9 / 700) ** 0.5  # no column is kept more often than others


def test_a_network_s_dropout_layers_take_these_masks_and_their_gradients_pass_through_them() -> None:
    network = torch.nn.Sequential(torch.nn.Dropout(0.25), torch.nn.Dropout(0.0))
    dropout.use_fast_dropout(network)
    values = torch.ones(4000, requires_grad=True)
    torch.manual_seed(5)
    actual = network(values)
    torch.manual_seed(5)
    assert torch.equal(actual, dropout.draw_mask((4000,), 0.25, torch.float32))
    actual.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, actual.detach())
    assert torch.equal(network.eval()(values), values)


@pytest.mark.parametrize("fast", [True, False])
def test_cut_heads_drop_apart_and_all_else_alike_by_the_chosen_maker_of_masks(tmp_path: Path, fast: bool) -> None:
    folder, masks, after = make_encoder(tmp_path / "encoder"), [], []
    for place in range(2):
        network: Any = builder.build_network(folder, base.get_task("classification"), ("a", "b"), 0, fast_dropout=fast)
        complete = network.config._attn_implementation
        tp_plan.shard_heads(network, 2, place)
        draw = transformers.AttentionInterface()[network.config._attn_implementation].keywords["draw"]
        assert network.config._attn_implementation == f"{complete}_{place}_of_2"
        assert draw.func is (dropout.draw_mask if fast else dropout.draw_salted_torch_mask)
        torch.manual_seed(3)
        masks.append(draw((700, 301), 0.1, torch.float32) == 0)
        after.append(torch.get_rng_state())
        assert abs(float(masks[-1].double().mean()) - 0.1) < 5 * (0.1 * 0.9 / masks[-1].numel()) ** 0.5
        torch.manual_seed(3)
        assert torch.equal(draw((700, 301), 0.1, torch.float32) == 0, masks[-1])
    two = float((masks[0] & masks[1]).double().mean())
    assert abs(two - 0.01) < 5 * (0.01 * 0.99 / masks[0].numel()) ** 0.5
    assert torch.equal(*after)


@pytest.mark.parametrize("fast", [True, False])
def test_dropout_inside_cut_layers_is_a_worker_s_own(tmp_path: Path, fast: bool) -> None:
    folder, actual, after = make_modern(tmp_path, mlp_dropout=0.25), [], []
    for place in range(2):
        network: Any = builder.build_network(
            folder, base.get_task("classification"), ("a", "b"), 0, fast_dropout=fast
        ).train()
        tp_plan.use_local_inner_dropout(network, network.model.layers, place)
        torch.manual_seed(3)
        actual.append(network.model.layers[1].mlp.drop(torch.ones(700, 300)))
        after.append(torch.get_rng_state())
        assert abs(float((actual[-1] == 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 210_000) ** 0.5
        assert actual[-1].max() == pytest.approx(1 / 0.75)
    assert not torch.equal(*actual)
    assert torch.equal(*after)


def test_layers_that_are_computed_again_give_the_same_gradient_bit_for_bit(tmp_path: Path) -> None:
    folder, tokens, actual = make_encoder(tmp_path / "encoder"), rows(LENGTHS), []
    for repeated in (False, True):
        network: Any = builder.build_network(folder, base.get_task("classification"), ("a", "b"), 0).train()
        if repeated:
            builder.enable_activation_checkpointing(network)
        computed: list[int] = []
        layer = network.bert.encoder.layer[0].intermediate
        layer.register_forward_hook(lambda *_, seen=computed: seen.append(1))
        torch.manual_seed(4)
        step.forward(network, tokens, 0, "bf16").float().square().sum().backward()
        assert len(computed) == 1 + repeated
        actual.append({name: parameter.grad for name, parameter in network.named_parameters()})
    assert network.bert.embeddings.dropout.p > 0
    assert all(torch.equal(actual[0][name], actual[1][name]) for name in actual[0])


def test_a_network_that_cannot_compute_its_layers_again_says_so() -> None:
    network = transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SMALL))
    with pytest.raises(ConfigError, check=lambda error: [item.code for item in error.problems] == ["unsupported"]):
        builder.enable_activation_checkpointing(network)
