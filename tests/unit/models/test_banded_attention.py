"""Flash attention in a band, with a first token: the mathematics around the kernel, which itself runs on GPUs alone."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rtrain.models import attention, long_texts, pack_layout
from rtrain.models.attention import attend_in_band
from rtrain.torch_internals import FlashOptions, Qkv, SequenceBounds
from tests.support.packing import rows

CPU = torch.device("cpu")
HEADS = 2


def spans(ends: torch.Tensor) -> list[slice]:
    return [slice(int(begin), int(end)) for begin, end in itertools.pairwise(ends)]


def weights_of(
    query: torch.Tensor, key: torch.Tensor, scale: float, window: int | None, state: torch.Tensor, rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one window [heads, queries, keys], and dropout's mask of their weights."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if window is not None:
        places = torch.arange(len(query))
        scores = scores.masked_fill((places[:, None] - places).abs() > window, -torch.inf)
    draw = torch.Generator().manual_seed(int(state))
    return scores, (torch.rand(scores.shape, generator=draw) >= rate) / (1 - rate)


def forward(qkv: Qkv, bounds: SequenceBounds, options: FlashOptions) -> tuple[torch.Tensor, ...]:
    """`flash_forward`, one window after another."""
    (query, key, value), (scale, dropout, window) = qkv, options
    assert [int(bounds[0][-1]), int(bounds[1][-1])] == [len(query), len(key)]
    assert [int(ends.diff().max()) for ends in bounds[:2]] == list(bounds[2:])
    answer, log_sums, state = (
        torch.empty_like(query),
        query.new_empty(query.shape[1], len(query)),
        torch.randint(99, (1,)),
    )
    for asking, read in zip(spans(bounds[0]), spans(bounds[1]), strict=True):
        scores, mask = weights_of(query[asking], key[read], scale, window, state, dropout)
        log_sums[:, asking] = scores.logsumexp(-1)
        answer[asking] = torch.einsum("hqk,khd->qhd", scores.softmax(-1) * mask, value[read])
    return answer, log_sums, state, state


def backward(
    gradient: torch.Tensor, qkv: Qkv, outputs: Sequence[torch.Tensor], bounds: SequenceBounds, options: FlashOptions
) -> Qkv:
    """`flash_backward`, one window after another: `log_sums` turns scores into weights."""
    (query, key, value), (answer, log_sums, *state), (scale, dropout, window) = qkv, outputs, options
    parts = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for asking, read in zip(spans(bounds[0]), spans(bounds[1]), strict=True):
        scores, mask = weights_of(query[asking], key[read], scale, window, state[0], dropout)
        weights = torch.exp(scores - log_sums[:, asking, None])
        parts[2][read] = torch.einsum("hqk,qhd->khd", weights * mask, gradient[asking])
        by_weight = torch.einsum("qhd,khd->hqk", gradient[asking], value[read]) * mask
        by_score = weights * (by_weight - (gradient[asking] * answer[asking]).sum(-1).t()[:, :, None]) * scale
        parts[0][asking] = torch.einsum("hqk,khd->qhd", by_score, key[read])
        parts[1][read] = torch.einsum("hqk,qhd->khd", by_score, query[asking])
    return parts


KERNEL = attention.BandKernel(forward, backward)


def vectors(tokens: int, dim: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, HEADS, dim, **options).requires_grad_() for _ in range(3)]


def band_of(sizes: list[int], window: int) -> pack_layout.Band:
    band = pack_layout.make_layout(rows(sizes), HEADS, CPU, window).band
    assert band is not None
    return band


@pytest.mark.parametrize(
    ("sizes", "window"),
    [([5], 3), ([300, 41, 40, 39, 7, 1], 39), ([37, 30, 18, 9, 6, 5, 4, 3, 2, 1], 4), ([9, 9, 8], 1), ([70], 2)],
)
@pytest.mark.parametrize(("span", "dim"), [(1, 32), (8, 64), (256, 32)])
def test_answers_and_gradients_are_those_under_a_mask(
    sizes: list[int], window: int, span: int, dim: int, set_sizes: Callable[..., None]
) -> None:
    set_sizes(SPAN_TOKENS=span)
    parts, scale = vectors(sum(sizes), dim, dtype=torch.float64), 0.3
    answer = attend_in_band((parts[0], parts[1], parts[2]), band_of(sizes, window), FlashOptions(scale), KERNEL)
    window_number = torch.repeat_interleave(torch.tensor(sizes))
    places = torch.cat([torch.arange(size) for size in sizes])
    read = (window_number[:, None] == window_number) & long_texts.window_mask(places[:, None], places, window)
    query, key, value = (part.transpose(0, 1) for part in parts)
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~read, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(0, 1)
    torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(answer)
    for item, other in zip(
        torch.autograd.grad(answer, parts, gradient), torch.autograd.grad(expected, parts, gradient), strict=True
    ):
        torch.testing.assert_close(item, other, rtol=1e-10, atol=1e-12)


def test_the_gradient_with_dropout_is_the_one_of_the_answer(set_sizes: Callable[..., None]) -> None:
    set_sizes(SPAN_TOKENS=4)
    sizes = [7, 5, 1]
    band = band_of(sizes, 2)

    def answer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # the same masks for every call
        return attend_in_band((query, key, value), band, FlashOptions(0.3, 0.3), KERNEL)

    parts = vectors(sum(sizes), 2, dtype=torch.float64)
    without_dropout = attend_in_band((parts[0], parts[1], parts[2]), band, FlashOptions(0.3), KERNEL)
    assert not torch.equal(answer(*parts), without_dropout)
    assert torch.autograd.gradcheck(answer, parts)


def test_dropout_keeps_a_token_s_weights_on_average() -> None:
    """All weights of a token are equal, and the values are one."""
    sizes, rate = [64, 40], 0.5
    same, item = torch.zeros(sum(sizes), HEADS, 8), torch.ones(sum(sizes), HEADS, 8)
    torch.manual_seed(0)
    answers = [
        attend_in_band((same, same, item), band_of(sizes, 2), FlashOptions(1.0, rate), KERNEL) for _ in range(200)
    ]
    # A token reads three to six others, so that an answer's deviation is 0.5 at most.
    assert float((torch.stack(answers).mean(0) - 1).abs().max()) < 5 * 0.6 / math.sqrt(200)


def test_windows_without_tokens_out_of_reach_need_one_call() -> None:
    assert pack_layout.make_layout(rows([5, 3]), HEADS, CPU, 4).band is None
    assert pack_layout.make_layout(rows([5, 3]), HEADS, CPU).band is None
    band = band_of([6, 5, 3], 4)
    assert (band.num_tokens, band.reaches_first.tolist()) == (6, [True] * 5 + [False])
