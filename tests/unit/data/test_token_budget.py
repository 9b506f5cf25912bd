"""No engine call takes more tokens than it may, with padding: in the batcher, in a predictor, in a teacher's pass."""

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.config import ServeConfig
from rtrain.core.ragged import EncodedRow, Floats, Head, TokenWindow
from rtrain.inference import predictor as inference_predictor
from rtrain.inference.predictor import Predictor, split_windows
from serve.app import build_app
from serve.batching.batcher import Batcher
from serve.batching.scheduler import BatchLimits
from tests.support import quantizing
from tests.support.serving import client
from tests.support.tiny import CORPUS, make_task_artifact
from tests.unit.serve.test_batcher import deadline, numbers, run

WINDOWS = {"stride": 4, "max_windows": 64, "pooling": "mean"}
HEADS = {
    "classification": Head(("login", "parcel", "refund"), WINDOWS),
    "token_tags": Head(("O", "B-X"), WINDOWS),
    "masked_lm": Head((), {"mask": "[MASK]", "mask_id": 4, "special": [0, 1, 2, 3, 4], "vocabulary": 300, **WINDOWS}),
}
"""Answers by window, by token, and by some tokens."""
TEXTS = [" and ".join(["[MASK] " + text] * (1 + number % 9)) for number, text in enumerate(CORPUS)]

# -------------------------------------------------------------------------------------------------------- the batcher


def long(value: int, windows: int, tokens: int = 8) -> EncodedRow:
    return EncodedRow([value] * tokens * windows, [TokenWindow(tokens, tokens)] * windows, False, [])


def padded_tokens(encoded: list[EncodedRow]) -> int:
    windows = [window.num_tokens for row in encoded for window in row.windows]
    return len(windows) * max(windows)


def calls_of(
    rows: list[EncodedRow], budget: int | None, most_rows: int = 32
) -> tuple[list[list[EncodedRow]], list[Floats]]:
    """Engine calls for rows that were all queued at once, and the answers."""
    calls: list[list[EncodedRow]] = []

    def engine(encoded: list[EncodedRow]) -> Floats:
        calls.append(encoded)
        return np.array([[2 * row.ids[0]] for row in encoded], dtype=np.float32)

    answers: list[Floats] = []

    async def main() -> None:
        batcher = Batcher(engine, BatchLimits(max_batch_size=most_rows, max_batch_tokens=budget))
        answers.extend(await batcher.submit(rows, deadline()))
        batcher.close()

    run(main)
    return calls, answers


@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=20),
    budget=st.integers(1, 200),
    most_rows=st.integers(1, 5),
)
def test_no_call_is_larger_than_the_budget(shapes: list[tuple[int, int]], budget: int, most_rows: int) -> None:
    rows = [long(value, *shape) for value, shape in enumerate(shapes)]
    calls, answers = calls_of(rows, budget, most_rows)
    assert all(len(call) == 1 or padded_tokens(call) <= budget for call in calls)
    assert all(len(call) <= most_rows for call in calls)
    assert sorted(row.ids[0] for call in calls for row in call) == list(range(len(rows)))
    assert numbers(answers) == [[2 * value] for value in range(len(rows))]


# ------------------------------------------------------------------------------------------------------ the predictor


@given(lengths=st.lists(st.integers(1, 50), max_size=30), max_tokens=st.integers(1, 300))
def test_parts_are_all_windows_in_their_order_under_the_budget(lengths: list[int], max_tokens: int) -> None:
    results = list(split_windows(lengths, max_tokens))
    assert [place for part in results for place in range(part.start, part.stop)] == list(range(len(lengths)))
    sizes = [(part.stop - part.start, max(lengths[part])) for part in results]
    assert all(count == 1 or count * longest <= max_tokens for count, longest in sizes)


@pytest.mark.parametrize(
    ("lengths", "calls"), [([512] * 40, [32, 8]), ([1024] * 10, [8, 2]), ([2048] * 3, [2, 1]), ([8192, 8192], [1, 1])]
)
def test_long_windows_share_fewer_calls(lengths: list[int], calls: list[int]) -> None:
    """The squares of their lengths are as many as of 32 windows of 512 tokens."""
    assert [part.stop - part.start for part in split_windows(lengths, inference_predictor.MAX_TOKENS_PER_CALL)] == calls


class Recorded:
    """An engine, and the tokens of each of its calls, padding included, and their shapes."""

    def __init__(self, predictor: Predictor):
        self.inner, self.sizes, self.shapes = predictor._engine, list[int](), set[tuple[int, ...]]()
        predictor._engine = self

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        self.sizes.append(inputs["input_ids"].size)
        self.shapes.add(inputs["input_ids"].shape)
        return self.inner.logits(inputs)


@pytest.mark.parametrize("task", sorted(HEADS))
def test_answers_are_the_same_in_parts(tmp_path: Path, task: str) -> None:
    predictor = Predictor.load(make_task_artifact(tmp_path / "artifact", task, HEADS[task], max_tokens=16), threads=1)
    encoded = predictor.encode(TEXTS)
    assert max(len(row.windows) for row in encoded) > 8
    engine = Recorded(predictor)
    full = predictor.run(encoded)
    assert len(engine.sizes) == 1
    for maximum in (16, 64, 100):
        engine.sizes.clear()
        cut = predictor.run(encoded, max_tokens=maximum)
        assert len(engine.sizes) > 3
        assert max(engine.sizes) <= maximum
        assert max(float(np.abs(a - b).max(initial=0)) for a, b in zip(full, cut, strict=True)) < 1e-5


# ------------------------------------------------------------------------------------- the memory of shapes (OpenVINO)


def int8(folder: Path, max_tokens: int = 64) -> Predictor:
    store = quantizing.make(folder, rows=40, max_tokens=max_tokens)
    return Predictor.load(quantizing.complete(store, folder / "int8", calibration_rows=8), threads=1)


async def ask(predictor: Predictor, requests: int, most_words: int, after: Callable[[int], None]) -> None:
    """Requests of 1 to 32 texts of 1 to so many words, one after another; `after` gets the number of each."""
    draws, words = random.Random(0), " ".join(CORPUS).split()
    async with client(build_app(predictor, ServeConfig())) as session:
        for number in range(1, requests + 1):
            texts = [
                " ".join(draws.choices(words, k=draws.randint(1, most_words))) for _ in range(draws.randint(1, 32))
            ]
            reply = await session.post("/predict", json={"inputs": texts})
            assert reply.status_code == 200
            assert len(reply.json()) == len(texts)
            after(number)


def test_requests_of_all_sizes_reach_a_graph_in_few_shapes(tmp_path: Path) -> None:
    """It keeps a plan for each of them: ten numbers of rows up to 32, eight of columns up to 64."""
    predictor = int8(tmp_path)
    engine = Recorded(predictor)
    asyncio.run(ask(predictor, 120, 60, lambda number: None))
    assert 20 < len(engine.shapes) <= 80
    assert max(engine.sizes) <= ServeConfig().max_batch_tokens
    few, engine.shapes = len(engine.shapes), set()
    predictor.outputs(predictor.encode([" ".join(["parcel"] * (1 + n % 60)) for n in range(200)]), batch_size=7)
    assert len(engine.shapes) <= 16 < few  # rows of files too: 7 at a time, as 8, and the rest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_endpoint_does_not_grow_with_its_requests(tmp_path: Path) -> None:
    """10,000 requests of 1 to 32 texts of up to 500 tokens."""
    resident = dict[int, int]()
    process = psutil.Process()

    def after(number: int) -> None:
        if number % 1000 == 0:
            resident[number] = process.memory_info().rss

    asyncio.run(ask(int8(tmp_path, max_tokens=512), 10_000, 500, after))
    assert resident[10_000] - resident[1_000] <= 50e6, resident
