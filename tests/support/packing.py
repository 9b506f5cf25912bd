"""Rows for networks without padding, and what such a network is compared by with one that pads."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from rtrain.core.ragged import TokenBatch
from rtrain.trainer import step

WORDS = 300
LENGTHS = [9, 2, 31, 31, 17, 5, 64, 3, 2, 12, 31, 1]
HEADS = {
    "ForSequenceClassification": "first",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "tokens",
    "ForMaskedLM": "tokens",
}
"""What of the encoder's answer a head reads."""


def rows(lengths: list[int], seed: int = 0) -> TokenBatch:
    """Rows of one or two windows with these lengths; no word is a padding token."""
    random = np.random.default_rng(seed)
    sizes = np.array(lengths, dtype=np.int32)
    windows = np.array([2] * (len(lengths) // 3) + [1] * (len(lengths) - 2 * (len(lengths) // 3)), dtype=np.int32)
    return TokenBatch(
        ids=random.integers(5, WORDS, sizes.sum(), dtype=np.int32),
        window_lengths=sizes,
        pair_start=random.integers(1, sizes + 1).astype(np.int32),
        windows_per_row=windows,
        targets=np.zeros(len(windows), dtype=np.float32),
        targets_per_row=np.ones(len(windows), dtype=np.int32),
        row_ids=np.arange(len(windows), dtype=np.uint64),
        teacher_logits=np.empty((len(windows), 0), dtype=np.float32),
    )


def pairwise(*axes: Iterable[str]) -> list[Any]:
    """All cases, for a parametrized test. Those that no pair of values needs are slow."""
    seen, cases = set[Any](), []
    for case in itertools.product(*axes):
        new = set(itertools.combinations(enumerate(case), 2)) - seen
        seen |= new
        cases.append(pytest.param(*case, marks=() if new else pytest.mark.slow))
    return cases


def difference(found: Any, expected: Any) -> float:
    """Over all gradients jointly, as a share of their norm."""
    pairs = [(a.grad, b.grad) for a, b in zip(found.parameters(), expected.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    there = [(a, b) for a, b in pairs if a is not None]
    wrong = sum(float((a - b).square().sum()) for a, b in there)
    return float((wrong / sum(float(b.square().sum()) for _, b in there)) ** 0.5)


def agree(plain: Any, packs: Any, head: str, padding: int = 0) -> None:
    """Assert that two networks with the same weights give rows the same answers and gradients, the first with padding
    by that token, the second without; the second also where it answers alone, by another kernel."""
    tokens = rows(LENGTHS)
    tokens.ids[[4, 20, 43, 44]] = padding  # a piece like any other, as masked texts may have it drawn
    requested = np.array([0, 3, 40, 41, 150]) if head == "ForMaskedLM" else None
    answers = [step.forward(network, tokens, padding, "fp32", requested) for network in (plain, packs)]
    assert answers[1].shape == answers[0].shape
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-10, atol=1e-12)
    weights = torch.randn(answers[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for answer in answers:
        (answer * weights).sum().backward()
    assert difference(packs, plain) < 1e-12
    with torch.inference_mode():
        reference = step.forward(packs, tokens, 0, "fp32", requested)
    torch.testing.assert_close(reference, answers[0].detach(), rtol=1e-10, atol=1e-12)
